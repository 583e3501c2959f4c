"""END: how an engine that we started ends: asked to, killed, or left alone. Each check takes an engine of its own."""

from __future__ import annotations

import os
import signal

import anyio
import anyio.to_thread

from anyengine._process.child import ChildProcess, ProcessExit
from anyengine._process.supervisor import SupervisedEngine
from anyengine._wire import FinishReason
from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.holdings import Holdings, holdings_of, left_of
from anyengine.testing.conformance.outcomes import CheckFailed, CheckSkipped, expect, expect_that
from anyengine.testing.conformance.registry import check

__all__: list[str] = []

_PATIENCES = 1.5  # vLLM's engine cores need 4 s with a worker, and 15 s at most when their host is gone


def _process(link: EngineLink) -> SupervisedEngine:
    if link.process is None:
        raise CheckSkipped("somebody else started this engine")
    return link.process


def _child(process: SupervisedEngine) -> ChildProcess:
    assert isinstance(process.child, ChildProcess)  # this suite starts nothing else
    return process.child


async def _ended(link: EngineLink, process: SupervisedEngine) -> ProcessExit:
    limit_s = _PATIENCES * link.patience_s
    with anyio.move_on_after(limit_s):
        await process.child.exited.wait()
    ended = process.child.poll()
    if ended is None:
        raise CheckFailed("process", expected=f"its end within {limit_s:g} s", got="it lives")
    return ended


async def _taken(process: SupervisedEngine) -> Holdings:
    return await anyio.to_thread.run_sync(holdings_of, _child(process).pid)


async def _nothing_left(process: SupervisedEngine, holdings: Holdings) -> None:
    await process.see_off()
    expect("left behind", await anyio.to_thread.run_sync(left_of, holdings), [])


@check("END-01", "SIGTERM while it is idle: exit code 0, and no ENGINE_CORE_DEAD", "protocol.md §13", destructive=True)
async def sigterm_idle(link: EngineLink) -> None:
    process = _process(link)
    process.child.terminate()
    ended = await _ended(link, process)
    expect("exit code, signal", (ended.exit_code, ended.signal), (0, None))
    expect("clients that were sent ENGINE_CORE_DEAD", link.dead_clients, set())


@check("END-02", "SIGTERM while requests run: each ends with ABORT (or drains)", "protocol.md §13", destructive=True)
async def sigterm_running(link: EngineLink) -> None:
    process = _process(link)
    running = [link.add(client=client, max_tokens=link.max_model_len - 10) for client in (0, 1)]
    await link.first_token(*running)
    process.child.terminate()
    ended = await _ended(link, process)
    for tracked in running:
        expect_that(
            tracked.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH),
            f"finish reason of {tracked.request_id}",
            expected="ABORT, or LENGTH after draining",
            got=tracked.finish_reason,
        )
    expect("exit code, signal", (ended.exit_code, ended.signal), (0, None))
    expect("clients that were sent ENGINE_CORE_DEAD", link.dead_clients, set())


@check("END-03", "after SIGTERM no process and no shared memory is left", "interop.md §3", destructive=True)
async def clean_after_sigterm(link: EngineLink) -> None:
    process = _process(link)
    holdings = await _taken(process)
    process.child.terminate()
    await _ended(link, process)
    await _nothing_left(process, holdings)


@check("END-04", "after SIGKILL no process and no shared memory is left", "interop.md §3", destructive=True)
async def clean_after_sigkill(link: EngineLink) -> None:
    process = _process(link)
    running = link.add(max_tokens=link.max_model_len - 10)
    await link.first_token(running)
    holdings = await _taken(process)
    os.kill(_child(process).pid, signal.SIGKILL)
    ended = await _ended(link, process)
    expect("signal", ended.signal, "SIGKILL")
    await _nothing_left(process, holdings)


@check("END-05", "it ends by itself when its host is gone (standard input ends)", "docs/vllm.md", destructive=True)
async def host_gone(link: EngineLink) -> None:
    process = _process(link)
    running = link.add(max_tokens=link.max_model_len - 10)
    await link.first_token(running)
    holdings = await _taken(process)
    _child(process).hang_up()
    ended = await _ended(link, process)
    expect("signal", ended.signal, None)
    await _nothing_left(process, holdings)
