"""An engine dies among many users: everyone is told in time, of the same, and the machine is as it was."""

from __future__ import annotations

import anyio
import pytest

from anyengine import ClientState, EngineClient, EngineDeadError, SamplingParams
from anyengine.testing.scripted import Fault, Script, ScriptedProcess, UtilityRule, expected_tokens

pytestmark = pytest.mark.anyio

CONSUMERS, CALLERS, SUBMITTERS = 200, 20, 10


class Crowd:
    """What each of many users was told."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.errors: list[EngineDeadError] = []
        self.late: list[EngineDeadError] = []
        self.streaming = 0
        self.all_stream = anyio.Event()

    async def consume(self, first: int) -> None:
        tokens: list[int] = []
        try:
            async for out in self.client.generate([first], SamplingParams(max_tokens=2000)):
                self.streaming += not tokens
                tokens += out.token_ids
                if self.streaming == CONSUMERS:
                    self.all_stream.set()
        except EngineDeadError as exc:
            assert tokens == expected_tokens([first], len(tokens))
            self.errors.append(exc)

    async def call(self) -> None:
        try:
            await self.client.reset_mm_cache()
        except EngineDeadError as exc:
            self.errors.append(exc)

    async def submit_on_and_on(self) -> None:
        try:
            while True:
                async with self.client.generate([1], SamplingParams(max_tokens=1)) as stream:
                    await anext(stream)
        except EngineDeadError as exc:
            self.late.append(exc)


@pytest.mark.case("K01")
@pytest.mark.feature("L05")
async def test_everyone_is_told_of_a_silent_death() -> None:
    """SIGKILL while 200 streams and 20 calls wait and others are being submitted: rank, pid and signal, within 2 s;
    whoever comes later is told at once; no process is left (leak check)."""
    kill = Fault(do="kill", direction="in", kind="profile")
    silent = UtilityRule(method="reset_mm_cache", do="never")
    scripted = ScriptedProcess(Script(faults=(kill,), utilities=(silent,), step_interval_s=0.5))
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine, liveness_timeout_s=None) as client:
            pid = client.core.session.engines[0].child.pid
            crowd = Crowd(client)
            async with anyio.create_task_group() as users:
                for first in range(CONSUMERS):
                    users.start_soon(crowd.consume, first)
                await crowd.all_stream.wait()
                for _ in range(SUBMITTERS):
                    users.start_soon(crowd.submit_on_and_on)
                for _ in range(CALLERS):
                    users.start_soon(crowd.call)
                while client.statistics()["utility_calls_in_flight"] < CALLERS:
                    await anyio.lowlevel.checkpoint()
                with anyio.fail_after(2):
                    with pytest.raises(EngineDeadError):
                        await client.core.utility("profile")
                    while len(crowd.errors) < CONSUMERS + CALLERS or len(crowd.late) < SUBMITTERS:
                        await anyio.lowlevel.checkpoint()
            assert {(one.rank, one.pid, one.signal) for one in crowd.errors} == {(0, pid, "SIGKILL")}
            assert {type(one) for one in crowd.errors + crowd.late} == {EngineDeadError}
            assert len({id(one.__cause__) for one in crowd.errors}) == 1
            for one in crowd.late:  # told as it happened: the process may have been on its way out still
                assert (one.rank, one.pid) == (0, pid)
            for later in (client.submit([1]), client.core.utility("is_sleeping")):
                with pytest.raises(EngineDeadError) as caught:
                    await later
                assert caught.value.signal == "SIGKILL"
            assert client.state is ClientState.DEAD
            assert client.statistics()["requests_in_flight"] == client.statistics()["utility_calls_in_flight"] == 0


@pytest.mark.case("K07")
@pytest.mark.parametrize("do", ["dead", "close_output", "close_input"])
async def test_a_fatal_report_and_a_lost_link_are_the_same_to_everyone(do: str) -> None:
    """The process lives in both cases. All calls that wait, and all later ones, raise; the next client starts."""
    fault = Fault(do=do, direction="in", kind="reset_mm_cache", nth=3)  # type: ignore[arg-type]
    silent = UtilityRule(method="reset_mm_cache", do="never")
    broken = ScriptedProcess(Script(faults=(fault,), utilities=(silent,), step_interval_s=0.05))
    with anyio.fail_after(60):
        async with EngineClient(engine=broken.engine, shutdown_grace_s=0.1) as client:
            errors: list[EngineDeadError] = []

            async def call() -> None:
                with pytest.raises(EngineDeadError) as caught:
                    await client.reset_mm_cache()
                errors.append(caught.value)

            async with anyio.create_task_group() as callers:
                stream = await client.submit([1], SamplingParams(max_tokens=2000))
                await anext(stream)
                with anyio.fail_after(2):
                    for _ in range(3):
                        callers.start_soon(call)
                    with pytest.raises(EngineDeadError):
                        async for _ in stream:
                            pass
            with pytest.raises(EngineDeadError) as caught:
                await client.submit([1])
            assert {type(one) for one in (*errors, caught.value)} == {EngineDeadError}
            assert len(errors) == 3
        async with EngineClient(engine=ScriptedProcess().engine) as client:
            assert [out async for out in client.generate([1])]
