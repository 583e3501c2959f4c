"""Property tests drive the sans-I/O parts; they get the same profiles and leak checks as the other tests."""

from __future__ import annotations

from anyengine.testing._profiles import load_profile
from anyengine.testing.pytest_plugin import *  # noqa: F403 - fixtures and hooks must stand in a conftest's namespace

load_profile()
