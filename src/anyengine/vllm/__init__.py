"""Unmodified vLLM engine cores: what starts them, and what a client understands of their arguments.

vLLM is never imported in the client's process: :mod:`.launcher` is a program that the interpreter of vLLM's environment
runs by its path. The rest is pure."""
