"""A real vLLM engine core with fault tolerance: at a fault it waits, says so, and answers what it is told.

vLLM has it for mixtures of experts with external load balancing and a special backend alone, which this client does
not start: here it is switched on in the engine's process, behind those checks.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest
from hurtful import send_raw
from vllm_engines import make_vllm_model, on_trio, one_process, tiny_vllm

from anyengine import EngineClient, FaultStatus, FaultToleranceRequest

pytestmark = pytest.mark.anyio

RETRY = FaultToleranceRequest("retry", request_id="ft-1")
SWITCHED_ON = """
from vllm.v1.engine.core import EngineCore
init = EngineCore.__init__
def init_and_switch_on(self, vllm_config, *args, **kwargs):
    init(self, vllm_config, *args, **kwargs)
    vllm_config.parallel_config.enable_fault_tolerance = True
EngineCore.__init__ = init_and_switch_on
"""


@on_trio
@pytest.mark.feature("C28")
async def test_a_fault_is_told_and_its_handling_is_answered(vllm_python: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SWITCHED_ON)
    model = make_vllm_model(tmp_path / "model")
    engine = tiny_vllm(vllm_python, model, env={**one_process, "PYTHONPATH": str(tmp_path)})
    told = anyio.Event()

    async def on_notification(notification: object) -> None:
        assert isinstance(notification, FaultStatus) and notification.status == "unhealthy"
        told.set()

    with anyio.fail_after(300):
        async with EngineClient(engine=engine, shutdown_grace_s=1, on_notification=on_notification) as client:
            result = await client.handle_fault(RETRY, unchecked=True)
            assert (result.request_id, result.success) == ("ft-1", False) and "HEALTHY" in str(result.reason)
            known = (await client.get_status())[0]
            assert (known.status, known.last_request_id, known.error) == ("healthy", "ft-1", result.reason)
            send_raw(client, b"\x01", msgspec.msgpack.encode(5))  # aborts no list of ids: a fault of its main loop
            await told.wait()
            known = (await client.get_status())[0]
            assert (known.status, known.fault_info) == ("unhealthy", "TypeError")
            result = await client.handle_fault(RETRY, unchecked=True)
            assert not result.success  # a worker on CPUs knows no command for it
            after = (await client.get_status())[0]
            assert after == msgspec.structs.replace(known, last_request_id="ft-1", error=after.error)
