"""The session: what a client owns between entering and leaving its block.

``lifecycle`` starts and stops it, ``session`` owns its tasks and tells its end.
"""
