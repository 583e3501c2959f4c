"""The clients: one session in one task group, and what is built on it.

``core_client`` sends and receives engine-core messages; ``client`` turns text into request streams; beside them stand
the groups of methods that they take together. ``session/`` starts, owns and ends; ``engines/`` knows each rank;
``inputs/`` makes requests of prompts and parameters; ``requests/`` takes them from admission to the last output.
"""
