"""A conformance suite for engine cores: what anything that speaks the wire must do, check by check.

Owns a front end of its own (sockets and codec are shared with the client, its decisions are not), the checks, the
known deviations of vLLM's releases and the reports. ``anyengine check`` is its command line.
"""

from __future__ import annotations

from .deviations import Deviation, deviations_of
from .outcomes import CheckResult, Outcome
from .registry import FAMILIES, Check, registered, select
from .report import Report
from .running import run
from .starting import AttachedEngine, EngineTarget

__all__ = [
    "FAMILIES",
    "AttachedEngine",
    "Check",
    "CheckResult",
    "Deviation",
    "EngineTarget",
    "Outcome",
    "Report",
    "deviations_of",
    "registered",
    "run",
    "select",
]
