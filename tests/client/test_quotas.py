"""A client's limiter: asked before a request is sent, told once what was used, whatever became of it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from engines import misbehaving
from incarnations import Incarnations
from recording_limiter import RecordingLimiter

from anyengine import (
    EncodeError,
    EngineClient,
    EngineDeadError,
    EngineError,
    InputSession,
    OutputProcessingError,
    OverloadedError,
    PoolingParams,
    QuotaExceededError,
    RequestFailed,
    RequestRejected,
    RequestTimeout,
    RestartPolicy,
    RetryPolicy,
    SamplingParams,
    TokenBuckets,
    TokenDemand,
    TokenQuota,
    Usage,
)
from anyengine._client.requests.account import RequestAccount
from anyengine._client.requests.charges import Charges
from anyengine._client.requests.state import RequestState
from anyengine._client.session.wakeup import make_parker
from anyengine._wire import EngineCoreRequest, WireSamplingParams
from anyengine.sync import SyncEngineClient
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin

pytestmark = [pytest.mark.anyio, pytest.mark.feature("R58")]

SILENT, ENDLESS, BROKEN, SHORT = 5, 6, 7, 8  # what the engine does with a prompt that begins with it
RULES = (
    RequestRule(first_token=SILENT, silent=True),
    RequestRule(first_token=BROKEN, after_tokens=2, finish="error"),
    RequestRule(first_token=SHORT, after_tokens=3),
)
KILL = Fault(do="kill", direction="in", kind="profile")
STEPS = Script(requests=RULES, faults=(KILL,), step_interval_s=0.001)
FOUR, LONG = SamplingParams(max_tokens=4), SamplingParams(max_tokens=1000)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_an_exhausted_quota_is_told_before_anything_is_sent() -> None:
    clock, scripted = Clock(), ScriptedTwin()
    buckets = TokenBuckets(TokenQuota(capacity_tokens=20, refill_tokens_per_s=2), clock=clock)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, limiter=buckets, strict=True) as client:
            await client.complete([1] * 6, SamplingParams(max_tokens=10), tenant="acme")
            assert buckets.available_tokens("acme") == 4
            with pytest.raises(QuotaExceededError, match="tenant 'acme'") as caught:
                await client.submit([1] * 4, SamplingParams(max_tokens=2), request_id="mine", tenant="acme")
            error = caught.value
            assert (error.status, error.code, error.request_id) == (429, "quota_exceeded", "mine")
            assert error.retry_after_s == pytest.approx(1.001)
            with pytest.raises(RequestRejected, match="waiting does not help") as rejected:
                await client.submit([1] * 4, SamplingParams(max_tokens=20), tenant="acme")
            assert rejected.value.parameter == "max_tokens"
            await client.complete([1] * 4, FOUR, tenant="other")
            await client.complete([1] * 4, FOUR)
            assert len(scripted.received("add")) == 3
            clock.now_s = error.retry_after_s
            await client.complete([1] * 4, SamplingParams(max_tokens=2), tenant="acme")
            assert client.statistics()["rejections_quota"] == 2
    assert not any("acme" in repr(add) for add in scripted.received("add"))


async def test_max_total_tokens_counts_all_completions() -> None:
    quota = TokenQuota(capacity_tokens=1000, refill_tokens_per_s=0, max_total_tokens=20)
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin().engine, limiter=TokenBuckets(quota)) as client:
            with pytest.raises(RequestRejected, match=r"21 tokens .* \(max_total_tokens=20\)"):
                await client.submit([1] * 5, SamplingParams(max_tokens=8, n=2))
            with pytest.raises(RequestRejected, match="ask for less output"):  # as much as the model's length allows
                await client.submit([1] * 5, SamplingParams(max_tokens=None))
            await client.complete([1] * 4, SamplingParams(max_tokens=8, n=2))
            assert client.statistics()["rejections_quota"] == 2


async def finish(client: EngineClient) -> None:
    await client.complete([1, 2], FOUR)


async def finish_several(client: EngineClient) -> None:
    await client.complete([1, 2], SamplingParams(max_tokens=4, n=3))


async def leave(client: EngineClient) -> None:
    async with client.generate([ENDLESS, 2], LONG) as stream:
        await anext(stream)


async def leave_before_the_first_token(client: EngineClient) -> None:
    async with client.generate([SILENT, 2], LONG):
        pass


async def abort(client: EngineClient) -> None:
    async with client.generate([SILENT, 2], SamplingParams(max_tokens=9, n=2), "mine") as stream:
        await client.abort("mine")
        _ = [output async for output in stream]


async def drop(client: EngineClient) -> None:
    with pytest.warns(ResourceWarning, match="was dropped"):
        stream: Any = await client.submit([SILENT, 2], LONG)
        del stream
        gc.collect()
    await client.drain()


async def be_cancelled(client: EngineClient) -> None:
    with anyio.CancelScope() as scope:
        async for _ in client.generate([ENDLESS, 2], LONG):
            scope.cancel()


async def be_late(client: EngineClient) -> None:
    await finish(client)  # the engine's tasks are known now: nothing is awaited before it is sent
    with pytest.raises(RequestTimeout):
        await client.complete([SILENT, 2], LONG, timeout_s=0.01)


async def fail(client: EngineClient) -> None:
    with pytest.raises(RequestFailed):
        await client.complete([BROKEN, 2], LONG)


async def die(client: EngineClient) -> None:
    async with client.generate([SILENT, 2], LONG) as stream:
        with suppress(EngineDeadError):
            await client.core.utility("profile")
        with pytest.raises(EngineDeadError):
            await anext(stream)


async def close(client: EngineClient) -> None:
    stream = await client.submit([SILENT, 2], LONG)
    await client.aclose()
    assert (await stream.final()).finish_reason == "abort"


async def be_refused(client: EngineClient) -> None:
    with pytest.raises(RequestRejected):
        await client.submit([], LONG)
    with pytest.raises(RequestRejected, match="tenant"):
        await client.submit([1], LONG, tenant="")
    with pytest.raises(RequestRejected, match="tenant"):
        await client.submit([1], LONG, tenant=7)  # type: ignore[arg-type]
    stream = client.generate([1, 2], LONG)
    stream.abort()
    await stream.final()


async def converse(client: EngineClient) -> None:
    async with client.input_session(FOUR) as session:
        for part in ([1, 2], [3]):
            await session.send(part)
            async for item in session:
                if item.finish_reason is not None:
                    break
        await session.send([SILENT])


@pytest.mark.parametrize(
    ("way", "least", "most"),
    [
        (finish, [(2, 4)], 4),
        (finish_several, [(2, 12)], 12),
        (leave, [(2, 1)], 999),
        (leave_before_the_first_token, [(2, 0)], 0),
        (abort, [(2, 0)], 0),
        (drop, [(2, 0)], 0),
        (be_cancelled, [(2, 1)], 999),
        (be_late, [(2, 4), (2, 0)], 4),
        (fail, [(2, 2)], 2),
        (die, [(0, 0)], 0),  # the engine's fault: nobody pays
        (close, [(2, 0)], 0),
        (be_refused, [], 0),
        (converse, [(2, 4), (1, 4), (1, 0)], 4),
    ],
)
async def test_every_end_is_settled_once_with_what_was_used(
    way: Callable[[EngineClient], Awaitable[None]], least: list[tuple[int, int]], most: int
) -> None:
    limiter = RecordingLimiter(TokenBuckets(TokenQuota(capacity_tokens=5000, refill_tokens_per_s=0)))
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(STEPS).engine, limiter=limiter) as client:
            await way(client)
            bills = limiter.bills()
    assert limiter.bills() == bills  # the end of the client settles nothing again
    assert [prompt for prompt, _ in bills] == [prompt for prompt, _ in least]
    assert all(low <= num <= most for (_, num), (_, low) in zip(bills, least, strict=True))
    used = sum(map(sum, bills))
    assert limiter.inner.available_tokens(None) == 5000 - used  # type: ignore[attr-defined]


async def test_what_waits_at_the_door_has_reserved_nothing() -> None:
    limiter = RecordingLimiter()
    with anyio.fail_after(30):
        async with EngineClient(
            engine=ScriptedTwin(STEPS).engine, limiter=limiter, max_num_queued_reqs=1, admission="wait"
        ) as client:
            async with client.generate([SILENT], LONG):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(client.complete, [1], LONG)
                    while not client.statistics()["requests_waiting"]:
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()
                assert len(limiter.reserved) == 1
    assert limiter.bills() == [(1, 0)]


async def test_a_request_that_is_sent_in_part_has_used_nothing() -> None:
    """The second completion finds no room for its bytes: the first one is aborted."""
    limiter = RecordingLimiter()
    two = SamplingParams(max_tokens=9, n=2)
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(STEPS).engine, limiter=limiter, max_unread_bytes=500) as client:
            with pytest.raises(OverloadedError, match="max_unread_bytes"):
                await client.submit([SILENT] * 600, two)
            assert limiter.bills() == [(0, 0)] and limiter.reserved[0].max_completion_tokens == 18


async def test_what_cannot_be_put_on_the_wire_has_used_nothing() -> None:
    """Which is found out last."""
    limiter, scripted = RecordingLimiter(), ScriptedTwin(Script(tasks=("generate", "embed"), requests=RULES))
    unsendable: dict[str, Any] = {"reasoning_parser_kwargs": {"x": object()}}
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, limiter=limiter) as client:
            with pytest.raises(RequestRejected, match="reasoning_parser_kwargs"):
                await client.submit([1], SamplingParams(max_tokens=2, n=2), **unsendable)
            with pytest.raises(RequestRejected, match="reasoning_parser_kwargs"):
                await client.encode([1], PoolingParams(task="embed"), **unsendable)
            async with client.input_session(FOUR, **unsendable) as session:
                with pytest.raises(EncodeError, match="reasoning_parser_kwargs"):
                    await session.send([1])
            kwargs: dict[str, Any] = {}
            async with client.input_session(FOUR, reasoning_parser_kwargs=kwargs) as session:
                await session.send([SILENT])
                kwargs.update(unsendable["reasoning_parser_kwargs"])
                with pytest.raises(EncodeError, match="reasoning_parser_kwargs"):
                    await session.send([SILENT])
            assert limiter.bills() == [(0, 0)] * 4 + [(1, 0)]
    assert len(scripted.received("add")) == 1


async def test_a_session_whose_first_part_is_refused_has_not_begun() -> None:
    """Whoever iterates hears of the part that is let in later, or of the end."""
    clock, scripted = Clock(), ScriptedTwin()
    buckets = TokenBuckets(TokenQuota(capacity_tokens=10, refill_tokens_per_s=1), clock=clock)
    limiter, items = RecordingLimiter(buckets), list[Any]()

    async def listen(session: InputSession) -> None:
        items.extend([item async for item in session])

    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, limiter=limiter) as client:
            await client.complete([1] * 6, FOUR)
            async with client.input_session(FOUR) as session, anyio.create_task_group() as tasks:
                tasks.start_soon(listen, session)
                await anyio.wait_all_tasks_blocked()
                for _ in range(2):
                    with pytest.raises(QuotaExceededError):
                        await session.send([1] * 4)
                clock.now_s = 10.0
                await session.send([1] * 4)
                session.end()
            assert [item.num_output_tokens for item in items][-1] == 4
            async with client.input_session(FOUR) as session:
                with pytest.raises(QuotaExceededError):
                    await session.send([1] * 5)
                session.end()
                assert [item async for item in session] == []
            assert limiter.faults() == []


async def test_a_retry_is_the_same_request() -> None:
    limiter = RecordingLimiter()
    with anyio.fail_after(30):
        async with EngineClient(
            engine=misbehaving("fails_at_first", "2"), retries=RetryPolicy(backoff_s=0.001), limiter=limiter
        ) as client:
            stream = client.generate([7], SamplingParams(max_tokens=2))
            assert [output.token_ids async for output in stream] == [[7]]
            assert stream.attempts == 3
            assert limiter.bills() == [(1, 1)]


async def test_a_replay_is_the_same_request() -> None:
    limiter, engine = RecordingLimiter(), Incarnations(STEPS, STEPS)
    policy = RestartPolicy(backoff_s=0.001, in_flight="replay")
    with anyio.fail_after(30):
        async with EngineClient(engine=engine.engine, restart=policy, limiter=limiter) as client:
            async with client.generate([1, 2], SamplingParams(max_tokens=200, temperature=0)) as stream:
                await anext(stream)
                with pytest.raises(EngineError):
                    await client.core.utility("profile")
                assert (await stream.final()).num_output_tokens == 200
                assert stream.attempts == 2
            assert limiter.bills() == [(2, 200)]


async def test_a_pooling_request_uses_its_prompt() -> None:
    limiter, embed = RecordingLimiter(), PoolingParams(task="embed")
    good, error, nothing = ([first, 9] for first in (1, 2, 3))  # what the engine does with it
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("pooler"), limiter=limiter) as client:
            await client.encode(good, embed, request_id="mine", tenant="acme")
            with pytest.raises(RequestFailed):
                await client.encode(error, embed)
            with pytest.raises(OutputProcessingError):
                await client.encode(nothing, embed)
            assert limiter.bills() == [(2, 0), (0, 0), (0, 0)]
    first = limiter.reserved[0]
    assert (first.request_id, first.tenant, first.prompt_tokens, first.max_completion_tokens) == ("mine", "acme", 2, 0)


async def test_a_group_goes_at_the_pace_of_its_quota() -> None:
    """No more is in flight than the bucket has, and nothing is lost."""
    limiter = RecordingLimiter(TokenBuckets(TokenQuota(capacity_tokens=100, refill_tokens_per_s=0)))
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(STEPS).engine, limiter=limiter) as client:
            got = [pair async for pair in client.generate_many([[SHORT]] * 10, SamplingParams(max_tokens=39))]
            assert sorted(index for index, _ in got) == list(range(10))
            assert limiter.bills() == [(1, 3)] * 10
            assert 0 < client.statistics()["rejections_quota"] <= 10  # asked again when one has ended, not before


@pytest.mark.parametrize(("attempts", "first", "bill"), [(1, "end", (3, 0)), (0, "end", (0, 0)), (1, "settle", (0, 0))])
async def test_a_charge_is_settled_by_whichever_comes_first(attempts: int, first: str, bill: tuple[int, int]) -> None:
    """The end of its request, which may have waited for an engine all its life, or whoever could not send it."""
    limiter, account = RecordingLimiter(), RequestAccount()
    request = EngineCoreRequest("r-1", [1, 2, 3], sampling_params=WireSamplingParams(max_tokens=4), external_req_id="r")
    charge = Charges(account, limiter).open(request, {})
    state = RequestState("r-1", "r", make_parker())
    state.account, state.attempts = charge, attempts
    if first == "settle":
        charge.settle()
    state.aborted()
    charge.settle()
    assert limiter.bills() == [bill]
    assert account.totals([0], [])[0].ended == {"abort": 1}


class Broken:
    def __init__(self, failing: str) -> None:
        self.failing = failing

    def reserve(self, demand: TokenDemand) -> None:
        if self.failing == "reserve" and demand.tenant == "bad":
            raise ZeroDivisionError("no such tenant")

    def settle(self, demand: TokenDemand, usage: Usage) -> None:
        if self.failing == "settle":
            raise ZeroDivisionError("no such tenant")


async def test_a_limiter_that_fails_to_answer_fails_one_request(caplog: pytest.LogCaptureFixture) -> None:
    scripted = ScriptedTwin(STEPS)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, limiter=Broken("reserve")) as client:
            async with client.generate([ENDLESS], LONG) as neighbour:
                for _ in range(2):
                    with pytest.raises(RequestFailed, match="the limiter, a Broken, failed at request 'r'") as caught:
                        await client.submit([1], FOUR, request_id="r", tenant="bad")
                    assert (caught.value.code, caught.value.status) == ("limiter_failed", 500)
                    assert isinstance(caught.value.__cause__, ZeroDivisionError)
                assert (await neighbour.final()).num_output_tokens == 1000
            assert client.statistics()["limiter_failures"] == 2
    assert len(scripted.received("add")) == 1
    assert len([one for one in caplog.records if "the limiter" in one.getMessage()]) == 1


async def test_a_limiter_that_fails_to_be_told_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with anyio.fail_after(30), caplog.at_level(logging.ERROR, "anyengine.client"):
        async with EngineClient(engine=ScriptedTwin(STEPS).engine, limiter=Broken("settle"), strict=True) as client:
            for _ in range(2):
                assert (await client.complete([1], FOUR)).num_output_tokens == 4
            async with client.generate([SILENT], LONG):
                pass
            assert client.statistics()["limiter_failures"] == 3
            assert client.stats().generation_tokens == 8
    assert len([one for one in caplog.records if "the limiter" in one.getMessage()]) == 1


class Asynchronous:
    async def reserve(self, demand: TokenDemand) -> None:
        raise AssertionError

    def settle(self, demand: TokenDemand, usage: Usage) -> None:
        raise AssertionError


@pytest.mark.parametrize("wrong", [TokenBuckets, object(), 5, Asynchronous()])
def test_what_is_no_limiter_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="limiter="):
        EngineClient(limiter=wrong)


def test_the_blocking_client_has_one_too() -> None:
    buckets = TokenBuckets(TokenQuota(capacity_tokens=5, refill_tokens_per_s=0))
    with SyncEngineClient(engine=ScriptedTwin().engine, limiter=buckets) as client:
        client.complete([1], FOUR, tenant="acme")
        with pytest.raises(QuotaExceededError):
            client.complete([1], FOUR, tenant="acme")
