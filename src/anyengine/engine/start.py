"""Puts an engine process together: launch line, status lines, model runner, core, server; and turns a failure into a
last status.

Owns the choice of the model runner and the exit code. Imports torch only by importing the runner that asks for it.
"""

from __future__ import annotations

import importlib
import logging
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import msgspec

from anyengine._process.status import ChildError, Status, encode_status
from anyengine.config import EmbeddedEngine, EngineLaunch
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.interfaces import ModelRunner
from anyengine.engine.serving.server import serve

__all__ = ["run_engine"]

RunnerFactory = Callable[[EmbeddedEngine, Callable[[Status], None]], ModelRunner]


def run_engine(launch_line: bytes, status_fd: int, *, on_stop: Callable[[Callable[[], None]], None]) -> int:
    """Run an engine to its end; its exit code. ``on_stop`` is :func:`~.serving.server.serve`'s."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def report(status: Status) -> None:
        with suppress(BrokenPipeError):  # nobody listens (any more); if the host is gone, the lifeline knows
            os.write(status_fd, encode_status(status))

    report(Status("importing"))
    exit_code = 0
    try:
        launch = msgspec.json.decode(launch_line, type=EngineLaunch)
        serve(launch, create_engine=lambda: _create_core(launch, report), report=report, on_stop=on_stop)
    except BaseException as exc:  # noqa: BLE001 - SystemExit from a library included: whatever ends an engine is reported
        text = traceback.format_exc()
        report(Status("failed", error=ChildError(_qualified_name(exc), str(exc), text)))
        logging.getLogger(__name__).critical("the engine failed\n%s", text)
        exit_code = 1
    return exit_code


def _create_core(launch: EngineLaunch, report: Callable[[Status], None]) -> EngineCore:
    config = launch.engine or EmbeddedEngine()
    return EngineCore(_runner_factory(config.runner)(config, report), config, rank=launch.rank)


def _runner_factory(name: str) -> RunnerFactory:
    path = "anyengine.engine.runner.model_runner:create_runner" if name == "transformers" else name
    module, _, attribute = path.partition(":")
    return cast(RunnerFactory, getattr(importlib.import_module(module), attribute))


def _qualified_name(exc: BaseException) -> str:
    kind = type(exc)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
