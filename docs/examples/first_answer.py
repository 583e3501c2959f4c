"""The whole program of a new user, as it stands in the README."""

import anyio
from anyengine import EngineClient, SamplingParams


async def main() -> None:
    async with EngineClient() as client:
        async for out in client.generate("The capital of France is", SamplingParams(max_tokens=32)):
            print(out.text, end="", flush=True)


anyio.run(main, backend="trio")  # or "asyncio"
