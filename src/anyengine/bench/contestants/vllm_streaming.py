"""``vllm_streaming.py MODEL_DIR LOOP[+stats] PORT``: vLLM's ``AsyncLLM``, one task for each stream.

On an engine that comes to ``PORT``, in an environment of its own, without ours. Its statistics are off, unless they are
asked for: on is what it comes with, off is what it costs least with.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - it is what AsyncLLM runs on
import json
import os
import sys
from pathlib import Path
from typing import Any


async def main(model_dir: str, port: int, *, stats: bool) -> None:
    from window import Window, freeze_start_up, tell_apart  # type: ignore[import-not-found]  # beside us

    say = tell_apart()
    import vllm
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from protocol import make_prompts  # type: ignore[import-not-found]  # beside us

    args = vllm.AsyncEngineArgs(
        model=model_dir,
        data_parallel_size_local=0,
        data_parallel_address="127.0.0.1",
        data_parallel_rpc_port=port,
        max_model_len=8192,
        enforce_eager=True,
        disable_log_stats=not stats,
    )
    llm = AsyncLLM.from_engine_args(args)
    freeze_start_up()
    say({"version": vllm.__version__})

    async def measure(task: dict[str, Any]) -> dict[str, Any]:
        prompts = make_prompts(task["streams"], task["input_tokens"], task["seed"])
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=task["output_tokens"], ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        window = Window(task["streams"] * task["output_tokens"])

        async def consume(number: int, prompt: list[int]) -> None:
            async for out in llm.generate({"prompt_token_ids": prompt}, params, f"{task['seed']}-{number}"):
                (completion,) = out.outputs
                window.items += 1
                window.tokens += len(completion.token_ids)
                window.characters += len(completion.text)
                if window.tokens >= window.mark:
                    window.note()

        async with asyncio.TaskGroup() as consumers:
            for number, prompt in enumerate(prompts):
                consumers.create_task(consume(number, prompt))
        figures: dict[str, Any] = window.figures()
        return figures

    while line := await asyncio.to_thread(sys.stdin.readline):
        say(await measure(json.loads(line)))
    llm.shutdown()


def _run() -> None:
    loop, _, extra = sys.argv[2].partition("+")
    run = asyncio.run
    if loop == "uvloop":
        import uvloop

        run = uvloop.run
    run(main(sys.argv[1], int(sys.argv[3]), stats=extra == "stats"))


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    sys.path.insert(0, str(Path(__file__).parent))
    _run()
