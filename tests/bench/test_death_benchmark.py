"""``anyengine bench death``: that it measures what it says; how fast it is depends on the machine."""

from __future__ import annotations

import json

import anyio
import pytest

from anyengine.bench.death import WAYS, measure_deaths
from anyengine.cli import main

pytestmark = pytest.mark.blocking_ok  # a command of its own: nobody else is in the loop


@pytest.mark.parametrize("way", WAYS[:3])
def test_every_consumer_of_every_round_is_counted(way: str) -> None:
    rounds: list[int] = []

    def note(way: str, number: int) -> None:
        rounds.append(number)

    async def measure() -> None:
        with anyio.fail_after(30):
            times = await measure_deaths(way, streams=20, rounds=2, on_round=note)
        assert (times.way, times.streams, times.rounds, rounds) == (way, 20, 2, [1, 2])
        assert 0 < times.p50_ms <= times.p99_ms <= times.max_ms == max(times.last_consumer_ms)

    anyio.run(measure, backend="trio")


def test_the_command_prints_json_and_keeps_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["bench", "death", "--streams", "5", "--rounds", "1", "--way", "kill", "--backend", "trio"]
    assert main([*typed, "--limit-ms", "0.0001"]) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["loop"], [one["way"] for one in document["results"]]) == ("trio", ["kill"])
    assert printed.err == "anyengine: kill, 1 of 1\n"
    assert main(["bench", "death", "--streams", "0"]) == 2
