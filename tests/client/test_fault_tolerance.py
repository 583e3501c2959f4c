"""Engines that wait after a fault: what they are told, what they answer, and what the client knows of them."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import msgspec
import pytest

from anyengine import (
    EngineClient,
    FaultToleranceRequest,
    FaultToleranceResult,
    FaultToleranceStatus,
    RequestRejected,
    RestartPolicy,
    UtilityError,
    UtilityRejected,
)
from anyengine.config import CommandEngine, InMemoryEngine
from anyengine.testing.scripted import Script, ScriptedProcess, ScriptedTwin, UtilityRule
from anyengine.testing.scripted.messages import reply

pytestmark = pytest.mark.anyio

RETRY = FaultToleranceRequest("retry", {"new_port": 1}, "ft-1")


def answers(*values: Any) -> Script:
    """The n-th call gets the n-th of these."""
    rules = [
        UtilityRule(method="handle_fault_tolerance", nth=number, do="reply", value=value)
        for number, value in enumerate(values, 1)
    ]
    return Script(utilities=tuple(rules))


def tolerant(engine: InMemoryEngine | CommandEngine) -> InMemoryEngine | CommandEngine:
    return msgspec.structs.replace(engine, args={"enable_fault_tolerance": True})


def calls(twin: ScriptedTwin) -> list[Any]:
    """The arguments of each call."""
    return [body[3] for body in twin.received() if "handle_fault_tolerance" in body]


def tell(client: EngineClient, rank: int, **status: Any) -> None:
    """What an engine says unasked."""
    client.core.session.receive([[reply(rank, [-2, None, [None, {"id": rank, **status}]], 0.0)]])


@pytest.mark.feature("C28")
async def test_success_and_failure_change_what_is_known() -> None:
    failed = {"request_id": "ft-1", "success": False, "reason": "no port", "later": 1}
    twin = ScriptedTwin(answers(failed, {"request_id": "ft-1", "success": True, "reason": None}))
    with anyio.fail_after(30):
        async with EngineClient(engine=tolerant(twin.engine), strict=True) as client:
            healthy = {0: FaultToleranceStatus(rank=0, status="healthy")}
            assert await client.get_status() == healthy
            tell(client, 0, status="unhealthy", fault_info="RuntimeError")
            unhealthy = FaultToleranceStatus(rank=0, status="unhealthy", fault_info="RuntimeError")
            assert await client.get_status() == {0: unhealthy}

            assert await client.handle_fault(RETRY) == FaultToleranceResult("ft-1", False, "no port")
            known = msgspec.structs.replace(unhealthy, last_request_id="ft-1", error="no port")
            assert await client.get_status() == {0: known}
            tell(client, 0, status="unhealthy", fault_info="RuntimeError")  # once more, which is no news
            assert await client.get_status() == {0: known}

            assert await client.handle_fault(RETRY) == FaultToleranceResult("ft-1", True)
            assert await client.get_status() == healthy
    sent = [body for body in twin.received() if "handle_fault_tolerance" in body]
    assert [body[3] for body in sent] == [
        [{"instruction": "retry", "params": {"new_port": 1}, "request_id": "ft-1"}]
    ] * 2


@pytest.mark.feature("C28")
async def test_what_an_engine_says_unasked_is_enough() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=tolerant(ScriptedTwin().engine), strict=True) as client:
            tell(client, 0, status="unhealthy")
            tell(client, 7, status="unhealthy")  # no rank of ours
            assert [one.status for one in (await client.get_status()).values()] == ["unhealthy"]
            tell(client, 0, status="healthy")
            assert await client.get_status() == {0: FaultToleranceStatus(rank=0)}


async def test_of_several_ranks_the_unhealthy_one_is_told() -> None:
    twins = [ScriptedTwin(answers({"request_id": "", "success": False, "reason": f"of {rank}"})) for rank in range(3)]
    with anyio.fail_after(30):
        async with EngineClient(engine=[tolerant(twin.engine) for twin in twins], strict=True) as client:
            tell(client, 1, status="unhealthy")
            assert (await client.handle_fault(FaultToleranceRequest("retry"))).reason == "of 1"
            assert [len(calls(twin)) for twin in twins] == [0, 1, 0]
            assert (await client.handle_fault(FaultToleranceRequest("retry"), rank=2)).reason == "of 2"
            assert {rank: one.error for rank, one in (await client.get_status()).items()} == {
                0: None,
                1: "of 1",
                2: "of 2",
            }
            with pytest.raises(RequestRejected, match="there is no rank 3"):
                await client.handle_fault(RETRY, rank=3)


async def test_results_of_all_ranks_are_one() -> None:
    done, failed = ({"request_id": "ft-1", "success": success, "reason": "why"} for success in (True, False))
    engines = [tolerant(ScriptedTwin(answers(done, one)).engine) for one in (done, failed, failed)]
    engines[1] = tolerant(ScriptedTwin(answers(done, failed)).engine)
    with anyio.fail_after(30):
        async with EngineClient(engine=engines, strict=True) as client:
            assert await client.handle_fault(RETRY) == FaultToleranceResult("ft-1", True)
            result = await client.handle_fault(RETRY)
            assert result == FaultToleranceResult("ft-1", False, "engine 1: why; engine 2: why")


@pytest.mark.feature("C28")
@pytest.mark.parametrize("args", [{}, {"enable_fault_tolerance": False}])
async def test_an_engine_that_it_would_leave_deaf_is_not_told(args: dict[str, Any]) -> None:
    done = {"request_id": "ft-1", "success": True}
    twin = ScriptedTwin(answers(done))
    engine = msgspec.structs.replace(twin.engine, args=args)
    with anyio.fail_after(30):
        async with EngineClient(engine=engine, strict=True) as client:
            with pytest.raises(UtilityRejected, match=r"deaf.*enable_fault_tolerance=True"):
                await client.handle_fault(RETRY)
            assert not calls(twin)
            assert (await client.handle_fault(RETRY, unchecked=True)).success
            assert len(calls(twin)) == 1


@pytest.mark.parametrize(
    ("request_", "parameter"),
    [
        ("retry", "fault_tolerance_request"),
        (FaultToleranceRequest("on_fault"), "instruction"),
        (FaultToleranceRequest(None), "instruction"),  # type: ignore[arg-type]
        (FaultToleranceRequest("retry", [1]), "params"),  # type: ignore[arg-type]
        (FaultToleranceRequest("retry", request_id=1), "request_id"),  # type: ignore[arg-type]
    ],
)
async def test_bad_input_is_refused(request_: Any, parameter: str) -> None:
    twin = ScriptedTwin(Script())
    with anyio.fail_after(30):
        async with EngineClient(engine=tolerant(twin.engine), strict=True) as client:
            with pytest.raises(UtilityRejected) as caught:
                await client.handle_fault(request_)
    assert (caught.value.method, caught.value.parameter) == ("handle_fault", parameter)
    assert not calls(twin)


async def test_an_answer_without_sense_changes_nothing() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=tolerant(ScriptedTwin(answers("done")).engine), strict=True) as client:
            with pytest.raises(UtilityError, match="'done' from engine 0"):
                await client.handle_fault(RETRY)
            assert await client.get_status() == {0: FaultToleranceStatus(rank=0)}


async def test_a_dead_rank_is_dead_and_a_new_one_healthy() -> None:
    engines = [tolerant(ScriptedProcess().engine), tolerant(ScriptedProcess().engine)]
    with anyio.fail_after(60):
        async with EngineClient(engine=engines, restart=RestartPolicy(backoff_s=0.01), strict=True) as client:
            tell(client, 1, status="unhealthy")
            os.kill(next(one.child.pid for one in client.core.session.children if one.rank == 1), signal.SIGKILL)
            seen = []
            async for event in client.events():
                seen.append((await client.get_status())[1].status)
                if event.degraded == (1,):
                    assert seen[-1] == "dead"
                if client.core.session.restarts.count:
                    break
            assert await client.get_status() == {rank: FaultToleranceStatus(rank=rank) for rank in (0, 1)}
    assert "dead" in seen
