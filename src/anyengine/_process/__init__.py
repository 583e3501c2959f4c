"""Engine processes: started with :mod:`subprocess`, watched without threads, stopped and reaped by their owner."""
