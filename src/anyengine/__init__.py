"""anyengine: a structured-concurrency client for LLM engine cores."""
