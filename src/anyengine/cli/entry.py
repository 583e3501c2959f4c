"""``main()``: from arguments to an exit code.

Owns exit codes, the choice of event loop and what is said when something fails. Codes: 0 an answer, 1 an error, 2 wrong
usage, 128 + n ended by signal n (130 for Ctrl-C, 141 when the reader of our output has gone).
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from importlib.util import find_spec
from signal import SIGINT, SIGPIPE
from typing import TYPE_CHECKING, NoReturn

import anyio

from anyengine.cli.bench_client import ClientBenchOptions, run_client_bench
from anyengine.cli.bench_death import DeathBenchOptions, run_death_bench
from anyengine.cli.bench_engine import EngineBenchOptions, run_engine_bench
from anyengine.cli.bench_prefix import PrefixBenchOptions, run_prefix_bench
from anyengine.cli.check_options import CheckOptions
from anyengine.cli.engine import EngineOptions, check_place, serve_front_end
from anyengine.cli.mock import MockOptions, serve_mock
from anyengine.cli.options import parse_arguments
from anyengine.cli.rendering import error_lines
from anyengine.cli.run import OutputClosedError, answer_prompt, until_signal
from anyengine.exceptions import EngineError, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyengine.cli.options import Options, RunOptions

__all__ = ["main"]

_FAILED, _USAGE, _SIGNAL = 1, 2, 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the program's exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["frontend"]:  # typed by a program, which may know more arguments than we do
        from anyengine.cli.frontend import serve_frontend

        return serve_frontend(given[1:])
    options = parse_arguments(arguments)
    try:
        match options:
            case EngineBenchOptions():
                return _bench_engine(options)
            case CheckOptions():
                return _check(options)
            case EngineOptions():
                return _serve(options)
            case MockOptions():
                return _mock(options)
            case DeathBenchOptions():
                return _bench(options)
            case ClientBenchOptions():
                return _bench_client(options)
            case PrefixBenchOptions():
                return _bench_prefix(options)
            case _:
                return _run(options)
    except KeyboardInterrupt:  # before the event loop has its handler, or while standard input is read
        return _SIGNAL + SIGINT
    except OutputClosedError:
        # The interpreter flushes standard output at its exit, which would fail once more, and say so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGNAL + SIGPIPE
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever went wrong is told in a line
        return _fail(error, options)


def _serve(options: EngineOptions) -> int:
    try:
        options.check()
        engine = options.engine()
    except ValueError as error:
        _fail(error, options)
        return _USAGE
    serve_front_end(options, engine)
    return 0


def _mock(options: MockOptions) -> int:
    try:
        check_place(options.handshake, options.rank)
        script = options.make_script()
    except ValueError as error:
        _fail(error, options)
        return _USAGE
    return serve_mock(options, script)


def _bench(options: DeathBenchOptions) -> int:
    try:
        options.check()
        _check_backend(options)
    except ValueError as error:
        _fail(error, options)
        return _USAGE
    return run_death_bench(options)


def _bench_client(options: ClientBenchOptions) -> int:
    try:
        options.check()
    except ValueError as error:
        _fail(error, options)
        return _USAGE
    return run_client_bench(options)


def _bench_engine(options: EngineBenchOptions) -> int:
    try:
        options.check()
    except ValueError as error:
        _fail(error, options)
        return _USAGE
    return run_engine_bench(options)


def _bench_prefix(options: PrefixBenchOptions) -> int:
    try:
        options.check()
    except ValueError as error:
        _fail(error, options)
        return _USAGE
    return run_prefix_bench(options)


def _run(options: RunOptions) -> int:
    try:
        params, engine = options.sampling_params(), options.engine()
        _check_backend(options)
        prompt = _read_prompt(options.prompt)
    except ValueError as error:  # RequestRejected is one, too
        _fail(error, options)
        return _USAGE
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    number = anyio.run(
        until_signal,
        functools.partial(answer_prompt, options, prompt, engine, params),
        backend=options.backend,
        backend_options={"use_uvloop": True} if options.uvloop else {},
    )
    if number is None:
        return 0
    if not options.quiet:
        print("\nanyengine: interrupted; the engine has been stopped", file=sys.stderr)
    return _SIGNAL + number


def _check(options: CheckOptions) -> int:
    from anyengine.cli.check import check_engine  # loads the suite, which `run` does not need

    try:
        options.check()
        target = options.target()
        _check_backend(options)
        return check_engine(options, target)
    except ValueError as error:
        _fail(error, options)
        return _USAGE


def _check_backend(options: RunOptions | CheckOptions | DeathBenchOptions) -> None:
    wanted = "uvloop" if options.uvloop else options.backend
    if find_spec(wanted) is None:
        raise RequestRejected(
            f"{wanted} is not installed", parameter="backend", value=wanted, remedy=f'pip install "anyengine[{wanted}]"'
        )


def _read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for ``-``.

    Raises:
        RequestRejected: there is nothing in it, or it is not text.
    """
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            _reject("standard input is not UTF-8 text", "convert it first, for example with iconv", error)
    if not prompt.strip():
        _reject("the prompt is empty", 'give a question, such as "What is the capital of France?"')
    return prompt


def _reject(message: str, remedy: str, cause: Exception | None = None) -> NoReturn:
    raise RequestRejected(message, parameter="prompt", remedy=remedy) from cause


def _fail(error: Exception, options: Options) -> int:
    if options.traceback:
        traceback.print_exception(error)
    text = error_lines(error)
    if not isinstance(error, EngineError | OSError | ValueError) and not options.traceback:
        text = f"error: unexpected {type(error).__name__}: {error}\n  try: --traceback, and report what it shows\n"
    sys.stderr.write(text)
    return _FAILED
