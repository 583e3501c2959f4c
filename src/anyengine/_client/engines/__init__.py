"""What a session knows of each engine and asks of it: limits, calls and fences, life signs, deaths and restarts."""
