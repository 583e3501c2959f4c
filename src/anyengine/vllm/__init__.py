"""Starts unmodified vLLM engine cores. vLLM is never imported in the client's process: :mod:`.launcher` is a program
that the interpreter of vLLM's environment runs by its path."""
