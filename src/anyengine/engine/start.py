"""Puts an engine process together: model runner, core, server; and, for a host, launch line and status lines.

Owns the choice of the model runner and the exit code. Imports torch only by importing the runner that asks for it.
"""

from __future__ import annotations

import importlib
import logging
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

import msgspec

from anyengine._process.status import ChildError, Status, encode_status
from anyengine.config import EmbeddedEngine, EngineLaunch
from anyengine.engine.core.data_parallel import DataParallelCore
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.interfaces import CollectiveRunner, ModelRunner
from anyengine.engine.serving.server import Attachment, OnFailure, OnStop, serve

__all__ = ["create_core", "failure_status", "run_attached_engine", "run_engine", "runner_factory"]

RunnerFactory = Callable[[EmbeddedEngine, Callable[[Status], None]], ModelRunner]


def run_engine(launch_line: bytes, status_fd: int, *, on_stop: OnStop) -> int:
    """Run the engine of a host to its end; its exit code. ``on_stop`` is :func:`~.serving.server.serve`'s."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def report(status: Status) -> None:
        with suppress(BrokenPipeError):  # nobody listens (any more); if the host is gone, the lifeline knows
            os.write(status_fd, encode_status(status))

    reported = False

    def fail(exc: BaseException) -> None:
        nonlocal reported
        if not reported:
            reported = True
            report(failure_status(exc))
            logging.getLogger(__name__).critical("the engine failed\n%s", traceback.format_exc())

    report(Status("importing"))
    exit_code = 0
    try:
        launch = msgspec.json.decode(launch_line, type=EngineLaunch)
        attachment = Attachment(handshake_address=launch.handshake_address, rank=launch.rank)
        config = launch.engine or EmbeddedEngine()
        run_attached_engine(attachment, config, report=report, on_stop=on_stop, on_failure=fail)
    except BaseException as exc:  # noqa: BLE001 - SystemExit from a library included: whatever ends an engine is reported
        fail(exc)
        exit_code = 1
    return exit_code


def run_attached_engine(
    attachment: Attachment,
    config: EmbeddedEngine,
    *,
    report: Callable[[Status], None],
    on_stop: OnStop,
    on_failure: OnFailure | None = None,
) -> None:
    """Run our engine core behind the front end that ``attachment`` names, to a graceful end.

    Raises:
        Exception: whatever the start-up or the engine raised.
    """

    create_engine = partial(create_core, config, attachment.rank, report)
    serve(attachment, create_engine=create_engine, report=report, on_stop=on_stop, on_failure=on_failure)


def create_core(config: EmbeddedEngine, rank: int, report: Callable[[Status], None]) -> EngineCore:
    """The engine core with its model, loaded.

    Raises:
        Exception: whatever the model runner raised.
    """
    runner = runner_factory(config.runner)(config, report)
    if isinstance(runner, CollectiveRunner):
        return DataParallelCore(runner, config, rank=rank)
    return EngineCore(runner, config, rank=rank)


def failure_status(exc: BaseException) -> Status:
    """What tells a host why its engine ends. Inside the handler of ``exc``."""
    return Status("failed", error=ChildError(_qualified_name(exc), str(exc), traceback.format_exc()))


def runner_factory(name: str) -> RunnerFactory:
    """What makes the model runner ``name``.

    Raises:
        ValueError: there is no such module, or no such factory in it.
        ImportError: its module cannot be imported.
    """
    path = "anyengine.engine.runner.model_runner:create_runner" if name == "transformers" else name
    module, _, attribute = path.partition(":")
    try:
        return cast(RunnerFactory, getattr(importlib.import_module(module), attribute))
    except (ModuleNotFoundError, AttributeError) as exc:
        if name == "transformers" or (isinstance(exc, ModuleNotFoundError) and exc.name != module):
            raise  # what the runner's module itself lacks
        raise ValueError(f"runner={name!r} cannot be found, which must be 'module:factory': {exc}") from exc


def _qualified_name(exc: BaseException) -> str:
    kind = type(exc)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
