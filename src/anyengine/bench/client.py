"""``anyengine bench client``: what the client spends on each output token, beside what vLLM's AsyncLLM spends.

Owns the schedule: every contestant is a process of its own with a mock engine of its own, all are there from the start,
and they take turns, so that a busy machine is busy for all of them; medians over the rounds. Only the processor time of
the contestant's own process counts, in the steady part of a round (:mod:`.contestants.window`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from anyengine._text import Tokenizer
from anyengine.testing.scripted import RequestRule, Script

from .line_driven import Contestant, ended_at_last

__all__ = [
    "VLLM",
    "VLLM_WITH_STATS",
    "ClientBench",
    "ClientMeasurement",
    "as_json",
    "measure_clients",
    "ratio_to_vllm",
    "table_lines",
]

VLLM: Final = "vllm AsyncLLM"
"""Without statistics, which is what it costs least with."""
VLLM_WITH_STATS: Final = "vllm with statistics"
"""As it comes. Our statistics of each request are always on."""
_SCRIPTS = Path(__file__).parent / "contestants"
_STARTUP_ROOM = 8  # tokens beyond what is asked for, which a model of any length has room for

_TEXT = """The engine writes one token for each request in each step, and the client gives each of them to whoever waits
for it: a word, a part of a word, a comma. Numbers such as 3.14159 or 2026 are cut into digits; names like Zürich,
Kraków or Москва into pieces; 東京 and 🚀 into bytes, of which no one alone is a character, so that something has to
wait for the rest. `def add(a: int, b: int) -> int:` is text, too, and so is this line.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientBench:
    """What is measured. ``vllm_python`` is an interpreter that has vLLM; without it vLLM is left out. ``step_ms`` is
    the pace of the engine: a token for every stream in each step; 0 is as fast as it can."""

    model_dir: str
    loops: tuple[str, ...] = ("asyncio", "uvloop", "trio")
    streams: int = 256
    input_tokens: int = 32
    output_tokens: int = 512
    step_ms: float = 8.0
    rounds: int = 5
    vllm_python: str | None = None

    def contestants(self) -> dict[tuple[str, str], list[str]]:
        """Command lines by name and loop, the port excepted. AsyncLLM has no trio."""
        ours = [sys.executable, str(_SCRIPTS / "streaming.py"), self.model_dir]
        commands = {("anyengine", loop): [*ours, loop] for loop in self.loops}
        if self.vllm_python:
            theirs = [self.vllm_python, str(_SCRIPTS / "vllm_streaming.py"), self.model_dir]
            commands |= {(VLLM, loop): [*theirs, loop] for loop in ("asyncio", "uvloop")}
            commands[VLLM_WITH_STATS, "uvloop"] = [*theirs, "uvloop+stats"]
        return commands

    def script(self) -> Script:
        """What the mock engine does: the same tokens of real text for every request."""
        tokens = Tokenizer.from_directory(self.model_dir).encode(_TEXT, add_special_tokens=False)
        tokens *= -(-self.output_tokens // len(tokens))
        return Script(
            version="0.32.0",
            step_interval_s=self.step_ms / 1000,
            requests=(RequestRule(tokens=tuple(tokens[: self.output_tokens]), finish="length"),),
            registration={
                "max_num_seqs": self.streams,
                "max_model_len": self.input_tokens + self.output_tokens + _STARTUP_ROOM,
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMeasurement:
    """One contestant on one loop: medians over the rounds, the peak of its memory, and every round's costs."""

    contestant: str
    loop: str
    cpu_us_per_token: float
    items_per_token: float
    tokens_per_s: float
    peak_rss_bytes: int
    rounds_cpu_us_per_token: list[float]


def measure_clients(bench: ClientBench, progress: Callable[[str], None]) -> list[ClientMeasurement]:
    """Start all contestants, and let them take turns.

    Raises:
        RuntimeError: a contestant ended, or did not get every token and its text.
    """
    task = {"streams": bench.streams, "input_tokens": bench.input_tokens, "output_tokens": bench.output_tokens}
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        script = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anyengine-bench-"))) / "script.json"
        script.write_bytes(msgspec.json.encode(bench.script()))
        running: dict[tuple[str, str], Contestant] = {}
        for (name, loop), command in bench.contestants().items():
            progress(f"starting {name} on {loop}")
            running[name, loop] = stack.enter_context(_started(f"{name} on {loop}", command, script))
            answers[name, loop] = []
        for number in range(bench.rounds + 1):
            for key, contestant in running.items():
                answer = contestant.ask({**task, "seed": number})
                if number:  # the first round warms up
                    answers[key].append(answer)
            progress(f"round {number} of {bench.rounds}" if number else "warmed up")
    _check_same_text(bench, answers)
    return [_medians(name, loop, rounds) for (name, loop), rounds in answers.items()]


def _check_same_text(bench: ClientBench, answers: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """All must have done the same work: they may differ in what a prompt's broken last character leaves."""
    counts = {key: answer["characters"] for key, rounds in answers.items() for answer in rounds}
    if max(counts.values()) - min(counts.values()) > 4 * bench.streams or not min(counts.values()):
        raise RuntimeError(f"the contestants got different texts; characters: {counts}")


def _medians(name: str, loop: str, rounds: Sequence[dict[str, Any]]) -> ClientMeasurement:
    def median(field: str) -> float:
        return float(statistics.median(answer[field] for answer in rounds))

    return ClientMeasurement(
        contestant=name,
        loop=loop,
        cpu_us_per_token=median("cpu_us_per_token"),
        items_per_token=median("items_per_token"),
        tokens_per_s=median("tokens_per_s"),
        peak_rss_bytes=max(answer["peak_rss_bytes"] for answer in rounds),
        rounds_cpu_us_per_token=[answer["cpu_us_per_token"] for answer in rounds],
    )


@contextlib.contextmanager
def _started(name: str, command: Sequence[str], script: Path) -> Iterator[Contestant]:
    port = _free_port()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    mock = [sys.executable, "-m", "anyengine.cli", "mock", "-q", "--handshake", f"tcp://127.0.0.1:{port}"]
    theirs = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with contextlib.ExitStack() as stack:
        front_end = stack.enter_context(
            ended_at_last(
                subprocess.Popen(
                    [*command, str(port)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=theirs if name.startswith("vllm") else environment,
                )
            )
        )
        engine = subprocess.Popen([*mock, "--script", str(script)], stdin=subprocess.DEVNULL, env=environment)
        stack.enter_context(ended_at_last(engine))
        yield Contestant(name, front_end)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ratio_to_vllm(one: ClientMeasurement, found: Sequence[ClientMeasurement]) -> float | None:
    """What ``one`` costs, as a share of AsyncLLM without statistics on the same loop, or (trio) on its cheaper one."""
    theirs = {other.loop: other.cpu_us_per_token for other in found if other.contestant == VLLM}
    if not theirs:
        return None
    return one.cpu_us_per_token / theirs.get(one.loop, min(theirs.values()))


def table_lines(found: Sequence[ClientMeasurement]) -> list[str]:
    """A table for people."""
    head = f"{'':<30}{'CPU us/token':>14}{'[rounds]':>16}{'of AsyncLLM':>13}"
    lines = [f"{head}{'items/token':>13}{'tokens/s':>10}{'peak MiB':>10}"]
    for one in found:
        costs = one.rounds_cpu_us_per_token
        ratio = ratio_to_vllm(one, found)
        lines.append(
            f"{one.contestant + ', ' + one.loop:<30}{one.cpu_us_per_token:>14.2f}"
            f"{f'[{min(costs):.2f}-{max(costs):.2f}]':>16}{'' if ratio is None else f'{ratio:.2f}':>13}"
            f"{one.items_per_token:>13.2f}{one.tokens_per_s:>10.0f}{one.peak_rss_bytes / (1 << 20):>10.0f}"
        )
    return lines


def as_json(bench: ClientBench, found: Sequence[ClientMeasurement]) -> str:
    """Everything, for machines."""
    rows = [{**asdict(one), "ratio_to_vllm": ratio_to_vllm(one, found)} for one in found]
    document = {"benchmark": "client", "python": sys.version.split()[0], "bench": asdict(bench), "measurements": rows}
    return json.dumps(document, indent=1)
