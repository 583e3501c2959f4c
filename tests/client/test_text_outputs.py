"""What a consumer gets of text: stop strings, several completions, stream helpers, figures."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from built_tokenizers import built, ids_of_bytes, write_model

from anyengine import (
    EngineClient,
    OutputKind,
    OverloadedError,
    ParsedOutput,
    RequestFailed,
    RequestOutput,
    RequestRejected,
    SamplingParams,
    ToolCall,
    Usage,
    output_parser,
    parse_output,
)
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = {"vocab_size": 400, "max_position_embeddings": 2048}
    generation = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 9, "eos_token_id": 1}
    return str(write_model(tmp_path_factory.mktemp("text") / "model", config=config, generation_config=generation))


def says(text: str, model_dir: str, **script: Any) -> ScriptedTwin:
    """An engine whose every answer is ``text``, byte by byte."""
    tokens = tuple(ids_of_bytes(built("byte_level"), text.encode()))
    return ScriptedTwin(Script(requests=(RequestRule(tokens=tokens, finish="length"),), **script), model_dir=model_dir)


def sent(scripted: ScriptedTwin, kind: str) -> list[Any]:
    return [record.body for record in scripted.records() if record.direction == "in" and record.kind == kind]


def sampling_of(add: list[Any]) -> dict[str, Any]:
    return next(field for field in add if isinstance(field, dict) and "max_tokens" in field)


@pytest.mark.feature("R07", "R09", "O04")
@pytest.mark.case("K48")
@pytest.mark.parametrize("frame", [1, 3, 50])
@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_request(model_dir: str, kind: OutputKind, include: bool, frame: int) -> None:
    """Whatever the frames: the same text and tokens, the rule's name, one abort if the engine would have gone on."""
    text = "so the 🦙 stops here. And on and on"
    scripted = says(text, model_dir, tokens_per_frame=frame, step_interval_s=0.001)
    params = SamplingParams(
        max_tokens=40, stop=["never", "here."], include_stop_str_in_output=include, output_kind=kind
    )
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            outs = [out async for out in client.generate([4], params)]
            await client.drain()
    last = outs[-1]
    whole = "".join(out.text for out in outs) if kind is OutputKind.DELTA else last.text
    ids = [t for out in outs for t in out.token_ids] if kind is OutputKind.DELTA else last.token_ids
    end = text.index("here.") + len("here.")
    assert whole == (text[:end] if include else text[: end - len("here.")])
    assert ids == ids_of_bytes(built("byte_level"), text[:end].encode())
    assert (last.finish_reason, last.stop_reason, last.num_held_tokens) == ("stop", "here.", 0)
    assert [out.finish_reason for out in outs].count(None) == len(outs) - 1
    assert last.num_output_tokens == len(ids)
    # With all its tokens in one frame it had come to its end.
    assert len(sent(scripted, "abort")) == (0 if frame == 50 else 1)


async def test_a_stop_string_without_text_is_refused() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin().engine) as client:
            with pytest.raises(RequestRejected, match="no tokenizer") as caught:
                await client.submit([4], SamplingParams(stop=["x"]))
    assert caught.value.parameter == "stop"


@pytest.mark.case("K46")
async def test_what_is_held_back_is_declared(model_dir: str) -> None:
    scripted = says("abcdefgh", model_dir, step_interval_s=0.001)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            text, num_ids = "", 0
            async for out in client.generate([4], SamplingParams(max_tokens=8, stop=["xyz"])):
                text, num_ids = text + out.text, num_ids + len(out.token_ids)
                assert len(text) == num_ids - out.num_held_tokens
    assert (text, num_ids) == ("abcdefgh", 8)


@pytest.mark.feature("R01")
@pytest.mark.parametrize("kind", list(OutputKind))
async def test_several_completions(kind: OutputKind) -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    params = SamplingParams(n=4, seed=7, max_tokens=6, output_kind=kind)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            outs = [out async for out in client.generate([1, 2], params, request_id="x")]
    adds = sent(scripted, "add")
    assert [sampling_of(add)["seed"] for add in adds] == [7, 8, 9, 10]
    assert len({add[0] for add in adds}) == 4
    assert [add[0].partition("_")[0] for add in adds] == ["0", "1", "2", "3"]
    answers: dict[int, list[int]] = {}
    for out in outs:
        for one in out.outputs:
            answers[one.index] = answers.get(one.index, []) * (kind is OutputKind.DELTA) + one.token_ids
    assert sorted(answers) == [0, 1, 2, 3]
    assert all(len(ids) == 6 for ids in answers.values())
    ends = [one.index for out in outs for one in out.outputs if one.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2, 3]
    assert [out.finished for out in outs] == [False] * (len(outs) - 1) + [True]
    if kind is OutputKind.FINAL_ONLY:
        assert len(outs) == 1
        assert outs[0].usage == Usage(prompt_tokens=2, completion_tokens=24, cached_tokens=0)


@pytest.mark.case("K28")
async def test_leaving_aborts_the_unfinished_ones_in_one_go() -> None:
    """Three that have ended, and three that have not: one message names the latter."""
    rules = tuple(RequestRule(nth=nth, after_tokens=2) for nth in (1, 3, 5))
    scripted = ScriptedTwin(Script(requests=rules, step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            ended = set()
            async with client.generate([1], SamplingParams(n=6, max_tokens=2000)) as stream:
                async for out in stream:
                    ended |= {out.index} if out.finish_reason is not None else set()
                    if len(ended) == 3:
                        break
            await client.drain()
            assert client.statistics()["requests_in_flight"] == 0
    (ids,) = sent(scripted, "abort")
    assert ended == {0, 2, 4}
    assert sorted(one.partition("_")[0] for one in ids) == ["1", "3", "5"]


@pytest.mark.feature("R01")
@pytest.mark.case("K59")
async def test_one_failure_ends_all() -> None:
    rules = (RequestRule(nth=2, after_tokens=3, finish="error"),)
    scripted = ScriptedTwin(Script(requests=rules, step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            stream = await client.submit([1], SamplingParams(n=3, max_tokens=2000))
            taken: dict[int, int] = {}
            with pytest.raises(RequestFailed) as caught:
                async for out in stream:
                    taken[out.index] = taken.get(out.index, 0) + len(out.token_ids)
            await client.drain()
    partial = caught.value.partial
    assert isinstance(partial, RequestOutput)
    assert [one.index for one in partial.outputs] == [0, 1, 2]
    assert partial.outputs[1].token_ids == expected_tokens([1], 3)
    assert all(one.num_output_tokens >= taken.get(one.index, 0) for one in partial.outputs)
    assert sorted(one.partition("_")[0] for ids in sent(scripted, "abort") for one in ids) == ["0", "2"]


@pytest.mark.case("K73")
async def test_admission_counts_completions() -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, max_num_queued_reqs=4) as client:
            async with client.generate([1], SamplingParams(n=3, max_tokens=2000)):
                with pytest.raises(OverloadedError):
                    await client.submit([2], SamplingParams(n=2))
                assert (await client.complete([2], SamplingParams(max_tokens=2))).finished
            await client.drain()
            assert len((await client.complete([1], SamplingParams(n=4, max_tokens=2))).outputs) == 4


@pytest.mark.feature("R21")
async def test_an_interval_between_items(model_dir: str) -> None:
    scripted = says("abcdefghijkl", model_dir, step_interval_s=0.001)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            outs = [o async for o in client.generate([4], SamplingParams(max_tokens=12, stream_interval=4))]
    assert [len(out.token_ids) for out in outs] == [1, 4, 4, 3]
    assert "".join(out.text for out in outs) == "abcdefghijkl"


@pytest.mark.feature("O23")
async def test_stream_helpers(model_dir: str) -> None:
    text = "the 🦙 é."
    ids = ids_of_bytes(built("byte_level"), text.encode())
    scripted = says(text, model_dir, step_interval_s=0.001)
    params = SamplingParams(max_tokens=len(ids))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            for kind in OutputKind:
                one = SamplingParams(max_tokens=len(ids), output_kind=kind)
                pieces = [piece async for piece in client.generate([4], one).text_stream()]
                assert "".join(pieces) == text and "" not in pieces
                assert [token async for token in client.generate([4], one).token_stream()] == ids
                assert (await client.generate([4], one).final()).text == text
            whole = await client.complete([4], params)
            assert (whole.text, whole.token_ids, whole.finish_reason) == (text, ids, "length")
            stream = client.generate([4], params)
            assert (await anext(stream)).text == "t"
            assert (await stream.final()).text == text  # what was taken before is in it
            assert (await stream.final()).text == text
            async with client.generate([4], params).text_stream() as leaving:
                assert await anext(leaving) == "t"
            await client.drain()
            with pytest.raises(anyio.ClosedResourceError):
                await leaving._stream.final()
            with pytest.raises(ValueError, match="n=2"):
                client.generate([4], SamplingParams(n=2)).text_stream()
    assert len(sent(scripted, "abort")) == 1


@pytest.mark.feature("O05", "O07")
@pytest.mark.case("K81")
async def test_figures_come_with_the_last_item() -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.02))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            outs = [out async for out in client.generate([1, 2, 3], SamplingParams(max_tokens=5))]
    assert [out.metrics.num_generation_tokens for out in outs] == [out.num_output_tokens for out in outs]
    figures, usage = outs[-1].metrics, outs[-1].usage
    assert figures.first_token_s is not None and figures.mean_token_gap_s is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)
    assert figures.rank == 0
    assert 0 < figures.first_token_s <= figures.total_s
    assert figures.mean_token_gap_s >= 0.01
    assert figures.total_s == pytest.approx(figures.first_token_s + 4 * figures.mean_token_gap_s, abs=0.02)


@pytest.mark.feature("R36", "R47", "R51", "R53")
async def test_prompts_in_any_form(model_dir: str) -> None:
    """Text, ids, vLLM's dictionaries, chat messages, truncated or not: the ids that are sent."""
    tokenizer = built("byte_level")
    text = "the quick brown fox"
    plain = [0, *tokenizer.encode(text, add_special_tokens=False)]  # this model begins every text with token 0
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
    )
    messages = [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]}]
    cut = {"truncate_prompt_tokens": 4}
    cases: list[tuple[Any, dict[str, Any], list[int]]] = [
        (text, {}, plain),
        ({"prompt": text}, {}, plain),
        ({"prompt_token_ids": [5, 6]}, {}, [5, 6]),
        (text, {"add_special_tokens": False}, plain[1:]),
        (text, cut, plain[:4]),
        (text, {**cut, "truncation_side": "left"}, plain[-4:]),
        ([5] * 9, cut, [5] * 4),
        ([5] * 2047, {"truncate_prompt_tokens": -1}, [5] * 2046),
    ]
    scripted = ScriptedTwin(model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            one = SamplingParams(max_tokens=2)
            for prompt, options, _ in cases:
                await client.complete(prompt, one, tokenization_kwargs=options)
            await client.chat(messages, one, chat_template=template).final()
            going_on = {"chat_template": template, "continue_final_message": True, "add_generation_prompt": False}
            await client.chat([{"role": "user", "content": "the fo"}], one, **going_on).final()
            for bad in ({"prompt": text, "cache_salt": "x"}, {"x": 1}):
                with pytest.raises(RequestRejected):
                    await client.submit(bad, one)
            with pytest.raises(RequestRejected, match="unknown"):
                await client.submit(text, one, tokenization_kwargs={"truncate": 1})
            with pytest.raises(RequestRejected, match="image_url"):
                await client.chat(
                    [{"role": "user", "content": [{"type": "image_url"}]}], one, chat_template="x"
                ).start()
            defaults = client.default_sampling_params(top_k=3)
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.5, 3, 9)
    prompts = [add[1] for add in sent(scripted, "add")]
    chats = ["user: the\nfox\n> ", "user: the fo"]
    expected = [ids for _, _, ids in cases] + [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    assert prompts == expected


@pytest.mark.feature("L36")
@pytest.mark.case("K72")
async def test_a_long_prompt_leaves_the_loop_free(model_dir: str) -> None:
    """Tokenized in a thread of the client's own: other tasks run meanwhile. Cancelled: see ``test_unhindered``."""
    text = "the quick brown fox " * 50_000
    scripted = ScriptedTwin(model_dir=model_dir)
    ticks = 0
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client, anyio.create_task_group() as tasks:

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await anyio.lowlevel.checkpoint()
                    ticks += 1

            async def send() -> None:
                with pytest.raises(RequestRejected):  # far too long for the model
                    await client.submit(text)
                tasks.cancel_scope.cancel()

            tasks.start_soon(tick)
            tasks.start_soon(send)
        assert ticks > 5  # one or two, were the loop held up
    assert sent(scripted, "add") == []


@pytest.mark.feature("R52")
async def test_a_stream_taken_apart(model_dir: str) -> None:
    """Reasoning, content and a call, byte by byte: the pieces are those of the whole text."""
    text = '<think>Hm 🦙</think>Look: <tool_call>{"name": "f", "arguments": {"é": 1}}</tool_call>'
    scripted = says(text, model_dir, step_interval_s=0.0002)
    params = SamplingParams(max_tokens=len(text.encode()))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            async with client.generate([4], params).parsed(output_parser("think", "hermes")) as parsed:
                deltas = [delta async for delta in parsed]
            assert parsed.output is not None and parsed.output.finish_reason == "length"
            left = client.generate([4], params).parsed(output_parser(tools="hermes"))
            async with left:
                assert "<think>".startswith((await anext(left)).content)
            await client.drain()
    assert all(deltas) and len(deltas) > 10
    expected = ParsedOutput("Hm 🦙", "Look: ", (ToolCall("f", '{"é": 1}'),))
    assert ParsedOutput.of(deltas) == parse_output(output_parser("qwen3", "hermes"), text) == expected
    assert len(sent(scripted, "abort")) == 1


@pytest.mark.feature("R52")
def test_parsers_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, and those that a distribution adds; a name that nobody knows is an error that names all others."""
    added = EntryPoints([EntryPoint("shout", "built_parsers:ShoutParser", "anyengine.output_parsers")])
    monkeypatch.setattr("anyengine._client.parsers.entry_points", lambda group: added.select(group=group))
    assert parse_output(output_parser("shout"), "a").content == "A!"
    assert parse_output(output_parser("deepseek_r1"), "a</think>b") == ParsedOutput("a", "b")
    assert parse_output(output_parser(tools="json"), "x").content == "x"
    with pytest.raises(ValueError, match="deepseek_r1, hermes, json, qwen3, shout, think"):
        output_parser("no such")
    with pytest.raises(ValueError, match="give reasoning"):
        output_parser()


@pytest.mark.parametrize("n", [1, 2])
async def test_what_was_held_back_for_a_stop_string_is_in_partial(model_dir: str, n: int) -> None:
    """A frame of its own says that it failed, without a token: all of them have been taken."""
    tokens = tuple(ids_of_bytes(built("byte_level"), b"abc sto"))
    rules = (RequestRule(tokens=tokens, finish="error", last={1: []}),)
    scripted = ScriptedTwin(Script(requests=rules, step_interval_s=0.001), model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            with pytest.raises(RequestFailed) as caught:
                async for _ in client.generate([1], SamplingParams(max_tokens=40, stop=["stop here"], n=n)):
                    pass
    held = caught.value.partial
    assert isinstance(held, RequestOutput)
    assert len(held.token_ids) >= 6 and held.text == "abc sto"[: len(held.token_ids)]
