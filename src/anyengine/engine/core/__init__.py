"""The embedded engine core: scheduling, stop conditions, pauses, utility calls. Pure of torch and of sockets."""
