"""vLLM's AsyncLLM in a process of its own, driven line by line: JSON commands in, JSON events out.

Runs under vLLM's interpreter and imports nothing of ours. It waits for engines that others start
(``data_parallel_size_local=0``) at ``--data-parallel-address`` and ``--data-parallel-rpc-port``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

EVENTS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # vLLM logs to standard output


def tell(**event: Any) -> None:
    EVENTS.write(json.dumps(event) + "\n")


async def generate(llm: AsyncLLM, request_id: str, prompt: list[int], params: dict[str, Any], leave_after: int) -> None:
    """Stream one request; with ``leave_after``, close the generator after that many outputs."""
    outputs = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(output_kind=RequestOutputKind.DELTA, **params), request_id
    )
    try:
        count = 0
        async for output in outputs:
            (completion,) = output.outputs
            logprobs = [{t: [p.logprob, p.rank] for t, p in step.items()} for step in completion.logprobs or ()]
            tell(
                event="output",
                id=request_id,
                token_ids=list(completion.token_ids),
                text=completion.text,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                logprobs=logprobs,
            )
            count += 1
            if count == leave_after:
                await outputs.aclose()
                break
        tell(event="end", id=request_id)
    except EngineDeadError as error:
        tell(event="dead", id=request_id, error=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test has to see it
        tell(event="failed", id=request_id, type=type(error).__name__, error=str(error))


async def call(llm: AsyncLLM, name: str, args: list[Any]) -> None:
    """A utility, by the name of AsyncLLM's method, or (``core.``) of the engine core client's."""
    owner = llm
    if name.startswith("core."):
        owner, name = llm.engine_core, name.removeprefix("core.")
    try:
        result = await getattr(owner, name)(*args)
        tell(event="result", name=name, result=sorted(result) if isinstance(result, set | frozenset) else result)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test has to see it
        tell(event="result", name=name, type=type(error).__name__, error=str(error))


async def main() -> None:
    args = AsyncEngineArgs(**json.loads(sys.argv[1]))
    llm = AsyncLLM.from_engine_args(args)
    tell(event="ready", max_model_len=llm.model_config.max_model_len, tasks=await llm.get_supported_tasks())
    commands: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        received = os.read(0, 1 << 20).decode()
        if not received:
            loop.remove_reader(0)
        for line in received.splitlines() or ['{"do": "shutdown"}']:
            commands.put_nowait(line)

    loop.add_reader(0, read)
    tasks = set()
    while True:
        command = json.loads(await commands.get())
        match command.pop("do"):
            case "generate":
                tasks.add(asyncio.create_task(generate(llm, **command)))
            case "call":
                tasks.add(asyncio.create_task(call(llm, **command)))
            case "shutdown":
                llm.shutdown()
                tell(event="down")
                return


if __name__ == "__main__":
    asyncio.run(main())
