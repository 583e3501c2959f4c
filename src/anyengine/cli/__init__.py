"""The command line, ``anyengine``: a thin user of the public client, with no knowledge of its own of engines."""

from __future__ import annotations

from anyengine.cli.entry import main

__all__ = ["main"]
