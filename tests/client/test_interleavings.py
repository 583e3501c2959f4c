"""K38: streams opened, advanced, closed and abandoned in random order under random scopes; the client works
afterwards."""

from __future__ import annotations

import gc
import inspect
import warnings

import anyio
import pytest
from engines import toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anyengine import EngineClient, RequestStream, SamplingParams
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "open",
                "enter",
                "advance",
                "advance_in_scope",
                "raise_in_loop",
                "break_in_loop",
                "aclose",
                "drop",
                "abort",
            ]
        ),
        st.integers(0, 4),
    ),
    max_size=25,
)


class _Boom(Exception):
    pass


class Program:
    """Up to five streams of one client, driven step by step."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.streams: dict[int, RequestStream] = {}
        self.tokens: dict[int, list[int]] = {}

    async def step(self, action: str, slot: int) -> None:
        if action in ("open", "enter") or slot not in self.streams:
            self.streams[slot] = self.client.generate([slot + 1], SamplingParams(max_tokens=40))
            self.tokens[slot] = []
            if action == "enter":
                await self.streams[slot].__aenter__()
            return
        stream = self.streams[slot]
        if action == "advance":
            await self._advance(slot)
        elif action == "advance_in_scope":
            with anyio.move_on_after(60), anyio.CancelScope():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._advance, slot)
        elif action == "raise_in_loop":
            # Unchanged: no group, no scope corruption. (A stream that was closed unused cannot be entered.)
            with pytest.raises((_Boom, anyio.ClosedResourceError)):
                async with stream:
                    async for out in stream:
                        self._keep(slot, out.token_ids)
                        raise _Boom
                    raise _Boom
        elif action == "break_in_loop":
            async for out in stream:
                self._keep(slot, out.token_ids)
                break
        elif action == "aclose":
            await stream.aclose()
        elif action == "abort":
            stream.abort()
        else:
            del self.streams[slot]

    async def _advance(self, slot: int) -> None:
        out = await anext(self.streams[slot], None)
        if out is not None:
            self._keep(slot, out.token_ids)

    def _keep(self, slot: int, token_ids: list[int]) -> None:
        self.tokens[slot] += token_ids
        assert self.tokens[slot] == expected_tokens([slot + 1], len(self.tokens[slot]))


@pytest.mark.case("K38")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
@given(steps=STEPS)
async def test_any_order_of_opening_advancing_and_leaving(steps: list[tuple[str, int]]) -> None:
    with anyio.fail_after(60), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # dropped streams are part of the game
        async with EngineClient(engine=toy(step_delay_s=0.0005)) as client:
            program = Program(client)
            for action, slot in steps:
                await program.step(action, slot)
            program.streams.clear()
            gc.collect()
            while client.statistics()["requests_in_flight"]:
                await anyio.lowlevel.checkpoint()
            statistics = await client.core.utility("get_engine_statistics")
            assert statistics["num_running_requests"] + statistics["num_waiting_requests"] == 0
            final = [t async for out in client.generate([9], SamplingParams(max_tokens=3)) for t in out.token_ids]
            assert final == expected_tokens([9], 3)


@pytest.mark.case("K38")
def test_generate_is_no_generator() -> None:
    assert not inspect.isasyncgenfunction(EngineClient.generate)
    assert not inspect.iscoroutinefunction(EngineClient.generate)
