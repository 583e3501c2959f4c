"""What the user typed, as frozen options.

Owns names, defaults and help of the command line. Values are checked where they are used: sampling parameters by
``SamplingParams``, the engine's by ``EmbeddedEngine``; so this module starts nothing and reads nothing.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias, get_args

from anyengine import EmbeddedEngine, SamplingParams
from anyengine.cli.bench import add_bench_command
from anyengine.cli.bench_client import ClientBenchOptions
from anyengine.cli.bench_death import DeathBenchOptions
from anyengine.cli.bench_engine import EngineBenchOptions
from anyengine.cli.bench_prefix import PrefixBenchOptions
from anyengine.cli.check_options import CheckOptions, add_check_command
from anyengine.cli.engine import EngineOptions, add_engine_options
from anyengine.cli.mock import MockOptions, add_mock_command
from anyengine.config import DEFAULT_MODEL, DType

__all__ = ["Options", "RunOptions", "parse_arguments"]

_EXAMPLES = """examples:
  anyengine run "What is the capital of France?"
  anyengine run --backend trio --temperature 0.7 --seed 1 "Tell me a story."
  git diff | anyengine run --system "Review this change." -
"""
_ENGINE_EXAMPLES = """examples (the front end on the same host, then on another one):
  vllm serve MODEL --data-parallel-size-local 0 --data-parallel-rpc-port 29550
  anyengine engine MODEL --handshake tcp://127.0.0.1:29550

  vllm-rs serve MODEL --data-parallel-size-local 0 --data-parallel-address 10.0.0.1 --data-parallel-rpc-port 29550
  anyengine engine MODEL --handshake tcp://10.0.0.1:29550 --stay
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of ``anyengine run``. ``None``: not given, so the library's default holds."""

    prompt: str
    system: str | None
    raw: bool
    backend: str
    uvloop: bool
    model: str
    dtype: DType
    max_model_len: int | None
    max_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    json: bool
    quiet: bool
    traceback: bool

    def sampling_params(self) -> SamplingParams:
        """Raises:
        RequestRejected: a value is out of range.
        """
        given: dict[str, Any] = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "seed")}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, **given)

    def engine(self) -> EmbeddedEngine:
        """Raises:
        ValueError: a value is out of range.
        """
        return EmbeddedEngine(model=self.model, dtype=self.dtype, max_model_len=self.max_model_len)

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """The conversation that the chat template gets."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": prompt}]


Options: TypeAlias = (
    RunOptions
    | EngineOptions
    | CheckOptions
    | MockOptions
    | ClientBenchOptions
    | DeathBenchOptions
    | EngineBenchOptions
    | PrefixBenchOptions
)
"""What was typed after one of the commands."""


def parse_arguments(arguments: Sequence[str] | None = None) -> Options:
    """Parse ``arguments`` (the program's own by default). Exits with 2 and a usage message when they make no sense."""
    parser = ArgumentParser(prog="anyengine", description="LLM inference under one AnyIO task group.")
    parser.add_argument("--version", action="version", version=f"anyengine {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="answer one prompt",
        description="Start an engine, stream its answer to one prompt to standard output, stop the engine.",
        epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    # Named for the help only: `main` gives its arguments to `anyengine.cli.frontend`.
    commands.add_parser("frontend", help="run an application of yours as the front end of `vllm serve`")
    _add_prompt_options(run)
    _add_engine_options(run)
    _add_sampling_options(run)
    _add_output_options(run)
    run.set_defaults(options=RunOptions)
    engine = commands.add_parser(
        "engine",
        help="be the engine of a front end that runs elsewhere",
        description="Load a model and serve a front end that waits for its engines: vLLM's AsyncLLM and vllm-rs among "
        "them. Ends when the front end has gone, or on SIGTERM or SIGINT.",
        epilog=_ENGINE_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_engine_options(engine)
    engine.set_defaults(options=EngineOptions)
    add_check_command(commands)
    add_mock_command(commands)
    add_bench_command(commands)
    values = vars(parser.parse_args(arguments))
    options: Options = values.pop("options")(**values)
    if getattr(options, "uvloop", False) and getattr(options, "backend", "asyncio") != "asyncio":
        parser.error("--uvloop is an event loop of asyncio: leave it out, or use --backend asyncio")
    if isinstance(options, RunOptions) and options.raw and options.system is not None:
        run.error("--system needs the chat template, which --raw leaves out: give one of them")
    return options


def _add_prompt_options(run: ArgumentParser) -> None:
    run.add_argument("prompt", help='what to ask; "-" reads it from standard input')
    run.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    run.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")


def _add_engine_options(run: ArgumentParser) -> None:
    group = run.add_argument_group("engine")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="an alias, a local directory, a GGUF file or a Hub id (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=get_args(DType),
        default="auto",
        help="of weights and activations (default: auto, which is float32 on a CPU, the checkpoint's own on CUDA)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="prompt and answer together (default: the model's, at most 8192)",
    )
    group.add_argument(
        "--backend", choices=("asyncio", "trio"), default="asyncio", help="event loop (default: %(default)s)"
    )
    group.add_argument("--uvloop", action="store_true", help="run asyncio on uvloop")


def _add_sampling_options(run: ArgumentParser) -> None:
    group = run.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: %(default)s)")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 always takes the likeliest token (default: 0)"
    )
    group.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that make up P")
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="leave out tokens below P times the likeliest one")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")


def _add_output_options(run: ArgumentParser) -> None:
    group = run.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="a JSON object a line for each output, then one with the usage"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="nothing but errors on standard error")
    group.add_argument("--traceback", action="store_true", help="show where an error was raised")


def _version() -> str:
    try:
        return version("anyengine")
    except PackageNotFoundError:
        return "(not installed)"
