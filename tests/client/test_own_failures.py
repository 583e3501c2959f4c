"""When a task of the client's own fails, everybody who waits hears that it was that, and not an engine's death."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from anyengine import (
    ClientClosedError,
    ClientFailedError,
    ClientState,
    EngineClient,
    EngineDeadError,
    RestartPolicy,
    SamplingParams,
    StateChanged,
)
from anyengine._client.engines.liveness import Liveness
from anyengine._client.session.session import Session
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, UtilityRule, expected_tokens

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=1000)
SILENT = Script(
    requests=(RequestRule(silent=True),),
    utilities=(UtilityRule(method="is_scheduler_paused", do="never"),),
)


def broken(*_: Any) -> None:
    raise ZeroDivisionError("our own bug")


async def caught_by(wait: Any, into: list[BaseException]) -> None:
    try:
        await wait
    except EngineDeadError as exc:
        into.append(exc)


@pytest.mark.case("K05")
@pytest.mark.parametrize("task", ["drain", "watch"])
async def test_a_task_of_ours_that_fails_ends_the_session_with_its_own_error(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, calls, followers and those who come later; a restart policy does not apply, since no engine failed."""
    caught: list[BaseException] = []
    client = EngineClient(engine=ScriptedTwin(SILENT).engine, restart=RestartPolicy(), liveness_timeout_s=0.2)
    with anyio.fail_after(20):
        async with client:
            async with anyio.create_task_group() as waiters:
                for _ in range(3):
                    stream = await client.submit([1], LONG)
                    waiters.start_soon(caught_by, anext(stream), caught)
                waiters.start_soon(caught_by, client.is_paused(), caught)
                await anyio.wait_all_tasks_blocked()
                owner, name = (Session, "receive") if task == "drain" else (Liveness, "_ask")
                monkeypatch.setattr(owner, name, broken)
                if task == "drain":
                    client.core.session.send(
                        0, client.core.session.connection.utility("x", (), 0, lambda: None, unchecked=True)[1]
                    )
            assert [type(error) for error in caught] == [ClientFailedError] * 4
            assert all(isinstance(error.__cause__, ClientFailedError) for error in caught)
            death = await client.wait_dead()
            assert isinstance(death, ClientFailedError) and "ZeroDivisionError" in str(death)
            assert client.state is ClientState.DEAD
            assert isinstance((await client.health()).cause, ClientFailedError)
            with pytest.raises(ClientFailedError):
                await client.submit([1])
            monkeypatch.undo()


@pytest.mark.case("K05")
async def test_a_client_that_is_closed_is_not_a_dead_engine() -> None:
    """Consumers elsewhere get ClientClosedError; those inside a cancelled scope see cancellation."""
    caught: list[BaseException] = []
    inside: list[str] = []
    with anyio.fail_after(20):
        async with anyio.create_task_group() as elsewhere:
            async with EngineClient(engine=ScriptedTwin(SILENT).engine) as client:
                elsewhere.start_soon(caught_by, client.is_paused(), caught)
                stream = client.generate([1], LONG)
                with anyio.CancelScope() as scope:
                    async with stream:
                        await anyio.wait_all_tasks_blocked()
                        scope.cancel()
                        try:
                            await anext(stream)
                        except anyio.get_cancelled_exc_class():
                            inside.append("cancelled")
                            raise
            follow = [event async for event in client.events()]
        assert [type(error) for error in caught] == [ClientClosedError] and inside == ["cancelled"]
        assert [event.state for event in follow] == [ClientState.CLOSED]
        assert not [event for event in follow if isinstance(event, StateChanged)]


@pytest.mark.case("K07")
async def test_after_a_fatal_error_a_fresh_client_works() -> None:
    """All pending calls raise within two seconds, so do those that follow; nothing of it meets the next client."""
    dying = ScriptedTwin(Script(utilities=SILENT.utilities, faults=(Fault(do="dead_exit", direction="out", nth=5),)))
    caught: list[BaseException] = []
    with anyio.fail_after(20):
        async with EngineClient(engine=dying.engine) as client:
            async with anyio.create_task_group() as waiters:
                for _ in range(10):
                    waiters.start_soon(caught_by, client.is_paused(), caught)
                await anyio.wait_all_tasks_blocked()
                with anyio.fail_after(2):
                    await caught_by(anext(client.generate([1], LONG)), caught)
                    while len(caught) < 11:
                        await caught_by(client.core.utility("is_sleeping"), caught)
            with pytest.raises(EngineDeadError):
                await client.is_paused()
        client = EngineClient(engine=ScriptedTwin().engine)
        for _ in range(2):  # the same object, too
            async with client:
                short = client.generate([1], SamplingParams(max_tokens=3))
                assert [t async for out in short for t in out.token_ids] == expected_tokens([1], 3)
