"""The clients: one session in one task group, and what is built on it.

``lifecycle`` starts and stops a session; ``session`` owns its tasks and tells its end; ``core_client`` sends and
receives engine-core messages; ``client`` turns text into request streams (``request_builder``, ``request_desk``,
``request_stream``).
"""
