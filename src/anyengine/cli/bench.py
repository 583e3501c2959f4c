"""``anyengine bench``: measurements, each a subcommand.

Owns the command; its subcommands own their options.
"""

from __future__ import annotations

from typing import Any

from anyengine.cli.bench_client import add_client_bench
from anyengine.cli.bench_death import add_death_bench
from anyengine.cli.bench_engine import add_engine_bench
from anyengine.cli.bench_prefix import add_prefix_bench

__all__ = ["add_bench_command"]


def add_bench_command(commands: Any) -> None:
    """The command and its subcommands, below ``commands``."""
    bench = commands.add_parser("bench", help="measure the client and the engine")
    subjects = bench.add_subparsers(title="what to measure", required=True, metavar="SUBJECT")
    add_client_bench(subjects)
    add_death_bench(subjects)
    add_engine_bench(subjects)
    add_prefix_bench(subjects)
