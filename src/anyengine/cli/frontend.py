"""``anyengine frontend``: an application of the user's as the front end that ``vllm serve`` starts.

Owns what such a parent hands over (sockets, ranks, settings), the choice of application and event loop, and the end on
SIGTERM. The arguments are those of vLLM 0.32 and 0.33 (``vllm.v1.utils.RustFrontendProcessManager``); others are left
alone, since a newer parent may have more to say.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import os
import socket as socket_module
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from signal import SIGTERM
from typing import Any, TypeAlias

import anyio
import msgspec

from anyengine import EngineClient, InheritedEngine
from anyengine.cli.rendering import error_lines
from anyengine.cli.run import until_signal
from anyengine.vllm.arguments import understand_arguments

__all__ = [
    "APP_VARIABLE",
    "BACKEND_VARIABLE",
    "Application",
    "FrontendOptions",
    "load_application",
    "parse_frontend_arguments",
    "serve_frontend",
]

APP_VARIABLE = "ANYENGINE_FRONTEND_APP"
BACKEND_VARIABLE = "ANYENGINE_BACKEND"

_logger = logging.getLogger("anyengine.frontend")

_FAILED, _USAGE, _SIGNAL = 1, 2, 128
_READY_TIMEOUT_S = 600.0
_SETTLE_S = 2.0  # the parent kills what has not ended 5 s after its SIGTERM

Application: TypeAlias = Callable[[EngineClient, socket_module.socket, Mapping[str, Any]], Awaitable[None]]
"""What the user provides: it is given the client, the listening HTTP socket and the parent's arguments."""

_HELP = f"""environment:
  {APP_VARIABLE}   module:function, the application:
      async def function(client: EngineClient, listener: socket.socket, args: Mapping[str, Any]) -> None
  {BACKEND_VARIABLE}        asyncio (default) or trio

example:
  {APP_VARIABLE}=myapp:serve VLLM_USE_RUST_FRONTEND=1 VLLM_RUST_FRONTEND_PATH="$(command -v anyengine)" \\
      vllm serve Qwen/Qwen3-0.6B
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions:
    """What the parent says on the command line. The descriptors are of sockets that it has bound."""

    listen_fd: int
    input_listener_fd: int
    output_listener_fd: int
    engine_start_index: int
    engine_count: int
    args_json: Mapping[str, Any]

    def engine(self) -> InheritedEngine:
        """Raises:
        ValueError: a value is out of range.
        """
        return InheritedEngine(
            input_fd=self.input_listener_fd,
            output_fd=self.output_listener_fd,
            ranks=self.engine_count,
            start_rank=self.engine_start_index,
            model_dir=self._model_dir(),
            args=self._engine_args(),
        )

    def ready_timeout_s(self) -> float:
        """How long the parent lets its engines start."""
        value = self.args_json.get("engine_ready_timeout_secs")
        return float(value) if isinstance(value, int | float) and value > 0 else _READY_TIMEOUT_S

    def _engine_args(self) -> Mapping[str, Any]:
        """What the parent's engines were started with: it says what is not the default, so the rest is."""
        if not self.args_json:
            return {}
        try:
            return msgspec.structs.asdict(understand_arguments({"model": self._model(), **self.args_json}))
        except ValueError as error:  # of a newer parent
            _logger.warning("the parent's arguments are not understood, so none of them is known: %s", error)
            return {}

    def _model(self) -> Any:
        return self.args_json.get("model") or self.args_json.get("model_tag")

    def _model_dir(self) -> str | None:
        """The directory with model and tokenizer, if the parent serves a local one."""
        model = self._model()
        if self.args_json.get("tokenizer", model) != model:
            _logger.warning("the parent's tokenizer is not its model's: prompts must be token ids")
            return None
        return model if isinstance(model, str) and Path(model).is_dir() else None


def parse_frontend_arguments(arguments: Sequence[str]) -> FrontendOptions:
    """What stands behind ``frontend`` on the command line. Exits with 2 and a usage message when it makes no sense."""
    parser = ArgumentParser(
        prog="anyengine frontend",
        description="Run an application of yours between the engines and the sockets of `vllm serve`, which starts it.",
        epilog=_HELP,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what a newer parent says may begin like one of these
    )
    for name in ("--listen-fd", "--input-listener-fd", "--output-listener-fd"):
        parser.add_argument(name, type=int, required=True, metavar="N")
    parser.add_argument("--engine-start-index", type=int, default=0, metavar="N")
    parser.add_argument("--engine-count", type=int, default=1, metavar="N")
    parser.add_argument("--args-json", type=_json_object, default={}, metavar="OBJECT")
    known, unknown = parser.parse_known_args(arguments)
    # Names only: a value may be a secret. It is engines that say whether they need a coordinator.
    expected = ("--data-parallel-size", "--coordinator-address")
    words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if names := [word for word in words if not word.startswith(expected)]:
        _logger.warning("the parent says more than this front end knows, which is left alone: %s", ", ".join(names))
    return FrontendOptions(**vars(known))


def serve_frontend(arguments: Sequence[str]) -> int:
    """Serve the parent's engines through the user's application until that returns or SIGTERM comes; the exit code."""
    options = parse_frontend_arguments(arguments)
    try:
        application = load_application(os.environ.get(APP_VARIABLE, ""))
        backend = _backend(os.environ.get(BACKEND_VARIABLE) or "asyncio")
        engine = options.engine()
    except ValueError as error:
        sys.stderr.write(error_lines(error))
        return _USAGE
    try:
        number = anyio.run(until_signal, functools.partial(_serve, options, engine, application), backend=backend)
    except Exception as error:  # noqa: BLE001 - the outermost frame: the parent has only an exit code and this text
        traceback.print_exception(error)
        return _FAILED
    return _SIGNAL + number if number not in (None, SIGTERM) else 0


async def _serve(options: FrontendOptions, engine: InheritedEngine, application: Application) -> None:
    with socket_module.socket(fileno=options.listen_fd) as listener:
        async with EngineClient(
            engine=engine, startup_timeout_s=options.ready_timeout_s(), shutdown_grace_s=_SETTLE_S
        ) as client:
            listener.setblocking(False)
            listener.listen()  # bound by the parent; nobody can connect before there is somebody to answer
            running: object = application(client, listener, options.args_json)
            if not inspect.isawaitable(running):
                raise TypeError(f"{APP_VARIABLE} must name an async function; the one it names returned {running!r}")
            await running


def load_application(name: str) -> Application:
    """The application that ``name`` stands for: ``module:function``, importable from the working directory too.

    Raises:
        ValueError: there is none of that name; the message says what to do.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(
            f"{APP_VARIABLE}={name!r} must name your application as module:function, where function is "
            "`async def function(client, listener, args)`: it serves the listening socket by means of the client"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does; a console script leaves it out
    try:
        application: object = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{APP_VARIABLE}={name!r} cannot be loaded: {error}") from error
    if not callable(application) or not _takes_three(application):
        raise ValueError(f"{APP_VARIABLE}={name!r} is {application!r}, not a function of (client, listener, args)")
    return application


def _takes_three(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # made in C: it does not say
        return True
    return True


def _backend(name: str) -> str:
    if name not in ("asyncio", "trio"):
        raise ValueError(f"{BACKEND_VARIABLE}={name!r} must be asyncio or trio")
    if find_spec(name) is None:
        raise ValueError(f'{BACKEND_VARIABLE}={name!r} is not installed: pip install "anyengine[{name}]"')
    return name


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentTypeError("it is no JSON object")
    return value
