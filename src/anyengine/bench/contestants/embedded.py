"""``embedded.py MODEL_DIR DTYPE THREADS``: the embedded engine, through the client as everybody uses it."""

from __future__ import annotations

import sys

from anyio.from_thread import start_blocking_portal

from anyengine import EmbeddedEngine, EngineClient, SamplingParams
from anyengine.bench.contestants.protocol import answer_lines
from anyengine.config import DType


def main(model: str, dtype: DType, num_threads: int) -> None:
    # No prompt begins like another one, and all have a gibibyte of keys and values: see vllm_offline.py.
    engine = EmbeddedEngine(
        model=model,
        dtype=dtype,
        num_threads=num_threads,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
    )
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(EngineClient(engine=engine)) as client:

        async def generate(prompts: list[list[int]], output_tokens: int) -> int:
            params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
            streams = [await client.submit(prompt, params) for prompt in prompts]
            return sum([len(out.token_ids) for stream in streams async for out in stream])

        answer_lines(lambda prompts, output_tokens: portal.call(generate, prompts, output_tokens), {})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))  # type: ignore[arg-type]  # our parent knows the dtypes
