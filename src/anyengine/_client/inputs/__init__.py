"""From what a user writes, a prompt and its parameters, to an engine-core request. Nothing here sends."""
