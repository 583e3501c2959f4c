"""Engines for the client's tests: the real engine core with a toy model, and a scripted peer that misbehaves on
purpose."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from anyengine import CommandEngine, EmbeddedEngine, EngineClient

__all__ = ["generates", "misbehaving", "mutant", "toy"]

RUNNER = "anyengine.testing.toy_runner:create_runner"


def toy(*, max_num_seqs: int = 256, **options: Any) -> EmbeddedEngine:
    """Our engine core in a process of its own, with a model that needs no torch."""
    return EmbeddedEngine(runner=RUNNER, runner_options=options, max_num_seqs=max_num_seqs)


def misbehaving(behaviour: str, *args: str) -> CommandEngine:
    """A peer that speaks the wire by hand; see ``scripted_peer.py`` for what it can do."""
    script: Sequence[str] = (sys.executable, str(Path(__file__).with_name("scripted_peer.py")), behaviour, *args)
    return CommandEngine(argv=tuple(script))


def mutant(fault: str = "") -> CommandEngine:
    """Our engine core with a fault of its start or its end; see ``mutant_engine.py``."""
    return CommandEngine(argv=(sys.executable, str(Path(__file__).with_name("mutant_engine.py")), fault))


def generates(client: EngineClient) -> None:
    """Let ``client`` know of an engine that answers nothing what it would ask before the first request."""
    limits = client.core.session.connection.limits
    limits[0] = msgspec.structs.replace(limits[0], tasks=frozenset(("generate",)))
    client._entered_desk().builder.take_limits(limits[0])
