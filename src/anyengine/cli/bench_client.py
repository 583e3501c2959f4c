"""``anyengine bench client``: its options, and where its results go.

Measures nothing itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from anyengine.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

__all__ = ["ClientBenchOptions", "add_client_bench", "run_client_bench"]

_LOOPS: Final = ("asyncio", "uvloop", "trio")
_COUNTS: Final = ("streams", "input_tokens", "output_tokens", "rounds")
_MIN_TOKENS: Final = 16  # the first and the last eighth of them are not looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientBenchOptions:
    """The options of ``anyengine bench client``."""

    model: str
    loops: str
    streams: int
    input_tokens: int
    output_tokens: int
    step_ms: float
    rounds: int
    vllm_python: str | None
    max_ratio: float | None
    json: str | None
    quiet: bool
    traceback: bool

    def check(self) -> None:
        """Raises:
        ValueError: a value makes no sense.
        """
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.output_tokens < _MIN_TOKENS:
            raise ValueError(f"output_tokens={self.output_tokens} must be at least {_MIN_TOKENS}")
        if self.step_ms < 0:
            raise ValueError(f"step_ms={self.step_ms} must not be negative")
        for loop in self.loops.split(","):
            if loop not in _LOOPS:
                raise ValueError(f"loops={self.loops!r}: {loop!r} is none of {', '.join(_LOOPS)}")
        if self.max_ratio is not None and self.vllm_python is None:
            raise ValueError("max_ratio is a share of what vLLM costs: give vllm_python, too")


def add_client_bench(subjects: _SubParsersAction[ArgumentParser]) -> None:
    """``bench client`` and its arguments, below ``subjects``."""
    client = subjects.add_parser(
        "client",
        help="processor time of the client for each output token, and of vLLM's AsyncLLM",
        description="Stream from a mock engine of the same pace with each of them in turn, and print medians: the "
        "processor time of their own processes, start-up and the engine excluded.",
    )
    add = client.add_argument
    add("--model", default=DEFAULT_MODEL, help="whose tokenizer is used (default: %(default)s)")
    add("--loops", default=",".join(_LOOPS), metavar="LIST", help="of our client (default: %(default)s)")
    add("--streams", type=int, default=256, metavar="N", help="at once, a task for each (default: %(default)s)")
    add("--input-tokens", type=int, default=32, metavar="N", help="of each prompt (default: %(default)s)")
    add("--output-tokens", type=int, default=512, metavar="N", help="of each answer (default: %(default)s)")
    add(
        "--step-ms",
        type=float,
        default=8.0,
        metavar="MS",
        help="the engine's pace: a token for each stream in each step; 0: as fast as it can (default: %(default)s)",
    )
    add("--rounds", type=int, default=5, metavar="N", help="the median of so many is shown (default: %(default)s)")
    add("--vllm-python", metavar="PATH", help="an interpreter that has vLLM, which is left out otherwise")
    add("--max-ratio", type=float, metavar="R", help="exit with 1 if we cost more than this share of AsyncLLM")
    add("--json", metavar="PATH", help='write everything that was measured to this file ("-": to standard output)')
    add("-q", "--quiet", action="store_true", help="no progress on standard error")
    add("--traceback", action="store_true", help="show where an error comes from")
    client.set_defaults(options=ClientBenchOptions)


def run_client_bench(options: ClientBenchOptions) -> int:
    """Measure and print; the exit code.

    Raises:
        ModelNotFoundError: there is no such model.
        RuntimeError: a contestant failed.
    """
    from anyengine.bench.client import ClientBench, as_json, measure_clients, ratio_to_vllm, table_lines
    from anyengine.engine.models import resolve_model

    resolved = resolve_model(options.model, lambda _status: None)
    bench = ClientBench(
        model_dir=str(resolved.model_dir),
        loops=tuple(options.loops.split(",")),
        streams=options.streams,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        step_ms=options.step_ms,
        rounds=options.rounds,
        vllm_python=options.vllm_python,
    )

    def tell(line: str) -> None:
        if not options.quiet:
            print(f"anyengine: {line}", file=sys.stderr, flush=True)

    found = measure_clients(bench, tell)
    if options.json == "-":
        print(as_json(bench, found))
    else:
        print("\n".join(table_lines(found)))
        if options.json is not None:
            Path(options.json).write_text(as_json(bench, found))
    if options.max_ratio is None:
        return 0
    ratios = [ratio_to_vllm(one, found) for one in found if one.contestant == "anyengine"]
    return int(any(ratio is not None and ratio > options.max_ratio for ratio in ratios))
