"""A program for vLLM's AsyncLLMEngine: two ranks, requests for the second, statistics logged from another thread with a
loop of its own; and nothing is shut down."""

import asyncio
import sys
import threading

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

MODEL = sys.argv[1]


def log_in_background(engine: AsyncLLMEngine, stop: threading.Event) -> None:
    while not stop.is_set():
        asyncio.run(engine.do_log_stats())
        stop.wait(0.05)


async def main() -> None:
    engine_args = AsyncEngineArgs(
        model=MODEL,
        data_parallel_size=2,
        tensor_parallel_size=1,
        dtype="auto",
        max_model_len=256,
        enforce_eager=True,
        enable_log_requests=True,
        disable_custom_all_reduce=True,
    )
    engine = AsyncLLMEngine.from_engine_args(engine_args)
    stop = threading.Event()
    logger = threading.Thread(target=log_in_background, args=(engine, stop), daemon=True)
    logger.start()
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=10, ignore_eos=True)
    for i in range(5):
        final: RequestOutput | None = None
        async for output in engine.generate(
            prompt="The lazy dog", sampling_params=params, request_id=f"request-{i}", data_parallel_rank=1
        ):
            final = output
        assert final is not None and len(final.outputs[0].token_ids) == 10
        print(repr(final.outputs[0].text))
    stop.set()
    logger.join()
    assert logger.daemon


if __name__ == "__main__":
    asyncio.run(main())
    print("done")
