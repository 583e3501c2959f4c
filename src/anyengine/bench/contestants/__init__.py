"""Programs that generate the same thing with different engines, on demand, and say how long it took.

Each is a script of its own, since they need different environments: they read one JSON line with ``num_seqs``,
``input_tokens``, ``output_tokens`` and ``seed`` at a time from standard input, and answer with one of their own.
"""
