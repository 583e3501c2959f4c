"""Hypothesis profiles, chosen by ``HYPOTHESIS_PROFILE``: ``dev`` (default), ``ci`` (reproducible) and ``deep`` (long).

Owns how hard property tests try; must not know any of them. Kept out of the public names: it sets global state.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["deep_profile", "load_profile"]

_VARIABLE = "HYPOTHESIS_PROFILE"


def load_profile() -> None:
    """Register the three profiles and load the one that the environment names."""
    # Shared machines are slow at random; a slow example is not a wrong one.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("dev", patient, max_examples=50)
    settings.register_profile("ci", patient, max_examples=200, derandomize=True, database=None, print_blob=True)
    settings.register_profile("deep", patient, max_examples=20_000, stateful_step_count=100, print_blob=True)
    settings.load_profile(os.environ.get(_VARIABLE, "dev"))


def deep_profile() -> bool:
    """Whether the environment asks for the deep profile."""
    return os.environ.get(_VARIABLE) == "deep"
