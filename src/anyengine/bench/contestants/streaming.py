"""``streaming.py MODEL_DIR LOOP PORT``: our client, one task for each stream, on an engine that comes to ``PORT``."""

from __future__ import annotations

import json
import sys
from typing import Any

import anyio
import anyio.to_thread

from anyengine import EngineClient, RemoteEngine, SamplingParams
from anyengine.bench.contestants.protocol import make_prompts
from anyengine.bench.contestants.window import Window, freeze_start_up, tell_apart


async def main(model_dir: str, port: int) -> None:
    say = tell_apart()
    engine = RemoteEngine(handshake=f"tcp://127.0.0.1:{port}", model_dir=model_dir)
    async with EngineClient(engine=engine) as client:
        freeze_start_up()
        say({})
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            say(await measure(client, json.loads(line)))


async def measure(client: EngineClient, task: dict[str, Any]) -> dict[str, Any]:
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

    async with anyio.create_task_group() as consumers:
        for prompt in prompts:
            consumers.start_soon(consume, prompt)
    return window.figures()


if __name__ == "__main__":
    anyio.run(
        main,
        sys.argv[1],
        int(sys.argv[3]),
        backend="trio" if sys.argv[2] == "trio" else "asyncio",
        backend_options={"use_uvloop": True} if sys.argv[2] == "uvloop" else {},
    )
