"""A program for vLLM's AsyncLLMEngine: what its demo server does for each request, without HTTP."""

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.sampling_params import SamplingParams


async def handle(engine: AsyncLLMEngine, body: str, request_id: str) -> list[str]:
    request = json.loads(body)
    prompt = request.pop("prompt")
    stream = request.pop("stream", False)
    params = SamplingParams(**request, skip_clone=True)
    results = engine.generate(prompt, params, request_id)

    async def lines() -> AsyncGenerator[str, None]:
        async for output in results:
            assert output.prompt is not None
            yield json.dumps({"text": [output.prompt + one.text for one in output.outputs]})

    if stream:
        return [line async for line in lines()]
    final = None
    async for output in results:
        final = output
    assert final is not None and final.prompt is not None
    return [json.dumps({"text": [final.prompt + one.text for one in final.outputs]})]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    args = AsyncEngineArgs.add_cli_args(parser).parse_args()
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs.from_cli_args(args), usage_context=None)
    body = {"prompt": "The quick", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = await handle(engine, json.dumps(body), "whole")
    streamed = await handle(engine, json.dumps({**body, "stream": True}), "streamed")
    assert streamed[-1] == whole[0] and len(streamed) > 1
    assert all(json.loads(line)["text"][0].startswith("The quick") for line in streamed)

    cancelled = asyncio.create_task(handle(engine, json.dumps({**body, "max_tokens": 400}), "cancelled"))
    await asyncio.sleep(0.05)
    cancelled.cancel()  # the HTTP client has gone
    try:
        await cancelled
    except asyncio.CancelledError:
        print("cancelled")
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
    print("done")
