"""The queue between reading and telling keeps its order and its items, whoever takes and whoever is cancelled."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from anyengine._client.session.session_feed import SessionFeed
from anyengine.testing.pytest_plugin import BACKENDS

pytestmark = pytest.mark.anyio


async def test_an_item_is_nobodys_until_a_running_task_takes_it() -> None:
    """A waiting task is woken for the first item; somebody else takes it before that task runs, and then the second."""
    feed: SessionFeed[int] = SessionFeed()
    taken: list[int] = []

    async def wait() -> None:
        taken.append(await feed.receive())

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            feed.send_nowait(1)
            feed.send_nowait(2)
            feed.send_nowait(3)
            assert [feed.receive_nowait(), feed.receive_nowait()] == [1, 2]
    assert taken == [3]


@pytest.mark.parametrize("anyio_backend", [BACKENDS["asyncio"], BACKENDS["uvloop"]], ids=["asyncio", "uvloop"])
async def test_a_native_cancellation_loses_nothing() -> None:
    feed: SessionFeed[int] = SessionFeed()
    with anyio.fail_after(10):
        task = asyncio.create_task(feed.receive())
        await anyio.wait_all_tasks_blocked()
        feed.send_nowait(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert await feed.receive() == 1


async def test_what_was_sent_comes_before_the_end() -> None:
    feed: SessionFeed[int] = SessionFeed()
    feed.send_nowait(1)
    feed.close()
    with pytest.raises(anyio.ClosedResourceError):
        feed.send_nowait(2)
    assert await feed.receive() == 1
    for _ in range(2):
        with pytest.raises(anyio.EndOfStream):
            await feed.receive()


async def test_the_end_wakes_everyone_who_waits() -> None:
    feed: SessionFeed[int] = SessionFeed()

    async def wait() -> None:
        with pytest.raises(anyio.EndOfStream):
            await feed.receive()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            feed.discard()
