"""An engine that nobody started, between two front ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, threading
from anyengine.engine.serving.lifeline import Lifeline

lifeline = Lifeline(None)
lifeline.watch()
asked = threading.Event()
lifeline.on_stop(asked.set)
os.kill(os.getpid(), signal.SIGTERM)
asked.wait()
print("asked", flush=True)  # too late: the loop that would have heard it has ended with its front ends
lifeline.on_stop(None)
print("waiting for the next front end", flush=True)
signal.pause()
"""


def test_a_stop_that_comes_too_late_for_one_front_end_does_not_wait_for_the_next() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (0, b"asked\n")
