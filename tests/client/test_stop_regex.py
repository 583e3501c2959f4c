"""Regular expressions that end a request: across token borders, for every kind of output, and one that fails alone."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from built_tokenizers import built, ids_of_bytes, write_model

from anyengine import EngineClient, OutputKind, OutputProcessingError, RequestRejected, SamplingParams
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin

pytestmark = [pytest.mark.anyio, pytest.mark.feature("R35")]
TEXT = "so the 🦙 stops.\n\nQ12: And on and on"
PATTERN = r"\n+Q\d+:"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = {"vocab_size": 400, "max_position_embeddings": 2048}
    return str(write_model(tmp_path_factory.mktemp("patterns") / "model", config=config))


def says(model_dir: str, *texts: str, **script: Any) -> ScriptedTwin:
    """An engine whose answers are ``texts``, in turn, byte by byte."""
    tokens = [tuple(ids_of_bytes(built("byte_level"), text.encode())) for text in texts]
    rules = tuple(RequestRule(nth=nth, tokens=some, finish="length") for nth, some in enumerate(tokens, 1))
    return ScriptedTwin(Script(requests=rules, step_interval_s=0.001, **script), model_dir=model_dir)


@pytest.mark.parametrize("frame", [1, 3, 50])
@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize("include", [False, True])
async def test_a_pattern_ends_the_request(model_dir: str, kind: OutputKind, include: bool, frame: int) -> None:
    """Every character is a token or more: text, tokens and scores end with the match, and the engine gets one abort."""
    scripted = says(model_dir, TEXT, tokens_per_frame=frame)
    params = SamplingParams(
        max_tokens=60, stop=["never"], stop_regex=["x+y", PATTERN], include_stop_str_in_output=include, output_kind=kind
    )
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            outs = [out async for out in client.generate([4], params)]
            await client.drain()
    last = outs[-1]
    text = "".join(out.text for out in outs) if kind is OutputKind.DELTA else last.text
    ids = [t for out in outs for t in out.token_ids] if kind is OutputKind.DELTA else last.token_ids
    end = TEXT.index(":") + 1
    assert text == (TEXT[:end] if include else TEXT[: TEXT.index("\n")])
    assert ids == ids_of_bytes(built("byte_level"), TEXT[:end].encode())
    assert (last.finish_reason, last.stop_reason, last.num_held_tokens) == ("stop", PATTERN, 0)
    aborts = [record for record in scripted.records() if record.direction == "in" and record.kind == "abort"]
    assert len(aborts) == (0 if frame == 50 else 1)


async def test_each_of_several_completions_ends_by_itself(model_dir: str) -> None:
    scripted = says(model_dir, "ab1", "abcd22", "nothing")
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            params = SamplingParams(n=3, seed=1, max_tokens=20, stop_regex=r"\d", min_tokens=3)
            whole = await client.complete([4], params)
    found = [(one.text, one.finish_reason, one.stop_reason) for one in whole.outputs]
    assert found == [("ab1", "length", None), ("abcd", "stop", r"\d"), ("nothing", "length", None)]


async def test_a_slow_pattern_fails_its_own_request(model_dir: str) -> None:
    """The error names the pattern and keeps what had arrived; the request beside it, and the client, go on."""
    slow = "(a|aa|aaa)+b"
    scripted = says(model_dir, "a" * 200, "fine.")
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:
            first = await client.submit([4], SamplingParams(max_tokens=200, stop_regex=slow))
            second = await client.submit([5], SamplingParams(max_tokens=10, stop_regex=r"\."))
            with pytest.raises(OutputProcessingError, match=r"stop_regex='\(a\|aa\|aaa\)\+b' takes more than"):
                await first.final()
            assert (await second.final()).text == "fine"
            await client.drain()
    aborts = [record for record in scripted.records() if record.direction == "in" and record.kind == "abort"]
    assert len(aborts) >= 1


async def test_refused_where_there_is_no_text(model_dir: str) -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin().engine) as client:
            with pytest.raises(RequestRejected, match="no tokenizer") as caught:
                await client.submit([4], SamplingParams(stop_regex=["x"]))
        assert caught.value.parameter == "stop_regex"
        scripted = says(model_dir, "x")
        async with EngineClient(engine=scripted.engine) as client:
            with pytest.raises(RequestRejected, match="in parts") as caught:
                client.input_session(SamplingParams(stop_regex=["x"]))
            assert caught.value.parameter == "stop_regex"
    assert not scripted.received("add")
