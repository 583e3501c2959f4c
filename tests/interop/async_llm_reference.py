"""What vLLM's own AsyncLLM answers, with an engine core of its own: the reference for ours.

Runs under vLLM's interpreter and imports nothing of ours. Standard input: one line of JSON with ``args`` (of the
engine) and ``requests`` (``prompt``, ``params``); standard output: one line of JSON with the answers, in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs to standard output


def plain(rows: Any) -> list[dict[int, tuple[float, int]] | None] | None:
    if rows is None:
        return None
    return [None if row is None else {token: (one.logprob, one.rank) for token, one in row.items()} for row in rows]


async def answer(llm: AsyncLLM, number: int, request: dict[str, Any]) -> dict[str, Any]:
    prompt = {"prompt_token_ids": request["prompt"]}
    outputs = [output async for output in llm.generate(prompt, SamplingParams(**request["params"]), f"r{number}")]
    last = outputs[-1]
    (completion,) = last.outputs
    return {
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "logprobs": plain(completion.logprobs),
        "prompt_logprobs": plain(last.prompt_logprobs),
    }


async def main() -> None:
    job = json.loads(sys.stdin.readline())
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["args"]))
    answers = [await answer(llm, number, request) for number, request in enumerate(job["requests"])]
    print(json.dumps(answers), file=ANSWERS, flush=True)
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
