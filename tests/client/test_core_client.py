"""``EngineCoreClient``: output batches, utility calls, notifications."""

from __future__ import annotations

import anyio
import pytest
from engines import misbehaving, toy

from anyengine import (
    ClientClosedError,
    EEPNotification,
    EncodeError,
    EngineClient,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    FaultStatus,
    LocalProtocolError,
    SamplingParams,
    UtilityError,
)
from anyengine._wire import WireSamplingParams
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio


def request(request_id: str, prompt: list[int], max_tokens: int = 5) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt, sampling_params=WireSamplingParams(max_tokens=max_tokens))


@pytest.mark.feature("C37")
async def test_add_outputs_abort() -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(toy(step_delay_s=0.002)) as core:
            core.add(request("a", [1], 6))
            core.add(request("b", [2], 2000))
            with pytest.raises(LocalProtocolError, match="alive already"):
                core.add(request("a", [3]))
            tokens: dict[str, list[int]] = {"a": [], "b": []}
            async for batch in core.outputs():
                for output in batch.outputs:
                    tokens[output.request_id] += output.new_token_ids
                if any(output.request_id == "a" and output.finish_reason is not None for output in batch.outputs):
                    break
            core.abort(["b", "unknown"])
            assert tokens["a"] == expected_tokens([1], 6)
            assert tokens["b"] == expected_tokens([2], len(tokens["b"]))
            statistics = await core.utility("get_engine_statistics")
            assert (statistics["aborts_received"], statistics["num_running_requests"]) == (1, 0)
            assert core.statistics()["requests_in_flight"] == 0


@pytest.mark.feature("C37")
async def test_utility_results_and_failures() -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(toy()) as core:
            assert await core.utility("get_supported_tasks") == ["generate"]
            with pytest.raises(UtilityError) as caught:
                await core.utility("__class__")
            assert (caught.value.method, caught.value.rank) == ("__class__", 0)
            with pytest.raises(EncodeError):
                await core.utility("get_supported_tasks", object())
            assert core.statistics()["utility_calls_in_flight"] == 0


@pytest.mark.feature("C37")
async def test_the_end_is_injected_into_the_stream_of_batches() -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(toy(fail_at_step=3)) as core:
            core.add(request("a", [1], 50))
            tokens: list[int] = []
            with pytest.raises(EngineDeadError):
                async for batch in core.outputs():
                    tokens += [token for output in batch.outputs for token in output.new_token_ids]
            assert tokens == expected_tokens([1], 2)
            with pytest.raises(EngineDeadError):  # on every further call
                await core.receive_outputs()


async def test_cancellation_is_injected_into_the_stream_of_batches() -> None:
    """A consumer outside the cancelled scope is told; it does not hang."""
    told: list[BaseException] = []

    async def consume(core: EngineCoreClient) -> None:
        try:
            async for _ in core.outputs():
                pass
        except ClientClosedError as exc:
            told.append(exc)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as elsewhere:
            with anyio.CancelScope() as scope:
                async with EngineCoreClient(toy()) as core:
                    elsewhere.start_soon(consume, core)
                    await anyio.lowlevel.checkpoint()
                    scope.cancel()
                    await anyio.sleep_forever()
    assert len(told) == 1


@pytest.mark.feature("C41")
async def test_notifications_run_in_tasks_of_the_session_and_fail_alone(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[EEPNotification | FaultStatus] = []
    both = anyio.Event()

    async def handler(notification: EEPNotification | FaultStatus) -> None:
        seen.append(notification)
        if len(seen) == 2:
            both.set()
        await anyio.lowlevel.checkpoint()
        raise ZeroDivisionError("the application's own bug")

    with anyio.fail_after(30):
        async with EngineCoreClient(misbehaving("notify"), on_notification=handler) as core:
            assert await core.utility("notify") == "done"  # -1 and -2 never touch the table of pending calls
            await both.wait()
            while core.statistics()["notification_failures"] < 2:
                await anyio.lowlevel.checkpoint()
            assert core.statistics()["malformed_messages"] == 2
            assert await core.utility("notify again") == "done"
    assert set(seen[:2]) == {EEPNotification("RECONFIGURE_FINISHED", 0), FaultStatus(0, "unhealthy", "x")}
    assert any("handler" in record.message for record in caplog.records)


async def test_a_running_handler_ends_with_the_block() -> None:
    entered, left = anyio.Event(), anyio.Event()

    async def handler(notification: EEPNotification | FaultStatus) -> None:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            left.set()

    with anyio.fail_after(30):
        async with EngineCoreClient(misbehaving("notify"), on_notification=handler) as core:
            await core.utility("notify")
            await entered.wait()
            assert not left.is_set()
        assert left.is_set()


@pytest.mark.feature("L13")
async def test_cancelled_calls_are_forgotten_and_their_late_replies_dropped() -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(misbehaving("slow_calls")) as core:
            async with anyio.create_task_group() as tasks:
                for _ in range(1000):
                    tasks.start_soon(core.utility, "never answered")
                while core.statistics()["utility_calls_in_flight"] < 1000:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            assert core.statistics()["utility_calls_in_flight"] == 0
            assert await core.utility("flush") == "flushed"
            assert core.statistics()["late_utility_replies"] == 1000


@pytest.mark.feature("C41")
async def test_replies_in_any_order_find_their_calls() -> None:
    results: list[int] = []

    async def call(core: EngineCoreClient) -> None:
        results.append(await core.utility("echo my call id"))

    with anyio.fail_after(30):
        async with EngineCoreClient(misbehaving("slow_calls")) as core, anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(call, core)
            while core.statistics()["utility_calls_in_flight"] < 50:
                await anyio.lowlevel.checkpoint()
            await core.utility("flush")
    assert len(set(results)) == 50
    assert len({call_id >> 32 for call_id in results}) == 1  # one random prefix for each client
    assert all(0 <= call_id < 1 << 63 for call_id in results)


@pytest.mark.parametrize("probe", ["found", "missing"])
async def test_an_engine_that_says_nothing_of_its_release_is_asked(probe: str) -> None:
    """Releases up to 0.16 have the end-of-sequence id at position 5, later ones the arrival time."""
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("old_release", probe)) as client:
            [out] = [out async for out in client.generate([1, 2], SamplingParams(max_tokens=4))]
            dialect = client.core.session.connection.dialects[0]
            assert (out.finish_reason, out.token_ids) == ("length", [2 if probe == "found" else 1])
            assert (dialect.since >= (0, 17, 0)) == (probe == "found")
            assert dialect.probe is None


async def test_an_engine_whose_input_is_gone_before_it_is_ready_is_noticed() -> None:
    """Between registration and READY nobody watches for it: it must count afterwards, however it falls."""
    with anyio.fail_after(20), pytest.raises(EngineDeadError, match="gone"):
        async with EngineClient(engine=misbehaving("old_release", "gone")) as client:
            await client.wait_dead()
            await client.core.utility("is_sleeping")
