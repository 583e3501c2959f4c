"""``streaming.py MODEL_DIR LOOP PORT``: our client, one task for each stream, on an engine that comes to ``PORT``.

Consumers are tasks of the event loop's own kind, as those of AsyncLLM's contestant are: they are not the client's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from anyengine import EngineClient, RemoteEngine, SamplingParams
from anyengine.bench.contestants.protocol import make_prompts
from anyengine.bench.contestants.window import Window, freeze_start_up, tell_apart

Consumer = Callable[[], Coroutine[Any, Any, None]]


async def main(model_dir: str, port: int, run: Callable[[list[Consumer]], Awaitable[None]]) -> None:
    say = tell_apart()
    engine = RemoteEngine(handshake=f"tcp://127.0.0.1:{port}", model_dir=model_dir)
    async with EngineClient(engine=engine) as client:
        freeze_start_up()
        say({})
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            say(await measure(client, json.loads(line), run))


async def measure(
    client: EngineClient, task: dict[str, Any], run: Callable[[list[Consumer]], Awaitable[None]]
) -> dict[str, Any]:
    prompts = make_prompts(task["streams"], task["input_tokens"], task["seed"])
    params = SamplingParams(temperature=0.0, max_tokens=task["output_tokens"], ignore_eos=True)
    window = Window(task["streams"] * task["output_tokens"])

    async def consume(prompt: list[int]) -> None:
        async for out in client.generate(prompt, params):
            window.items += 1
            window.tokens += len(out.token_ids)
            window.characters += len(out.text)
            if window.tokens >= window.mark:
                window.note()

    await run([partial(consume, prompt) for prompt in prompts])
    return window.figures()


async def run_on_trio(consumers: list[Consumer]) -> None:
    import trio  # noqa: TID251 - see above

    async with trio.open_nursery() as nursery:
        for consumer in consumers:
            nursery.start_soon(consumer)


async def run_on_asyncio(consumers: list[Consumer]) -> None:
    import asyncio  # noqa: TID251 - see above

    async with asyncio.TaskGroup() as group:
        for consumer in consumers:
            group.create_task(consumer())


if __name__ == "__main__":
    anyio.run(
        main,
        sys.argv[1],
        int(sys.argv[3]),
        run_on_trio if sys.argv[2] == "trio" else run_on_asyncio,
        backend="trio" if sys.argv[2] == "trio" else "asyncio",
        backend_options={"use_uvloop": True} if sys.argv[2] == "uvloop" else {},
    )
