"""A rank that dies while something is learnt of all of them is no trouble for requests that others run."""

from __future__ import annotations

import os
import signal

import anyio
import pytest
from engines import misbehaving, toy

from anyengine import EngineClient, SamplingParams
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio


async def test_a_rank_dies_while_the_tasks_are_asked_for() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=[toy(), misbehaving("silent_after_ready")]) as client:
            (silent,) = [child.child.pid for child in client.core.session.children if child.rank == 1]
            received: list[int] = []

            async def generate() -> None:
                async for output in client.generate([1], SamplingParams(max_tokens=5)):
                    received.extend(output.token_ids)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate)
                await anyio.wait_all_tasks_blocked()
                os.kill(silent, signal.SIGKILL)
            assert received == expected_tokens([1], 5)
