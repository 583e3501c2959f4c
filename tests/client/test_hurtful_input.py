"""What would hurt an engine does not leave the low-level client either; it stays usable, and so does the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from engines import toy
from tiny_models import VOCAB_SIZE, make_tiny_model

from anyengine import (
    EmbeddedEngine,
    EncodeError,
    EngineCoreClient,
    EngineCoreRequest,
    LocalProtocolError,
    RequestRejected,
    UtilityError,
    UtilityRejected,
)
from anyengine._wire import WireLoRARequest, WireSamplingParams
from anyengine.testing.pytest_plugin import BACKENDS
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio


def request(request_id: Any = "x", prompt: Any = (1,), sampling: Any = None, **fields: Any) -> EngineCoreRequest:
    sampling = WireSamplingParams(max_tokens=5) if sampling is None else sampling
    return EngineCoreRequest(
        request_id, list(prompt) if isinstance(prompt, tuple) else prompt, sampling_params=sampling, **fields
    )


BAD_REQUESTS: list[tuple[str, EngineCoreRequest]] = [
    ("request_id", request(7)),
    ("request_id", request("")),
    ("data_parallel_rank", request(data_parallel_rank="0")),  # type: ignore[arg-type]
    ("prompt_token_ids", request(prompt=[])),
    ("prompt_token_ids", request(prompt=None)),
    ("prompt_token_ids", request(prompt=[-1])),
    ("prompt_token_ids", request(prompt=[1.5])),
    ("prompt_token_ids", request(prompt=[1] * 10_000)),
    ("sampling_params.temperature", request(sampling=WireSamplingParams(temperature=-1.0))),
    ("sampling_params.max_tokens", request(sampling=WireSamplingParams(max_tokens=None))),
    ("sampling_params.top_k", request(sampling=WireSamplingParams(top_k="x"))),  # type: ignore[arg-type]
    ("sampling_params", request(sampling=5)),
    ("lora_request", request(lora_request=WireLoRARequest("l", 1, "/l"))),
    ("trace_headers", request(trace_headers={"a": b"b"})),  # type: ignore[dict-item]
    ("reasoning_parser_kwargs", request(reasoning_parser_kwargs={"a": object()})),
]
BAD_CALLS: list[tuple[str, Callable[[EngineCoreClient], Any]]] = [
    ("method", lambda core: core.utility("shutdown")),
    ("method", lambda core: core.utility("_send_engine_dead")),
    ("method", lambda core: core.utility(5)),  # type: ignore[arg-type]
    ("args[0]", lambda core: core.utility("collective_rpc", "get_kv_cache_spec")),
    ("args[0]", lambda core: core.utility("collective_rpc", print)),
]


@pytest.mark.feature("R54", "C42")
@pytest.mark.case("K66", "K70")
async def test_nothing_that_hurts_is_sent() -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(toy()) as core:
            before = await core.utility("get_engine_statistics")
            for parameter, bad in BAD_REQUESTS:
                with pytest.raises((RequestRejected, EncodeError)) as caught:
                    core.add(bad)
                error = caught.value
                named = error.field if isinstance(error, EncodeError) else error.parameter
                assert named is not None and named.startswith(parameter), error
                assert isinstance(error, EncodeError) or error.remedy
                assert core.statistics()["requests_in_flight"] == 0
            with pytest.raises(LocalProtocolError, match="client_index=1"):
                core.add(request(client_index=1))
            for bad_ids in (5, None, [5]):
                with pytest.raises(RequestRejected) as rejected:
                    core.abort(bad_ids)  # type: ignore[arg-type]
                assert rejected.value.parameter == "request_ids"
            for parameter, act in BAD_CALLS:
                with pytest.raises(UtilityRejected) as refused:
                    await act(core)
                assert refused.value.parameter == parameter and refused.value.remedy
            assert core.statistics()["utility_calls_in_flight"] == 0
            with pytest.raises(UtilityError, match="no_such_method") as failed:
                await core.utility("no_such_method")  # ours says no: it is asked
            assert not isinstance(failed.value, UtilityRejected)
            with pytest.raises(UtilityError, match="shutdown") as failed:
                await core.utility("shutdown", unchecked=True)
            assert not isinstance(failed.value, UtilityRejected)

            after = await core.utility("get_engine_statistics")
            assert after["adds_received"] == before["adds_received"]
            assert after["aborts_received"] == before["aborts_received"]
            assert after["malformed_messages"] == 0
            core.add(request("x"))
            tokens: list[int] = []
            async for batch in core.outputs():
                tokens += [token for output in batch.outputs for token in output.new_token_ids]
                if any(output.finish_reason is not None for output in batch.outputs):
                    break
            assert tokens == expected_tokens([1], 5)


async def test_an_aborted_id_is_not_sent_again() -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(toy(step_delay_s=0.002)) as core:
            core.add(request("x", sampling=WireSamplingParams(max_tokens=2000)))
            core.abort("x")
            with pytest.raises(LocalProtocolError, match="another id"):
                core.add(request("x"))
            assert core.statistics()["requests_in_flight"] == 0
            assert (await core.utility("get_engine_statistics"))["adds_received"] == 1


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model("qwen2", tmp_path)


@pytest.mark.parametrize("anyio_backend", [BACKENDS["trio"]], ids=["trio"])
async def test_a_low_level_client_knows_the_vocabulary(model: Path) -> None:
    """Of a model whose files are there, text or not."""
    with anyio.fail_after(60):
        async with EngineCoreClient(EmbeddedEngine(model=str(model), max_model_len=64, num_threads=1)) as core:
            with pytest.raises(RequestRejected, match=f"0 to {VOCAB_SIZE - 1}"):
                core.add(request(prompt=[VOCAB_SIZE]))
            assert (await core.utility("get_engine_statistics"))["adds_received"] == 0
