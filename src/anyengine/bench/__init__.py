"""Benchmarks: what the engine and the client cost, beside what people would use instead, in one run."""
