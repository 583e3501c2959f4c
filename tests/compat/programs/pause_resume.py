"""A program for vLLM's AsyncLLM: one task generates, another pauses it in the middle, keeps it, and resumes."""

import asyncio
import sys
import time

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

MODEL = sys.argv[1]
PAUSE_S = 0.5
NUM_TOKENS = 200


async def main() -> None:
    engine_args = AsyncEngineArgs(model=MODEL, enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    arrivals: list[tuple[int, float]] = []
    num_before_pause = 0

    async def generate():
        async for output in engine.generate(request_id="story", prompt="The quick brown fox", sampling_params=params):
            arrivals.append((len(output.outputs[0].token_ids), time.monotonic()))
        return output

    async def control():
        nonlocal num_before_pause
        while len(arrivals) < 5:  # noqa: ASYNC110 - as in the example
            await asyncio.sleep(0.001)
        await engine.pause_generation(mode="keep")
        num_before_pause = len(arrivals)
        await asyncio.sleep(PAUSE_S)
        assert len(arrivals) == num_before_pause, "tokens came during the pause"
        await engine.resume_generation()

    last, _ = await asyncio.gather(asyncio.create_task(generate()), asyncio.create_task(control()))
    gap_s = arrivals[num_before_pause][1] - arrivals[num_before_pause - 1][1]
    assert gap_s >= PAUSE_S * 0.9, gap_s
    assert last.finished
    assert len(last.outputs[0].token_ids) == NUM_TOKENS
    counts = [count for count, _ in arrivals]
    assert counts == sorted(set(counts))  # each item has everything so far
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
    print("done")
