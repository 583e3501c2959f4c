"""A program for vLLM's AsyncLLM: three prompts, one after the other, printed as they come."""

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

MODEL = sys.argv[1]
PROMPTS = ["The capital of France", "The quick brown", "emoji"]


async def show(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    params = SamplingParams(
        max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA, ignore_eos=True
    )
    text = ""
    num_tokens = 0
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        assert output.request_id == request_id
        for completion in output.outputs:
            text += completion.text
            num_tokens += len(completion.token_ids)
        if output.finished:
            print(f"{request_id}: {num_tokens} tokens, {prompt + text!r}")
            break
    return text


async def main() -> None:
    engine_args = AsyncEngineArgs(model=MODEL, enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        first = [await show(engine, prompt, f"stream-{i}") for i, prompt in enumerate(PROMPTS)]
        again = [await show(engine, prompt, f"again-{i}") for i, prompt in enumerate(PROMPTS)]
        assert first == again  # the same seed
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
    print("done")
