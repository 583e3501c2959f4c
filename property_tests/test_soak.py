"""Many short requests with random cancellation, a client opened three times, its engine started again: nothing grows.

Each round is a few hundred requests by a crowd of tasks; what the process holds is compared between the first rounds,
which fill caches, and the last.
"""

from __future__ import annotations

import gc
import random
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from anyengine import EngineClient, EngineDeadError, RestartPolicy, SamplingParams
from anyengine.testing.toy_runner import expected_tokens
from benches import Bench, MemoryBench, ProcessBench
from budgets import BUDGET, SEED
from explorer import left_in_registries
from ledger import Ledger
from tally import TALLY

pytestmark = pytest.mark.anyio

CROWD = 50
ROUND = 250
OPENS = 3
RESTART = RestartPolicy(max_restarts=2, window_s=3600, backoff_s=0, in_flight="replay")  # for each time it is opened
OBJECTS = 3_000  # of ours, of the loop's and of pytest's, however many requests there were
RSS_BYTES = 64 << 20


async def one_request(client: EngineClient, dice: random.Random) -> None:
    """Read to the end, left early, cancelled, aborted, or dropped before it is used."""
    tokens, turns, way = dice.randint(1, 4), dice.randint(0, 8), dice.random()
    label = str(dice.randrange(8))
    stream = client.generate([5], SamplingParams(max_tokens=tokens if way < 0.6 else 100), request_id=label)
    if way < 0.6:
        heard = [token async for out in stream for token in out.token_ids]
        assert heard in (expected_tokens([5], tokens), expected_tokens([5], len(heard)))  # all, or aborted by label
    elif way < 0.7:
        async with stream:
            await anext(stream)
    elif way < 0.9:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_read, stream)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
    elif way < 0.95:
        await stream.start()
        stream.abort()
        assert [out.finish_reason async for out in stream][-1] in ("abort", "length")
    else:
        await client.abort(label)


async def _read(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass


async def play_a_round(client: EngineClient, dice: random.Random) -> None:
    async def worker(dice: random.Random) -> None:
        for _ in range(ROUND // CROWD):
            await one_request(client, dice)

    async with anyio.create_task_group() as tasks:
        for _ in range(CROWD):
            tasks.start_soon(worker, random.Random(dice.random()))


async def kill(client: EngineClient, turns: int) -> None:
    """Kill the engine in the middle of a round: nobody sees a difference."""
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    client.core.session.engines[0].child.kill()  # type: ignore[union-attr]  # it is ours
    TALLY["restarts of the soak"] += 1


async def fence(client: EngineClient) -> None:
    """What was aborted is gone from the engine, or the engine is."""
    while True:
        with suppress(EngineDeadError):  # it has died this moment, and is started again
            await client.core.utility("is_sleeping")
            return
        await anyio.lowlevel.checkpoint()


async def holdings() -> tuple[int, int, int]:
    """Tasks, descriptors, and objects that the collector knows."""
    await anyio.wait_all_tasks_blocked()
    gc.collect()
    return len(anyio.get_running_tasks()), descriptors(), len(gc.get_objects())


async def soak(bench: Bench, requests: int) -> None:
    dice = random.Random(SEED)
    rounds = max(2, -(-requests // (ROUND * OPENS)))
    with Ledger() as ledger:
        grown_from: tuple[int, int, int] | None = None
        for _ in range(OPENS):
            async with bench.client(RESTART) as client:
                for turn in range(rounds):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(play_a_round, client, dice)
                        if turn in (rounds // 3, 2 * rounds // 3):
                            tasks.start_soon(kill, client, dice.randint(1, 50))
                    TALLY["requests of the soak"] += ROUND
                    await fence(client)
                    assert await left_in_registries(client) == {}
                    assert await bench.running(client) == 0
                    assert ledger.settle(bench.finished) == []
                    if isinstance(bench, MemoryBench):
                        bench.finished.clear()
                    if turn == rounds // 2 and grown_from is None:
                        grown_from = await holdings()
                assert client.statistics()["restarts"] == 2
                now = await holdings()
            assert grown_from is not None
            assert now[:2] <= grown_from[:2]
            assert now[2] - grown_from[2] < OBJECTS


@pytest.mark.case("K30")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("anyio_backend", "make_bench", "share"),
    [
        (("trio", {}), MemoryBench, 1.0),
        (("asyncio", {"use_uvloop": True}), MemoryBench, 1.0),
        (("asyncio", {}), ProcessBench, 0.1),
    ],
    ids=["trio, memory", "uvloop, memory", "asyncio, process"],
)
async def test_nothing_grows(make_bench: Callable[[], Bench], share: float) -> None:
    before = _peak_rss_bytes()
    with anyio.fail_after(3000):
        await soak(make_bench(), round(BUDGET.soak_requests * share))
    assert _peak_rss_bytes() - before < RSS_BYTES


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
