"""POL: pooling requests, where the model is one for pooling."""

from __future__ import annotations

from anyengine._wire import FinishReason, WirePoolingParams
from anyengine.testing.conformance.engine_link import PROMPT, EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect, expect_that
from anyengine.testing.conformance.registry import check
from anyengine.testing.conformance.traffic import TrackedRequest

from .logprobs import values

__all__: list[str] = []


async def _embed(link: EngineLink, *prompts: tuple[int, ...]) -> list[TrackedRequest]:
    tasks = await link.call("get_supported_tasks")
    if "embed" not in tasks:
        raise CheckSkipped(f"the engine offers {', '.join(tasks)}: no embed")
    requests = []
    for prompt in prompts:
        request = link.request(prompt)
        request.sampling_params = None
        request.pooling_params = WirePoolingParams(task="embed", use_activation=True, skip_reading_prefix_cache=False)
        requests.append(link.send_add(request.request_id, link.dialect.encode_add(request)))
    await link.finish(*requests)
    return requests


@check("POL-01", "an embedding is one output: a vector, and STOP", "protocol.md §7")
async def one_output(link: EngineLink) -> None:
    (tracked,) = await _embed(link, PROMPT)
    (output,) = tracked.outputs
    expect("finish reason, tokens", (output.finish_reason, output.new_token_ids), (FinishReason.STOP, []))
    expect_that(output.pooling_output is not None, "pooling_output", expected="a tensor", got=None)


@check("POL-02", "an embedding has length one", "interop.md §7: use_activation")
async def normalised(link: EngineLink) -> None:
    (tracked,) = await _embed(link, PROMPT)
    tensor = tracked.outputs[0].pooling_output
    assert tensor is not None
    norm = sum(value * value for value in values(tensor)) ** 0.5
    expect_that(abs(norm - 1.0) < 1e-2, "length of the vector", expected="1", got=norm)


@check("POL-03", "embeddings in a batch are those of each prompt alone", "protocol.md §7")
async def batch(link: EngineLink) -> None:
    prompts = [PROMPT[:3], PROMPT[2:], PROMPT]
    alone = [values(tracked.outputs[0].pooling_output) for p in prompts for tracked in await _embed(link, p)]  # type: ignore[arg-type]
    together = [values(tracked.outputs[0].pooling_output) for tracked in await _embed(link, *prompts)]  # type: ignore[arg-type]
    worst = max(abs(a - b) for one, two in zip(alone, together, strict=True) for a, b in zip(one, two, strict=True))
    expect_that(worst < 1e-2, "largest difference", expected="none to speak of", got=worst)
