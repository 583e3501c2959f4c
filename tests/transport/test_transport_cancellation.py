"""The conformance suite, continued: cancellation at any moment, by scopes and by tasks, loses no message."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest
import sniffio
from transport_links import Links, loads, numbered, take

from anyengine._transport.abc import MessageSender

pytestmark = pytest.mark.anyio


async def feed(push: MessageSender, total: int, seed: int) -> None:
    """Messages in small bursts, with pauses like the time limits of the reader."""
    chance = random.Random(seed)
    for number in range(total):
        push.send_nowait(numbered(number))
        if chance.random() < 0.3:
            await anyio.sleep(chance.random() * 2e-3)  # uvloop's timers count in milliseconds


@pytest.mark.case("K63")
async def test_cancelled_scopes_lose_nothing(links: Links) -> None:
    pull, push = links.pipe()
    chance = random.Random(1)
    total, got, cancelled = 1000, 0, 0
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed, push, total, 2)
            while got < total:
                with anyio.move_on_after(chance.random() * 1.5e-3) as scope:
                    for message in await pull.drain(8):
                        assert message == numbered(got)
                        got += 1
                cancelled += scope.cancelled_caught
    assert cancelled > 30


@pytest.mark.case("K63")
async def test_natively_cancelled_tasks_lose_nothing(links: Links) -> None:
    if sniffio.current_async_library() != "asyncio":
        pytest.skip("trio has no native cancellation of one task")
    pull, push = links.pipe()
    chance = random.Random(3)
    total, got, cancelled = 1000, 0, 0

    async def read() -> None:
        nonlocal got
        while got < total:
            for message in await pull.drain(8):
                assert message == numbered(got)
                got += 1

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed, push, total, 4)
            while got < total:
                reader = asyncio.get_running_loop().create_task(read())
                await anyio.sleep(chance.random() * 1.5e-3)
                reader.cancel()
                try:
                    await reader
                except asyncio.CancelledError:
                    cancelled += 1
    assert cancelled > 30


async def test_a_cancelled_send_was_not_sent(links: Links) -> None:
    pull, push = links.pipe(high_water_mark=1)
    sent = 0
    with anyio.fail_after(20):
        while True:
            with anyio.move_on_after(0.05) as scope:
                await push.send([b"%d" % sent, b"x" * 65536])
                sent += 1
            if scope.cancelled_caught:
                break
        messages = await take(pull, sent)
    assert [loads(message[0]) for message in messages] == list(range(sent))
    assert pull.drain_nowait() == []


async def test_a_cancelled_caller_takes_nothing(links: Links) -> None:
    pull, push = links.pipe()
    push.send_nowait([b"x"])
    with anyio.CancelScope() as scope:
        scope.cancel()
        await pull.drain()
    with anyio.fail_after(10):
        assert await take(pull, 1) == [[b"x"]]
