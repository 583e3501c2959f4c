"""What one token costs in the client, in calls: how long they take is the machine's, how many they are is ours."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
from built_tokenizers import built, ids_of_bytes, write_model

import anyengine
from anyengine import EngineClient, RequestStream, SamplingParams
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin
from anyengine.testing.scripted.messages import batch, token_output

pytestmark = pytest.mark.anyio

PACKAGE = str(Path(anyengine.__file__).parent)
STEPS = 16
TOKEN = ids_of_bytes(built("byte_level"), b"a")[0]
PYTHON_CALLS = {
    # Resuming a coroutine counts as a call of it.
    "RequestState.push": 1,
    "wake": 1,
    "park": 2,
    "RequestStream.__anext__": 2,
    "Completion.take": 1,
    "ByteLevelDetokenizer.push": 1,
}
"""For one token in the middle of a stream of deltas, at most; there are no others."""
BUILT_IN_CALLS = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = {"vocab_size": 400, "max_position_embeddings": 2048}
    return str(write_model(tmp_path_factory.mktemp("hot") / "model", config=config))


class Calls:
    """Counts the calls of Python functions of ours, and those that these make of built-in ones."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.built_in: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            if event == "call":
                self.python[frame.f_code.co_qualname] += 1
            elif event == "c_call":
                self.built_in[arg.__qualname__] += 1


async def calls_of(num_streams: int, model_dir: str) -> Calls:
    """The calls of ``STEPS`` steps of the engine, with a token for each stream in each of them."""
    engine = ScriptedTwin(Script(requests=(RequestRule(silent=True),)), model_dir=model_dir).engine
    taken, all_taken = 0, anyio.Event()

    async def consume(stream: RequestStream) -> None:
        nonlocal taken
        async for out in stream:
            assert (out.text, out.token_ids) == ("a", [TOKEN])
            taken += 1
            if taken % num_streams == 0:
                all_taken.set()

    async with EngineClient(engine=engine, liveness_timeout_s=None) as client, anyio.create_task_group() as consumers:
        params = SamplingParams(max_tokens=100)
        streams = [await client.submit([1], params) for _ in range(num_streams)]
        for stream in streams:
            consumers.start_soon(consume, stream)
        calls = Calls()
        message = batch(0, [token_output(stream.wire_id or "", [TOKEN]) for stream in streams], 0.0)
        for step in range(STEPS + 4):  # the first ones are not the middle of the stream
            all_taken = anyio.Event()
            sys.setprofile(calls if step >= 4 else None)
            client.core.session.receive([[message]])
            await all_taken.wait()
        sys.setprofile(None)
        consumers.cancel_scope.cancel()
    return calls


@pytest.mark.feature("O26")
async def test_a_token_takes_few_calls(model_dir: str) -> None:
    """What two numbers of streams cost in the same number of messages differs by tokens alone."""
    with anyio.fail_after(20):
        try:
            few, many = await calls_of(8, model_dir), await calls_of(40, model_dir)
        finally:
            sys.setprofile(None)
    num_tokens = (40 - 8) * STEPS
    many.python.subtract(few.python)
    many.built_in.subtract(few.built_in)
    python = {name.rpartition("Parker.")[2]: count / num_tokens for name, count in many.python.items() if count > 0}
    for name, count in python.items():
        assert count <= PYTHON_CALLS.get(name, 0) + 0.1, (name, count, python)
    built_in = {name: count / num_tokens for name, count in many.built_in.items() if count > 0}
    assert sum(built_in.values()) <= BUILT_IN_CALLS, built_in
