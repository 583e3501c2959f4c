"""Who is let in: limits that hold exactly, capacity that comes back exactly once, the order of those who wait."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from anyengine import (
    EmbedsPrompt,
    EngineAsleepError,
    EngineClient,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestFailed,
    RequestRejected,
    RequestStream,
    SamplingParams,
    VLLMEngine,
)
from anyengine._client.inputs.request_builder import RequestBuilder
from anyengine._client.requests.admission import Admission, AdmissionSettings
from anyengine._protocol import RequestRegistry
from anyengine._wire import EngineCoreOutput, FinishReason
from anyengine.testing.pytest_plugin import BACKENDS
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, UtilityRule

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=2000)
SILENT = Script(requests=(RequestRule(silent=True),))
one_loop = pytest.mark.parametrize("anyio_backend", [BACKENDS["trio"]], ids=["trio"])


@pytest.mark.parametrize(
    ("args", "told", "limits"),
    [
        ({"max_num_queued_reqs": 1}, {}, (1, None)),
        (["--max-num-queued-tokens", "64"], {}, (None, 64)),
        ({"max_num_queued_reqs": 1}, {"max_num_queued_reqs": 9, "max_num_queued_tokens": 5}, (9, 5)),
        ({}, {}, (None, None)),
    ],
)
def test_an_engines_arguments_are_the_clients_limits(args: Any, told: dict[str, int], limits: tuple[int, int]) -> None:
    """vLLM's front end keeps them, so that we do."""
    settings = EngineClient(engine=VLLMEngine("m", args=args), **told)._admission  # type: ignore[arg-type]
    assert (settings.max_num_queued_reqs, settings.max_num_queued_tokens) == limits


def test_the_least_of_several_engines_holds() -> None:
    engines = [VLLMEngine("m", args={"max_num_queued_reqs": limit}) for limit in (3, 2)]
    assert EngineClient(engine=engines)._admission.max_num_queued_reqs == 2
    with pytest.raises(ValueError, match="max_num_queued_reqs=0 must be"):
        EngineClient(engine=VLLMEngine("m", args={"max_num_queued_reqs": 0}))


@pytest.mark.feature("L21", "C06")
@pytest.mark.case("K73")
async def test_limits_accept_exactly_what_fits_and_send_nothing_else() -> None:
    scripted = ScriptedTwin(SILENT)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, max_num_queued_reqs=4, max_num_queued_tokens=64) as client:
            client.check_admission(4)
            accepted: list[RequestStream] = []
            for n in range(10):
                if n < 3:  # 60 of 64 prompt tokens
                    accepted.append(await client.submit([n] * 20, LONG))
                    continue
                with pytest.raises(OverloadedError) as caught:
                    await client.submit([n] * 20, LONG, request_id=f"r{n}")
                refusal = caught.value
                assert (refusal.reason, refusal.request_id, refusal.retry_after_s) == ("tokens", f"r{n}", None)
            accepted.append(await client.submit([1] * 4, LONG))
            with pytest.raises(OverloadedError, match=r"prepared, 0 wait \(max_num_queued_reqs=4\)") as caught:
                await client.submit([1], LONG)
            assert caught.value.reason == "requests"
            with pytest.raises(OverloadedError):
                client.check_admission()
            with pytest.raises(OverloadedError, match="5 sequences"):
                client.check_admission(5)
            statistics = client.statistics()
            assert (statistics["rejections_tokens"], statistics["rejections_requests"]) == (7, 3)
            accepted[0].close_nowait()
            with pytest.raises(OverloadedError) as caught:
                await client.submit([1] * 21, LONG)
            assert caught.value.reason == "tokens"
            assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0  # one has ended by now
            for stream in accepted[1:]:
                stream.close_nowait()
            async with client.generate([1] * 100, LONG):  # longer than the limit: alone, it is taken
                with pytest.raises(OverloadedError):
                    await client.submit([1], LONG)
            await client.drain()
    assert len(scripted.received("add")) == 5


async def test_prompts_count_until_their_first_output() -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, max_num_queued_tokens=10) as client:
            streams = []
            for n in range(5):
                streams.append(await client.submit([n] * 10, LONG))
                assert client.core.session.connection.requests.num_queued_tokens == 10
                await anext(streams[-1])
                assert client.core.session.connection.requests.num_queued_tokens == 0
            await client.abort_all()


@pytest.mark.feature("L21")
@pytest.mark.case("K73")
async def test_each_completion_waits_with_its_own_prompt_tokens() -> None:
    two = SamplingParams(max_tokens=2000, n=2)
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(SILENT).engine, max_num_queued_tokens=30) as client:
            async with client.generate([1] * 10, two):
                with pytest.raises(OverloadedError) as caught:
                    await client.submit([1] * 10, two)
                assert caught.value.reason == "tokens"
                async with client.generate([1] * 10, LONG):
                    pass


@pytest.mark.parametrize("limit", ["max_num_queued_reqs", "max_num_queued_tokens"])
async def test_those_who_wait_are_sent_in_the_order_of_arrival(limit: str) -> None:
    scripted = ScriptedTwin()
    got: list[int] = []
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, admission="wait", **{limit: 2}) as client:  # type: ignore[arg-type]
            _ = [out async for out in client.generate([0, 0], SamplingParams(max_tokens=1))]  # what is asked only once

            async def consume(n: int) -> None:
                outputs = [out async for out in client.generate([n, n], SamplingParams(max_tokens=5))]
                assert outputs[-1].finish_reason == "length"
                got.append(n)

            async with anyio.create_task_group() as tasks:
                for n in range(40):
                    tasks.start_soon(consume, n)
                    await anyio.lowlevel.checkpoint()
                with pytest.raises(OverloadedError):
                    await client.submit([1, 1], LONG, nowait=True)
    assert sorted(got) == list(range(40))
    assert [add[1][0] for add in scripted.received("add")[1:]] == list(range(40))


async def test_one_that_gives_up_waiting_lets_the_next_one_pass() -> None:
    scripted = ScriptedTwin(SILENT)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, admission="wait", max_num_queued_reqs=1) as client:
            first = await client.submit([0], LONG)
            scopes = [anyio.CancelScope() for _ in range(4)]
            sent: list[int] = []

            async def wait(n: int) -> None:
                with scopes[n]:
                    stream = await client.submit([n + 1], LONG)
                    sent.append(n)
                    stream.close_nowait()

            async with anyio.create_task_group() as tasks:
                for n in range(4):
                    tasks.start_soon(wait, n)
                await anyio.wait_all_tasks_blocked()
                scopes[0].cancel()
                scopes[2].cancel()
                first.close_nowait()
                scopes[1].cancel()  # it may have been woken: then it goes, or hands on
            assert sent in ([3], [1, 3])
            assert client.statistics()["requests_waiting"] == 0
            client.check_admission()


@pytest.mark.parametrize("exit_route", ["finish", "fail", "abort", "cancel", "reject", "break", "death"])
@pytest.mark.case("K73")
async def test_capacity_comes_back_on_every_route(exit_route: str) -> None:
    rules = (
        RequestRule(first_token=2, after_tokens=1, finish="error"),
        RequestRule(first_token=3, silent=True),
        RequestRule(first_token=4, after_tokens=1),
    )
    faults = (Fault(do="kill", direction="in", kind="add", nth=2),) if exit_route == "death" else ()
    scripted = ScriptedTwin(Script(requests=rules, faults=faults))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, max_num_queued_reqs=2) as client:
            admission = client._entered_desk().admission
            held = await client.submit([3], LONG)
            if exit_route == "finish":
                _ = [out async for out in client.generate([4], LONG)]
            elif exit_route == "fail":
                with pytest.raises(RequestFailed):
                    _ = [out async for out in client.generate([2], LONG)]
            elif exit_route == "abort":
                stream = await client.submit([3], LONG)
                await client.abort(stream)
            elif exit_route == "cancel":
                with anyio.move_on_after(0.01):
                    await anext(client.generate([3], LONG))
            elif exit_route == "reject":
                with pytest.raises(RequestRejected):
                    await client.submit([-1], LONG)
            elif exit_route == "break":
                async with client.generate([1], LONG) as stream:
                    async for _ in stream:
                        break
            else:
                with pytest.raises(EngineDeadError):
                    _ = [out async for out in client.generate([1], LONG)]
            assert admission.num_outstanding == (0 if exit_route == "death" else 1)
            assert admission.tickets == {}
            held.close_nowait()
            assert admission.num_outstanding == 0


@one_loop
@pytest.mark.case("K73")
async def test_a_hundred_thousand_requests_leave_nothing_behind() -> None:
    """A random mix of ways out, on the parts that count: never above the limit, never below zero, zero at the end."""
    rng = random.Random(73)
    registry = RequestRegistry()
    session: Any = SimpleNamespace(
        connection=SimpleNamespace(requests=registry),
        send_budget=SimpleNamespace(any_room=lambda coming_bytes=0: True),
        check_usable=lambda: None,
        check_admitting=lambda: None,
        sent_again=0,
    )
    admission = Admission(session, AdmissionSettings(max_num_queued_reqs=10, max_num_queued_tokens=100))
    consumer = SimpleNamespace(push=lambda output: None, fail=lambda error: None, aborted=lambda: None)
    lengths: dict[str, int] = {}
    queued: set[str] = set()
    accepted = turned_away = 0

    def end_some() -> None:
        request_id = rng.choice(list(registry.live))
        how = rng.randrange(6)
        if how == 0:
            registry.close(request_id, aborted=True)
        elif how == 1:
            registry.dispatch([EngineCoreOutput(request_id, [1], finish_reason=FinishReason.LENGTH)] * 2)
        elif how == 2:
            registry.dispatch([EngineCoreOutput(request_id, [1])])
        elif how == 3:
            registry.dispatch([EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)])
        elif how == 4 and rng.random() < 0.05:
            registry.fail_all(EngineDeadError("killed"), registry.live[request_id].rank)
        else:
            registry.close(request_id)
        queued.discard(request_id)
        queued.intersection_update(registry.live)

    for number in range(100_000):
        ticket = admission.ticket(None, num_seqs=1, size_bytes=10)
        length = rng.randrange(1, 40)
        try:
            await admission.enter(ticket)
            await admission.clear(ticket, length)
            if rng.random() < 0.9:
                registry.open(f"r{number}", rng.randrange(3), consumer, num_prompt_tokens=length)
                lengths[f"r{number}"] = length
                queued.add(f"r{number}")
                accepted += 1
        except OverloadedError:
            turned_away += 1
        finally:
            ticket.close()
            ticket.close()
        assert admission.num_outstanding == len(registry.live) <= 10
        assert registry.num_queued_tokens == sum(lengths[one] for one in queued) <= 100
        while registry.live and rng.random() < 0.5:
            end_some()
    while registry.live:
        end_some()
    assert (admission.num_outstanding, registry.num_queued_tokens, admission.tickets) == (0, 0, {})
    assert sum(admission.rejections.values()) == turned_away > 1000
    assert accepted > 10_000


@pytest.mark.feature("L20")
async def test_bytes_that_are_not_read_hold_up_or_turn_away_and_aborts_get_through() -> None:
    scripted = ScriptedTwin(Script(faults=(Fault(do="sleep", direction="in", kind="add", seconds=0.3),)))
    prompt = list(range(500)) * 4
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, max_unread_bytes=6000) as client:
            streams = [await client.submit(prompt, LONG) for _ in range(2)]
            assert client.statistics()["unread_bytes"] > 6000
            with pytest.raises(OverloadedError) as caught:
                await client.submit(prompt, LONG, nowait=True)
            assert caught.value.reason == "bytes"
            streams[1].close_nowait()
            waiting = await client.submit(prompt, SamplingParams(max_tokens=3))  # until the engine has read
            assert [out async for out in waiting][-1].finish_reason == "length"
            streams[0].close_nowait()
            await client.drain()
            assert client.statistics()["unread_bytes"] == 0
    assert sorted(one for ids in scripted.received("abort") for one in ids) == sorted(
        stream.wire_id or "" for stream in streams
    )


@pytest.mark.case("K67")
@pytest.mark.feature("L20")
async def test_payloads_that_are_being_prepared_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred large payloads for an engine that reads nothing: copies are made of no more than the limit holds."""
    scripted = ScriptedTwin()
    payload = EmbedsPrompt(prompt_embeds=SimpleNamespace(nbytes=1 << 20, dtype="float32", shape=(256, 1024)))
    gate, preparing = anyio.Event(), 0

    async def encode(*_: Any) -> Any:
        nonlocal preparing
        preparing += 1
        await gate.wait()
        preparing -= 1
        return [1]

    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, max_unread_bytes=8 << 20) as client:
            await anext(await client.submit([1], SamplingParams(max_tokens=1)))
            monkeypatch.setattr(RequestBuilder, "encode", encode)

            async def submit() -> None:
                stream = client.generate(payload, SamplingParams(max_tokens=1))
                assert [out async for out in stream][-1].finish_reason == "length"

            async with anyio.create_task_group() as tasks:
                for _ in range(100):
                    tasks.start_soon(submit)
                while client.statistics()["requests_waiting"] < 92:
                    await anyio.lowlevel.checkpoint()
                await anyio.wait_all_tasks_blocked()
                assert preparing == 8
                with pytest.raises(OverloadedError):
                    await client.submit(payload, nowait=True)
                gate.set()
            assert client.statistics()["requests_waiting"] == client.statistics()["unread_bytes"] == 0
            assert client._entered_desk().admission.tickets == {}
    assert len(scripted.received("add")) == 101


async def test_a_first_output_tells_that_everything_before_it_was_read() -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            streams = [await client.submit([n] * 100, LONG) for n in range(3)]
            assert client.statistics()["unread_bytes"] > 300
            await anext(streams[-1])
            assert client.statistics()["unread_bytes"] == 0
            await client.abort_all()
    assert not any(call[2] == "is_sleeping" for call in scripted.received("utility")[:1])


@pytest.mark.case("K32")
@pytest.mark.parametrize("call", ["sleep", "pause_generation"])
@pytest.mark.parametrize("admission", ["reject", "wait"])
async def test_nothing_is_sent_behind_a_sleep(call: str, admission: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests at every stage: being prepared, on the wire, queued, running; then one after it."""
    scripted = ScriptedTwin(Script(step_interval_s=0.001, max_running=5))
    ends: list[str] = []
    rng = random.Random(32)
    encode = RequestBuilder.encode

    async def slow(builder: RequestBuilder, *args: Any) -> Any:
        for _ in range(rng.randrange(60)):
            await anyio.lowlevel.checkpoint()
        return await encode(builder, *args)

    monkeypatch.setattr(RequestBuilder, "encode", slow)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, admission=admission) as client:

            async def consume(n: int) -> None:
                try:
                    outputs = [out async for out in client.generate([n], SamplingParams(max_tokens=1000))]
                    ends.append(str(outputs[-1].finish_reason))
                except EngineError as exc:
                    ends.append(type(exc).__name__)

            async with anyio.create_task_group() as tasks:
                for n in range(20):
                    tasks.start_soon(consume, n)
                for _ in range(30):
                    await anyio.lowlevel.checkpoint()
                with anyio.fail_after(2):
                    await getattr(client, call)()
                    sent = len(scripted.received("add"))
                    while ends.count("abort") < sent:  # nobody who has been let in waits on
                        await anyio.lowlevel.checkpoint()
                assert client.statistics()["requests_in_flight"] == 0
                for n in range(20, 25):
                    tasks.start_soon(consume, n)
                for _ in range(100):
                    await anyio.lowlevel.checkpoint()
                assert len(scripted.received("add")) == sent < 20
                if admission == "reject":
                    assert len(ends) == 25
                    with pytest.raises(EngineAsleepError, match="since this client asked for it"):
                        client.check_admission()
                else:
                    assert client.statistics()["requests_waiting"] == 25 - sent
                    with pytest.raises(EngineAsleepError):
                        await client.submit([1], nowait=True)
                await (client.wake_up() if call == "sleep" else client.resume_generation())
                if admission == "wait":
                    while len(scripted.received("add")) == sent:
                        await anyio.lowlevel.checkpoint()
                    await client.abort_all()
            if admission == "reject":
                assert ends.count("EngineAsleepError") == 25 - sent
            assert ends.count("abort") >= sent
            out = [out async for out in client.generate([70], SamplingParams(max_tokens=2))]
            assert out[-1].finish_reason == "length"
    kinds = [one.body[2] if one.kind == "utility" else one.kind for one in scripted.records() if one.direction == "in"]
    stop = kinds.index(call)
    assert "add" not in kinds[stop : kinds.index("wake_up" if call == "sleep" else "resume_scheduler")]
    assert "add" in kinds[stop:]


async def test_a_refused_pause_leaves_the_door_open() -> None:
    scripted = ScriptedTwin(Script(utilities=(UtilityRule(method="pause_generation", do="fail"),)))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            with pytest.raises(EngineError, match="as the script says"):
                await client.pause_generation()
            out = [out async for out in client.generate([1], SamplingParams(max_tokens=2))]
            assert out[-1].finish_reason == "length"


@pytest.mark.parametrize(
    "bad",
    [{"max_num_queued_reqs": 0}, {"max_num_queued_tokens": 1.5}, {"max_num_queued_reqs": True}, {"admission": "x"}],
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EngineClient(engine=ScriptedTwin().engine, **bad)
