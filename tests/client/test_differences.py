"""What docs/differences.md says of the client, statement by statement. vLLM's side is the differential test's."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
import pytest
from built_tokenizers import built, ids_of_bytes, write_model

from anyengine import EngineClient, OutputKind, RequestFailed, RequestOutput, SamplingParams
from anyengine._text import Tokenizer
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio

CUMULATIVE, DELTA = OutputKind.CUMULATIVE, OutputKind.DELTA


@pytest.fixture
def anyio_backend() -> str:
    return "trio"  # what is sent and seen is the same on every loop


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    generation = {"eos_token_id": [1, 3]}
    config = {"vocab_size": 400, "max_position_embeddings": 2048}
    path = tmp_path_factory.mktemp("differences") / "model"
    return str(write_model(path, config=config, generation_config=generation))


def text_of(name: str, data: bytes, *, prompt: tuple[int, ...] = ()) -> list[str]:
    """The pieces in which a tokenizer gives ``data``, byte token by byte token."""
    tokenizer: Tokenizer = built(name)
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push([token]) for token in ids_of_bytes(tokenizer, data)), detokenizer.finish()]


async def asked(
    params: SamplingParams, rule: RequestRule | None = None, *, model_dir: str | None = None, **fields: Any
) -> tuple[list[Any], list[RequestOutput]]:
    """The ADD of one request, by position, and what is seen of it."""
    rules = () if rule is None else (rule,)
    scripted = ScriptedTwin(Script(requests=rules, step_interval_s=0.001), model_dir=model_dir)
    async with EngineClient(engine=scripted.engine) as client:
        outs = [out async for out in client.generate([1, 2], params, **fields)]
    return scripted.received("add")[0], outs


async def text_side(model_dir: str) -> None:
    params = SamplingParams(
        max_tokens=2, stop=["x"], stop_regex=["y"], bad_words=["fox"], skip_special_tokens=False,
        spaces_between_special_tokens=False, output_kind=CUMULATIVE, stream_interval=2, include_stop_str_in_output=True,
        flat_logprobs=True, n=2,
    )  # fmt: skip
    add, _ = await asked(params, model_dir=model_dir)
    never = {
        "stop", "stop_regex", "bad_words", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
        "output_kind", "stream_interval", "include_stop_str_in_output", "flat_logprobs", "n",
    }  # fmt: skip
    assert not never & add[3].keys()
    assert add[3]["_bad_words_token_ids"]


async def watermarking(_: str) -> None:
    add, _ = await asked(SamplingParams(max_tokens=1))
    assert "watermarking" not in add[3]


async def order(model_dir: str) -> None:
    add, _ = await asked(SamplingParams(max_tokens=1, stop_token_ids=[9, 5, 7]), model_dir=model_dir)
    assert add[3]["stop_token_ids"] == [9, 5, 7, 3]


async def request_ids(_: str) -> None:
    scripted = ScriptedTwin()
    async with EngineClient(engine=scripted.engine) as client:
        for _ in range(2):
            await client.complete([1], SamplingParams(max_tokens=1), request_id="label")
        prefix = client.stats().client_id
    ids = [add[0] for add in scripted.received("add")]
    assert ids == [f"label-{prefix}1", f"label-{prefix}2"]


async def unfinished_character(_: str) -> None:
    assert text_of("byte_level", "é".encode()[:1])[-1] == "\ufffd"


async def early_character(_: str) -> None:
    """A token with the last byte of one character and the first of the next."""
    tokenizer = built("byte_level")
    assert text_of("byte_level", "éa".encode())[:3] == ["", "é", "a"]
    detokenizer = tokenizer.detokenizer(())
    first, second = "é".encode(), "ü".encode()
    pieces = [detokenizer.push(ids_of_bytes(tokenizer, part)) for part in (first[:1], first[1:] + second[:1])]
    assert pieces == ["", "é"]


async def byte_runs(_: str) -> None:
    pieces = text_of("byte_fallback", "é".encode())
    assert "".join(pieces) == "é" and pieces[:-1] == [""] * (len(pieces) - 1)


async def prompt_character(_: str) -> None:
    tokenizer = built("byte_level")
    first, second = ids_of_bytes(tokenizer, "é".encode())
    detokenizer = tokenizer.detokenizer([*ids_of_bytes(tokenizer, b"abc"), first])
    text = detokenizer.push([second]) + detokenizer.push(ids_of_bytes(tokenizer, b"x")) + detokenizer.finish()
    assert "abc" not in text and text.endswith("x")


def ext(data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(3, data)


async def empty_rows(_: str) -> None:
    rows = [
        ["int64", [1, 1], ext(b"\5" + b"\0" * 7)],
        ["float32", [1, 1], ext(b"\0" * 4)],
        ["int64", [1], ext(b"\1" + b"\0" * 7)],
    ]
    _, outs = await asked(SamplingParams(prompt_logprobs=0), RequestRule(tokens=(5, 6, 7), output={3: rows}))
    assert [out.prompt_logprobs is None for out in outs] == [False] + [True] * (len(outs) - 1)


async def interval_kinds(_: str) -> None:
    params = SamplingParams(max_tokens=9, stream_interval=4, output_kind=CUMULATIVE)
    _, outs = await asked(params)
    assert {1, 5, 9} >= {out.num_output_tokens for out in outs} and len(outs) <= 3
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    async with EngineClient(engine=scripted.engine) as client:
        stream = await client.submit([1], SamplingParams(max_tokens=8, stream_interval=3))
        await client.drain()
        assert (await anext(stream)).num_output_tokens == 8


async def one_item_each(_: str) -> None:
    _, outs = await asked(SamplingParams(max_tokens=3, n=2))
    assert all(len(out.outputs) == 1 for out in outs)
    assert {out.index for out in outs} == {0, 1}


async def default_kind(_: str) -> None:
    assert SamplingParams().output_kind is DELTA


async def one_clock(_: str) -> None:
    events = [{"type": 1, "timestamp": 1e9}, {"type": 2, "timestamp": 1e9 + 0.5}]  # of another machine
    _, outs = await asked(SamplingParams(max_tokens=1), RequestRule(output={7: events}))
    figures = outs[-1].metrics
    assert figures.scheduled_ts == pytest.approx(figures.queued_ts + 0.5)
    assert figures.queued_ts <= (figures.last_token_ts or 0) < 1e9


async def parts(_: str) -> None:
    params = SamplingParams(max_tokens=2, output_kind=CUMULATIVE)
    async with EngineClient(engine=ScriptedTwin().engine) as client, client.input_session(params) as session:
        for part in ([1, 2, 3], [4]):
            await session.send(part)
        session.end()
        outs = [out async for out in session if out.finish_reason is not None]
    assert [out.token_ids for out in outs] == [expected_tokens([1, 2, 3], 2), expected_tokens([4], 2)]
    assert [out.num_prompt_tokens for out in outs] == [3, 1]


async def engine_aborts(_: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        await asked(SamplingParams(max_tokens=9), RequestRule(after_tokens=2, finish="abort"))
    assert isinstance(caught.value.partial, RequestOutput) and len(caught.value.partial.token_ids) == 2


STATEMENTS: dict[str, Callable[[str], Awaitable[None]]] = {
    "text-side": text_side,
    "watermarking": watermarking,
    "order": order,
    "request ids": request_ids,
    "unfinished-character": unfinished_character,
    "early-character": early_character,
    "byte-runs": byte_runs,
    "prompt-character": prompt_character,
    "empty-rows": empty_rows,
    "interval-kinds": interval_kinds,
    "one-item-each": one_item_each,
    "default-kind": default_kind,
    "one-clock": one_clock,
    "parts": parts,
    "engine-aborts": engine_aborts,
}


@pytest.mark.parametrize("name", STATEMENTS)
async def test_the_client_is_what_the_page_says(name: str, model_dir: str) -> None:
    with anyio.fail_after(30):
        await STATEMENTS[name](model_dir)


@pytest.mark.blocking_ok
def test_every_statement_of_the_page_is_asserted(repo_root: Any) -> None:
    page = (repo_root / "docs" / "differences.md").read_text()
    named = [name for name in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) if name not in ("name", "---")]
    assert named == list(STATEMENTS)
