"""The process around an engine: its lifeline, its sockets and threads, the busy loop between them. Knows no model."""
