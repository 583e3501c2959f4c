"""``anyengine bench engine``: tokens per second of the embedded engine and of what people would use instead.

Owns the schedule: all contestants are loaded, then take turns at every point, so that a busy machine is busy for all
of them, while the others are stopped; medians over the rounds. Each contestant is a process of its own, and is measured
whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from .line_driven import Contestant, ended_at_last

__all__ = ["EngineBench", "Measurement", "as_json", "measure", "table_lines"]

_SCRIPTS = Path(__file__).parent / "contestants"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench:
    """What is measured. ``vllm_python`` is an interpreter that has vLLM; without it vLLM is left out."""

    model_dir: str
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    input_tokens: int = 128
    output_tokens: int = 64
    rounds: int = 5
    num_threads: int = 2
    vllm_python: str | None = None
    with_transformers: bool = True
    with_limit: bool = True
    """Whether reading the weights, and nothing else, takes part."""

    def contestants(self) -> dict[str, list[str]]:
        """Command lines by name, dtype excepted."""
        ours = str(_SCRIPTS / "transformers_generate.py")
        commands = {"anyengine": [sys.executable, str(_SCRIPTS / "embedded.py")]}
        if self.vllm_python:
            commands["vllm"] = [self.vllm_python, str(_SCRIPTS / "vllm_offline.py")]
        if self.with_transformers:
            commands["transformers generate"] = [sys.executable, ours]
            commands["transformers continuous"] = [sys.executable, ours]
        if self.with_limit:
            commands["(reading weights)"] = [sys.executable, str(_SCRIPTS / "reading_weights.py")]
        return commands


@dataclass(frozen=True, slots=True)
class Measurement:
    """One contestant at one point: medians over the rounds."""

    contestant: str
    dtype: str
    num_seqs: int
    tokens_per_s: float
    cpu_s: float
    wall_s: list[float]


def measure(bench: EngineBench, progress: IO[str]) -> list[Measurement]:
    """Load the contestants of one dtype after the other, and let them take turns.

    Raises:
        RuntimeError: a contestant ended, with the end of its standard error.
    """
    found: list[Measurement] = []
    for dtype in bench.dtypes:
        with contextlib.ExitStack() as stack:
            running: dict[str, Contestant] = {}
            for name, command in bench.contestants().items():
                progress.write(f"loading {name}, {dtype}\n")
                tail = ["continuous"] if name.endswith("continuous") else []
                arguments = [*command, bench.model_dir, dtype, str(bench.num_threads), *tail]
                running[name] = stack.enter_context(_started(name, arguments))
                running[name].rest()
            found += _measure(bench, dtype, running, progress)
    return found


def _measure(
    bench: EngineBench, dtype: str, running: dict[str, Contestant], progress: IO[str]
) -> Iterator[Measurement]:
    task = {"input_tokens": bench.input_tokens, "output_tokens": bench.output_tokens}
    for contestant in running.values():  # warm-up
        _ask_alone(contestant, {**task, "num_seqs": 2, "output_tokens": 2, "seed": 0})
    for num_seqs in bench.batch_sizes:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in running}
        for number in range(bench.rounds):
            for name, contestant in running.items():
                answer = _ask_alone(contestant, {**task, "num_seqs": num_seqs, "seed": 1000 * num_seqs + number})
                if answer["num_tokens"] != num_seqs * bench.output_tokens:
                    raise RuntimeError(f"{name} made {answer['num_tokens']} tokens, not {num_seqs} times as asked")
                rounds[name].append(answer)
            progress.write(f"{dtype}, {num_seqs} sequences: round {number + 1} of {bench.rounds}\n")
        for name, answers in rounds.items():
            walls_s = [answer["wall_s"] for answer in answers]
            rate = num_seqs * bench.output_tokens / statistics.median(walls_s)
            cpu_s = statistics.median(answer["cpu_s"] for answer in answers)
            progress.write(f"{dtype}, {num_seqs} sequences: {name} {rate:.1f} tokens/s, {cpu_s:.1f} CPU s\n")
            yield Measurement(name, dtype, num_seqs, rate, cpu_s, walls_s)


def _ask_alone(contestant: Contestant, task: dict[str, float]) -> dict[str, float]:
    """Its answer, while all others rest."""
    contestant.go_on()
    answer = contestant.ask(task)
    contestant.rest()
    return answer


@contextlib.contextmanager
def _started(name: str, arguments: Sequence[str]) -> Iterator[Contestant]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2])])}
    if name == "vllm":
        environment.pop("PYTHONPATH")
    process = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
    )
    with ended_at_last(process):
        yield Contestant(name, process)


def table_lines(found: Sequence[Measurement]) -> list[str]:
    """A table for people: tokens per second, and processor seconds in brackets."""
    names = list(dict.fromkeys(measurement.contestant for measurement in found))
    lines = [f"{'output tokens/s (CPU s)':<26}" + "".join(f"{name:>28}" for name in names)]
    for dtype, num_seqs in dict.fromkeys((m.dtype, m.num_seqs) for m in found):
        cells = {m.contestant: m for m in found if (m.dtype, m.num_seqs) == (dtype, num_seqs)}
        row = "".join(
            f"{f'{cells[n].tokens_per_s:.1f} ({cells[n].cpu_s:.1f})' if n in cells else '':>28}" for n in names
        )
        lines.append(f"{f'{dtype}, {num_seqs} sequences':<26}{row}")
    return lines


def as_json(bench: EngineBench, found: Sequence[Measurement]) -> str:
    """Everything, for machines."""
    return json.dumps(
        {"bench": asdict(bench), "measurements": [asdict(measurement) for measurement in found]}, indent=1
    )
