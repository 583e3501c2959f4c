"""A real vLLM engine core that is killed in the middle of a request is started again, and the request goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from vllm_engines import make_vllm_model, one_process, tiny_vllm

from anyengine import ClientState, EngineClient, RestartPolicy, SamplingParams

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """One loop: two starts of an engine are long enough."""
    return "trio", {}


@pytest.mark.timeout(600)
@pytest.mark.feature("L28")
@pytest.mark.feature("L31")
async def test_a_killed_engine_core_is_started_again_and_its_request_goes_on(vllm_python: str, tmp_path: Path) -> None:
    engine = tiny_vllm(vllm_python, make_vllm_model(tmp_path), env=one_process)
    policy = RestartPolicy(backoff_s=0.1, in_flight="replay")
    with anyio.fail_after(560):
        async with EngineClient(engine=engine, restart=policy) as client:
            undisturbed = [t async for out in client.generate([5, 6, 7, 8], GREEDY) for t in out.token_ids]
            received: list[int] = []
            killed = False
            async with client.generate([5, 6, 7, 8], GREEDY) as stream:
                async for out in stream:
                    received += out.token_ids
                    if not killed and len(received) > 100:
                        (child,) = client.core.session.children
                        assert child.child.pid is not None
                        os.kill(child.child.pid, signal.SIGKILL)
                        killed = True
            assert received == undisturbed and stream.attempts == 2
            assert (await client.health("generate", timeout_s=60)).is_healthy
            await client.sleep(0)
            assert client.state is ClientState.PAUSED
            await client.wake_up(["scheduling"])
            assert client.state is ClientState.READY
