"""``anyengine bench prefix``: its options, and its results as JSON on standard output.

Measures nothing itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import anyio
import msgspec

from anyengine.config import DEFAULT_MODEL, DType, EmbeddedEngine

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

__all__ = ["PrefixBenchOptions", "add_prefix_bench", "run_prefix_bench"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBenchOptions:
    """The options of ``anyengine bench prefix``."""

    model: str
    dtype: DType
    prefix_tokens: int
    own_tokens: int
    rounds: int
    num_threads: int | None
    traceback: bool

    def check(self) -> None:
        """Raises:
        ValueError: a count is not positive.
        """
        for name in ("prefix_tokens", "own_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def add_prefix_bench(subjects: _SubParsersAction[ArgumentParser]) -> None:
    """``bench prefix`` and its arguments, below ``subjects``."""
    prefix = subjects.add_parser(
        "prefix",
        help="processor time to the first token, with and without a beginning that is there already",
        description="Send two requests with the same beginning, one after the other, and see what each takes to its "
        "first token, in the embedded engine. Prints JSON.",
    )
    add = prefix.add_argument
    add("--model", default=DEFAULT_MODEL, help="an alias, a local directory or a Hub id (default: %(default)s)")
    add("--dtype", choices=get_args(DType), default="auto", help="(default: %(default)s)")
    add("--prefix-tokens", type=int, default=1000, metavar="N", help="that both begin with (default: %(default)s)")
    add("--own-tokens", type=int, default=16, metavar="N", help="behind them, of each (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="the median of so many is shown (default: %(default)s)")
    add("--num-threads", type=int, metavar="N", help="of the engine (default: torch's own choice)")
    add("--traceback", action="store_true", help="show where an error comes from")
    prefix.set_defaults(options=PrefixBenchOptions)


def run_prefix_bench(options: PrefixBenchOptions) -> int:
    """Measure and print; the exit code.

    Raises:
        EngineError: the engine cannot be started, or fails.
    """
    times = anyio.run(_measure, options)
    print(msgspec.json.format(msgspec.json.encode({"benchmark": "prefix", "model": options.model, **times})).decode())
    return 0


async def _measure(options: PrefixBenchOptions) -> dict[str, object]:
    from anyengine.bench.prefix import measure_prefix  # loads the client

    def tell(number: int) -> None:
        print(f"anyengine: round {number} of {options.rounds}", file=sys.stderr, flush=True)

    engine = EmbeddedEngine(model=options.model, dtype=options.dtype, num_threads=options.num_threads)
    times = await measure_prefix(
        engine,
        prefix_tokens=options.prefix_tokens,
        own_tokens=options.own_tokens,
        rounds=options.rounds,
        on_round=tell,
    )
    found: dict[str, object] = msgspec.to_builtins(times)
    return found
