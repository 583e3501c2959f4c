"""``anyengine bench engine``: its options, and where its results go.

Measures nothing itself.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from anyengine.config import DEFAULT_MODEL, DType

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

__all__ = ["EngineBenchOptions", "add_engine_bench", "run_engine_bench"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchOptions:
    """The options of ``anyengine bench engine``."""

    model: str
    dtypes: str
    batch_sizes: str
    input_tokens: int
    output_tokens: int
    rounds: int
    num_threads: int
    vllm_python: str | None
    with_transformers: bool
    with_limit: bool
    json: str | None
    traceback: bool

    def check(self) -> None:
        """Raises:
        ValueError: a dtype that there is not, or a count below 1.
        """
        for dtype in self.dtypes.split(","):
            if dtype not in get_args(DType):
                raise ValueError(f"--dtypes {self.dtypes}: {dtype!r} is none of {', '.join(get_args(DType))}")
        if not all(size.isdecimal() and int(size) for size in self.batch_sizes.split(",")):
            raise ValueError(f"--batch-sizes {self.batch_sizes} must be counts of at least 1, such as 1,8,32")
        for name in ("input_tokens", "output_tokens", "rounds", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")


def add_engine_bench(subjects: _SubParsersAction[ArgumentParser]) -> None:
    """``bench engine`` and its arguments, below ``subjects``."""
    engine = subjects.add_parser(
        "engine",
        help="tokens per second of the embedded engine, of transformers and of vLLM",
        description="Generate the same from random prompts with each of them in turn, and print medians.",
    )
    add = engine.add_argument
    add("--model", default=DEFAULT_MODEL, help="an alias, a local directory or a Hub id (default: %(default)s)")
    add("--dtypes", default="float32,bfloat16", metavar="LIST", help="default: %(default)s")
    add("--batch-sizes", default="1,8,32", metavar="LIST", help="sequences at a time (default: %(default)s)")
    add("--input-tokens", type=int, default=128, metavar="N", help="of each prompt (default: %(default)s)")
    add("--output-tokens", type=int, default=64, metavar="N", help="of each answer (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="the median of so many is shown (default: %(default)s)")
    add("--num-threads", type=int, default=os.cpu_count() or 1, metavar="N", help="of each (default: %(default)s)")
    add("--vllm-python", metavar="PATH", help="an interpreter that has vLLM, which is left out otherwise")
    add("--no-transformers", dest="with_transformers", action="store_false", help="leave transformers out")
    add("--no-limit", dest="with_limit", action="store_false", help="do not measure how fast weights can be read")
    add("--json", metavar="PATH", help="write everything that was measured to this file")
    add("--traceback", action="store_true", help="show where an error comes from")
    engine.set_defaults(options=EngineBenchOptions)


def run_engine_bench(options: EngineBenchOptions) -> int:
    """Measure and print; the exit code.

    Raises:
        ModelNotFoundError: there is no such model.
        RuntimeError: a contestant failed.
    """
    from anyengine.bench.engine import EngineBench, as_json, measure, table_lines
    from anyengine.engine.models import resolve_model

    resolved = resolve_model(options.model, lambda _status: None)
    bench = EngineBench(
        model_dir=str(resolved.model_dir),
        dtypes=tuple(options.dtypes.split(",")),
        batch_sizes=tuple(int(size) for size in options.batch_sizes.split(",")),
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        rounds=options.rounds,
        num_threads=options.num_threads,
        vllm_python=options.vllm_python,
        with_transformers=options.with_transformers,
        with_limit=options.with_limit,
    )
    found = measure(bench, sys.stderr)
    print("\n".join(table_lines(found)))
    if options.json is not None:
        Path(options.json).write_text(as_json(bench, found))
    return 0
