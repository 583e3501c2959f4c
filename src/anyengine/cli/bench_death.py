"""``anyengine bench death``: its options, and its results as JSON on standard output.

Measures nothing itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import msgspec

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from anyengine.bench.death import DeathTimes

__all__ = ["DeathBenchOptions", "add_death_bench", "run_death_bench"]

_WAYS = ("kill", "exit", "dead_exit", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathBenchOptions:
    """The options of ``anyengine bench death``."""

    streams: int
    rounds: int
    way: list[str] | None
    limit_ms: float | None
    backend: str
    uvloop: bool
    quiet: bool
    traceback: bool

    def check(self) -> None:
        """Raises:
        ValueError: a count is not positive.
        """
        for name in ("streams", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def add_death_bench(subjects: _SubParsersAction[ArgumentParser]) -> None:
    """``bench death`` and its arguments, below ``subjects``."""
    death = subjects.add_parser(
        "death",
        help="from the death of an engine to the last consumer",
        description="Open many streams, let the engine die, and see when each consumer is told. Prints JSON.",
    )
    death.add_argument("--streams", type=int, default=1000, metavar="N", help="open at once (default: %(default)s)")
    death.add_argument("--rounds", type=int, default=5, metavar="N", help="deaths of each kind (default: %(default)s)")
    death.add_argument(
        "--way",
        choices=_WAYS,
        action="append",
        help="kill: SIGKILL; exit: an exit code; dead_exit: ENGINE_CORE_DEAD, then an exit; dead: ENGINE_CORE_DEAD of "
        "an engine that lives on. Repeatable (default: all)",
    )
    death.add_argument("--limit-ms", type=float, metavar="MS", help="exit with 1 if a p99 is above")
    death.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio", help="(default: %(default)s)")
    death.add_argument("--uvloop", action="store_true", help="run asyncio on uvloop")
    death.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    death.add_argument("--traceback", action="store_true", help="show where an error was raised")
    death.set_defaults(options=DeathBenchOptions)


def run_death_bench(options: DeathBenchOptions) -> int:
    """Measure and print; the exit code."""
    results = anyio.run(
        _measure,
        options,
        backend=options.backend,
        backend_options={"use_uvloop": True} if options.uvloop else {},
    )
    loop = "uvloop" if options.uvloop else options.backend
    document = {"benchmark": "death", "loop": loop, "python": sys.version.split()[0], "results": results}
    print(msgspec.json.format(msgspec.json.encode(document)).decode())
    late = [one for one in results if options.limit_ms is not None and one.p99_ms > options.limit_ms]
    return 1 if late else 0


async def _measure(options: DeathBenchOptions) -> list[DeathTimes]:
    from anyengine.bench.death import WAYS, measure_deaths  # loads the client

    def tell(way: str, number: int) -> None:
        if not options.quiet:
            print(f"anyengine: {way}, {number} of {options.rounds}", file=sys.stderr, flush=True)

    ways = [way for way in WAYS if way in (options.way or _WAYS)]
    return [await measure_deaths(way, streams=options.streams, rounds=options.rounds, on_round=tell) for way in ways]
