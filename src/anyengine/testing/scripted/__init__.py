"""A scripted engine: speaks the wire protocol under a script of switches, and logs everything that it receives.

For tests of clients and front ends. It runs as a process behind ZeroMQ, or as a twin in memory, by the same script::

    scripted = ScriptedTwin(Script(max_running=2, outputs_after_abort=5))
    async with EngineClient(engine=scripted.engine) as client:
        ...
    assert scripted.received("abort") == []

What it says is written by hand, independent of the package's own encoder. Tokens depend on the prompt alone:
:func:`expected_tokens`. ``anyengine mock`` runs it behind any front end.
"""

from __future__ import annotations

from .engines import ScriptedEngine, ScriptedProcess, ScriptedTwin
from .messages import expected_tokens
from .records import Record, read_records
from .script import End, Fault, RequestRule, Script, StartupStage, UtilityRule

__all__ = [
    "End",
    "Fault",
    "Record",
    "RequestRule",
    "Script",
    "ScriptedEngine",
    "ScriptedProcess",
    "ScriptedTwin",
    "StartupStage",
    "UtilityRule",
    "expected_tokens",
    "read_records",
]
