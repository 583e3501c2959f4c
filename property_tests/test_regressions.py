"""What machines, explorers and programs have found: one small test for each fault, so that it stays found.

Beside them: ``tests/protocol/test_registries.py::test_an_id_is_not_used_again_while_its_call_waits``.
"""

from __future__ import annotations

import anyio
import pytest

from anyengine import EngineCoreClient
from anyengine._wire import EngineCoreRequest, WireSamplingParams
from anyengine.testing.pytest_plugin import BACKENDS
from benches import MemoryBench
from explorer import Explorer
from ledger import Ledger
from operations import ENTRIES
from programs import Program, Step, run_program

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("anyio_backend", [BACKENDS["asyncio"]], ids=["asyncio"])
async def test_a_scope_cancelled_during_the_start_ends_in_cancellation() -> None:
    """The task that enters is woken in the turn in which the session's own tasks are cancelled: it saw their end first,
    and raised ``ClientClosedError`` from a block that nobody had closed."""
    explorer = Explorer(hows=("scope",))
    await explorer.explore(ENTRIES["EngineClient.__aenter__"][0])
    assert not explorer.violations


async def test_the_low_level_client_aborts_what_it_leaves() -> None:
    """An engine that somebody else has started lives on, and would go on with them."""
    with anyio.fail_after(10), Ledger() as ledger:
        async with EngineCoreClient(MemoryBench().another().core.engines) as core:
            core.add(EngineCoreRequest("left", [1], sampling_params=WireSamplingParams(max_tokens=1_000_000)))
            await core.receive_outputs()
    assert ledger.aborted == {"left": 1}


async def test_the_end_of_a_block_does_not_overtake_what_was_read_before() -> None:
    """An output had been handed to the output processor, which had not run yet; the end of the block took the next one
    from the queue, and told it first: the stream had a hole."""
    reads = (Step("read", "a", 0), Step("read", "a", 3))
    for ranks in (1, 2):
        for turns in range(12):
            close = (Step("give up", "a", turns), Step("read", "a", 0), Step("close"))
            assert await run_program(Program((reads, close), ranks)) == []


async def test_a_pooling_request_tells_that_the_client_was_closed() -> None:
    """It was an abort that nobody had asked for."""
    for turns in range(6):
        program = Program(((Step("encode"),), (Step("give up", "a", turns), Step("close"))))
        assert await run_program(program) == []


async def test_a_pooling_request_tells_that_the_engine_was_killed() -> None:
    """Nobody was left who could be asked for his tasks, and the request was refused for it."""
    for turns in range(6):
        assert await run_program(Program(((Step("kill"), Step("give up", "a", turns), Step("encode")),))) == []
        program = Program(((Step("encode"),), (Step("give up", "a", turns), Step("kill"))), 2)
        assert await run_program(program) == []
