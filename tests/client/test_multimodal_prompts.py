"""Prompts with images: features as they are, features by a hook, and those that an engine's cache turned out not to
have."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgspec
import pytest
from msgspec.msgpack import Ext

from anyengine import (
    BeamSearchParams,
    CommandEngine,
    EngineClient,
    EngineDeadError,
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    MultiModalPrompt,
    OutputKind,
    PlaceholderRange,
    RequestFailed,
    RequestRejected,
    RequestStream,
    RetryPolicy,
    SamplingParams,
    Tensor,
)
from anyengine._transport.memory import MemoryLink
from anyengine._wire import NEWEST
from anyengine.config import InMemoryEngine
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = [pytest.mark.anyio, pytest.mark.feature("R38")]

IDS = [5, 9, 9, 6]
FOUR = SamplingParams(max_tokens=4)
PICTURE = {"prompt": "see <image>", "multi_modal_data": {"image": "a cat"}}
HASHES = 14  # the position of mm_cache_miss_hashes in an output
FEATURES = 2  # and that of mm_features in a request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of text and images, by its configuration; nobody runs it."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text('{"vocab_size": 1000, "hidden_size": 8, "vision_config": {"depth": 1}}')
    return str(directory)


@pytest.fixture
def text_model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    return str(tmp_path)


def feature(mm_hash: str = "cat", *, cached: bool = False, offset: int = 1) -> MultiModalFeatureSpec:
    pixels = Tensor("float32", (1, 2), b"\x00\x01\x02\x03\xfc\xfd\xfe\xff")
    data = {"pixels": MultiModalFieldElem(pixels, MultiModalField("batched", {"keep_on_cpu": False}))}
    return MultiModalFeatureSpec(None if cached else data, "image", "id", PlaceholderRange(offset, 1), mm_hash)


def missing(nth: int, *hashes: str) -> RequestRule:
    """What vLLM's engine answers to a feature without data that it has not: an error, without a token."""
    return RequestRule(nth=nth, tokens=(), finish="error", last={HASHES: list(hashes)})


def missing_once(model_dir: str, *hashes: str, times: int = 1, **script: Any) -> ScriptedTwin:
    rules = tuple(missing(nth, *hashes) for nth in range(1, times + 1))
    return ScriptedTwin(Script(requests=rules, **script), model_dir=model_dir)


def ids_and_data(scripted: ScriptedTwin) -> list[tuple[str, list[bool]]]:
    """Of each request that has come: its wire id, and which of its features have their data."""
    return [(one[0], [item["data"] is not None for item in one[FEATURES] or ()]) for one in scripted.received("add")]


class Hook:
    """An ``mm_preprocessor`` that takes its items for cached, and brings what is missed. Notes who calls it how."""

    def __init__(self, *hashes: str, made: Callable[[frozenset[str]], Any] | None = None) -> None:
        self.hashes = hashes or ("cat",)
        self.made = made
        self.calls: list[tuple[MultiModalPrompt, frozenset[str]]] = []
        self.threads: set[int] = set()

    def __call__(self, prompt: MultiModalPrompt, missing_hashes: frozenset[str]) -> Any:
        self.calls.append((prompt, missing_hashes))
        self.threads.add(threading.get_ident())
        if self.made is not None:
            return self.made(missing_hashes)
        named = enumerate(self.hashes, 1)
        return IDS, [feature(one, cached=one not in missing_hashes, offset=offset) for offset, one in named]

    @property
    def asked_for(self) -> list[frozenset[str]]:
        return [hashes for _, hashes in self.calls]


class Tap:
    """Notes the frames that an engine reads: stands before its link, and before the socket that it gets from that."""

    def __init__(self, real: Any, frames: list[list[bytes]]) -> None:
        self._real, self._frames = real, frames

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def connect_inputs(self) -> Tap:
        return Tap(self._real.connect_inputs(), self._frames)

    async def drain(self) -> Any:
        messages = await self._real.drain()
        self._frames.extend([bytes(part) for part in parts] for parts in messages)
        return messages


def nested_features() -> list[MultiModalFeatureSpec]:
    """Small tensors, which go inside the message, and large ones, which go beside it; options and masks."""
    large = Tensor("float32", (3, 100), bytes(range(256)) * 4 + bytes(176))
    mask = Tensor("bool", (2,), b"\1\0")
    elements = {
        "pixels": MultiModalFieldElem([large, [Tensor("int64", (1,), bytes(range(8))), 7]], MultiModalField("batched")),
        "grid": MultiModalFieldElem(
            Tensor("uint8", (3,), b"\xfe\xff\0"), MultiModalField("flat", {"slices": [[0, 3, None]], "dim": 0})
        ),
        "nothing": MultiModalFieldElem(None, MultiModalField("shared", {"batch_size": 2})),
    }
    return [
        MultiModalFeatureSpec(elements, "image", "adapter:cat", PlaceholderRange(0, 2, mask), "cat"),
        MultiModalFeatureSpec(None, "audio", "song", PlaceholderRange(2, 1)),
    ]


@pytest.mark.parametrize("way", ["given", "hook"])
async def test_features_reach_the_engine_as_they_are(way: str, model_dir: str) -> None:
    scripted, frames = ScriptedTwin(model_dir=model_dir), list[list[bytes]]()

    async def serve(link: MemoryLink, rank: int, host: Any) -> None:
        await scripted.engine.serve(Tap(link, frames), rank, host)

    features = nested_features()
    engine = InMemoryEngine(serve=serve, model_dir=model_dir)
    hook = Hook(made=lambda _: (IDS, features))
    with anyio.fail_after(30):
        async with EngineClient(engine=engine, mm_preprocessor=hook) as client:
            if way == "given":
                output = await client.complete(IDS, FOUR, mm_features=features)
            else:
                output = await client.complete(PICTURE, FOUR)
    assert list(output.token_ids) == expected_tokens(IDS, 4)
    [added] = [one for one in frames if one[0] == b"\x00"]
    assert len(added) == 3  # with one tensor beside the message
    received: Any = NEWEST.decode_input(added)
    assert plain(received.mm_features) == plain(nested_features())
    assert plain(features) == plain(nested_features())  # the caller's own are as they were


def plain(value: Any) -> Any:
    """Something that can be compared, bytes and all."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), bytes(value.data)
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------------- the hook


async def test_a_hook_makes_tokens_and_features_of_a_prompt(model_dir: str) -> None:
    """It is given all of the prompt, in either form; what it makes is what is sent, and what the outputs tell."""
    scripted, hook = ScriptedTwin(model_dir=model_dir), Hook(made=lambda _: (tuple(IDS), (feature(),)))
    rest: dict[str, Any] = {
        "multi_modal_data": {"image": object()},
        "mm_processor_kwargs": {"num_crops": 4},
        "media_io_kwargs": {"video": {"num_frames": 3}},
        "multi_modal_uuids": {"image": ["cat"]},
    }
    prompts: list[Any] = [
        {"prompt": "see", "type": "text", **rest},
        {"prompt_token_ids": [1, 2], **rest},
        MultiModalPrompt(prompt="see", **rest),
        {"prompt": "see", "multi_modal_uuids": {"image": ["cat"]}, "multi_modal_data": None},
    ]
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=hook) as client:
            outputs = [await client.complete(prompt, FOUR) for prompt in prompts]
            assert await client.tokenize(prompts[0]) == IDS
            plain_output = await client.complete({"prompt_token_ids": [1], "multi_modal_data": {}}, FOUR)
    asked = [prompt for prompt, _ in hook.calls]
    assert [prompt.prompt for prompt in asked] == ["see", [1, 2], "see", "see", "see"]
    for prompt in asked[:3]:
        assert all(getattr(prompt, name) is value for name, value in rest.items())
    assert asked[3].multi_modal_uuids == {"image": ["cat"]}
    assert [output.prompt for output in outputs] == ["see", None, "see", "see"]
    assert {output.prompt_token_ids for output in outputs} == {tuple(IDS)}
    assert list(plain_output.token_ids) == expected_tokens([1], 4)
    assert ids_and_data(scripted)[-1][1] == [] and len(scripted.received("add")) == 5
    assert all(data == [True] for _, data in ids_and_data(scripted)[:-1])
    assert threading.get_ident() not in hook.threads


async def test_a_slow_hook_holds_up_nobody_and_may_be_left(model_dir: str) -> None:
    entered, may_end = threading.Event(), threading.Event()

    def slow(_: frozenset[str]) -> Any:
        entered.set()
        may_end.wait()
        return IDS, [feature()]

    scripted, left = ScriptedTwin(model_dir=model_dir), anyio.Event()
    try:
        with anyio.fail_after(30):
            async with (
                EngineClient(engine=scripted.engine, mm_preprocessor=Hook(made=slow)) as client,
                anyio.create_task_group() as tasks,
            ):
                scope = anyio.CancelScope()

                async def ask() -> None:
                    with scope:
                        await client.complete(PICTURE, FOUR)
                    left.set()

                tasks.start_soon(ask)
                while not entered.is_set():
                    await anyio.lowlevel.checkpoint()
                assert list((await client.complete([1], FOUR)).token_ids) == expected_tokens([1], 4)
                scope.cancel()
                await left.wait()
                assert client.statistics()["requests_in_flight"] == 0
    finally:
        may_end.set()
    assert [one[1] for one in scripted.received("add")] == [[1]]


def fails(error: BaseException, _: frozenset[str]) -> Any:
    raise error


BAD_HOOKS: dict[str, tuple[Callable[[frozenset[str]], Any], str, str]] = {
    "it raises": (partial(fails, OSError("no such picture")), "multi_modal_data", "OSError: no such picture"),
    "it ends its thread": (partial(fails, SystemExit(3)), "multi_modal_data", "SystemExit"),
    "it stops": (partial(fails, StopIteration()), "multi_modal_data", "StopIteration"),
    "its refusal": (partial(fails, RequestRejected("too large", parameter="image")), "image", "too large"),
    "no pair": (lambda _: IDS, "mm_preprocessor", "no pair"),
    "no ids": (lambda _: ("text", []), "mm_preprocessor", "no token ids"),
    "other ids": (lambda _: ([1, "a"], []), "prompt", "not an int"),
    "ids outside": (lambda _: ([1, 1000], []), "prompt", "vocabulary"),
    "no features": (lambda _: (IDS, [5]), "mm_features", "int"),
    "a feature outside": (lambda _: (IDS, [feature(offset=4)]), "mm_features[0].mm_position", "not in the prompt"),
}


@pytest.mark.parametrize("case", BAD_HOOKS)
async def test_what_a_hook_does_wrong_is_its_requests_refusal(case: str, model_dir: str) -> None:
    made, parameter, hint = BAD_HOOKS[case]
    scripted = ScriptedTwin(model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=Hook(made=made)) as client:
            stream = await client.submit([1], SamplingParams(max_tokens=4, output_kind=OutputKind.FINAL_ONLY))
            with pytest.raises(RequestRejected, match=hint) as caught:
                await client.complete(PICTURE, FOUR)
            assert list((await stream.final()).token_ids) == expected_tokens([1], 4)
            assert client.statistics()["requests_in_flight"] == 0
    assert caught.value.parameter == parameter
    assert [one[1] for one in scripted.received("add")] == [[1]]


async def test_a_hook_may_call_what_is_asynchronous(model_dir: str) -> None:
    """From its thread, in the client's loop: here, the client's own tokens of another prompt."""
    scripted = ScriptedTwin(model_dir=model_dir)

    def made(_: frozenset[str]) -> Any:
        return anyio.from_thread.run(client.tokenize, IDS), [feature()]

    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=Hook(made=made)) as client:
            assert list((await client.complete(PICTURE, FOUR)).token_ids) == expected_tokens(IDS, 4)


async def test_a_coroutine_is_no_answer(model_dir: str) -> None:
    """It is closed: nobody is warned that it was never awaited."""

    async def later() -> Any:
        raise AssertionError

    scripted = ScriptedTwin(model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=Hook(made=lambda _: later())) as client:
            with pytest.raises(RequestRejected, match="synchronous"):
                await client.complete(PICTURE, FOUR)


class AsyncHook:
    async def __call__(self, prompt: MultiModalPrompt, missing_hashes: frozenset[str]) -> Any:
        raise AssertionError


@pytest.mark.parametrize("hook", [5, AsyncHook(), AsyncHook.__call__])
def test_what_is_no_hook(hook: Any) -> None:
    with pytest.raises(ValueError, match=r"mm_preprocessor=.* must be a synchronous function"):
        EngineClient(engine=CommandEngine(argv=("x",)), mm_preprocessor=hook)


REFUSED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "options": (PICTURE, {"tokenization_kwargs": {"truncate_prompt_tokens": 3}}, "tokenization_kwargs", "hook"),
    "features, too": (PICTURE, {"mm_features": [feature()]}, "mm_features", "beside multi-modal data"),
    "no prompt": ({"multi_modal_data": {"image": 1}}, {}, "prompt", "text or token ids"),
    "bytes": (MultiModalPrompt(prompt=b"x"), {}, "prompt", "text or token ids"),  # type: ignore[arg-type]
    "no mapping": ({**PICTURE, "multi_modal_data": [1]}, {}, "multi_modal_data", "mapping"),
    "no names": ({**PICTURE, "mm_processor_kwargs": 5}, {}, "mm_processor_kwargs", "mapping"),
    "more": ({**PICTURE, "cache_salt": "x"}, {}, "prompt", "cache_salt"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_prompts_that_are_refused(case: str, model_dir: str) -> None:
    prompt, fields, parameter, hint = REFUSED[case]
    scripted = ScriptedTwin(model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=Hook()) as client:
            with pytest.raises(RequestRejected, match=hint) as caught:
                await client.complete(prompt, FOUR, **fields)
    assert caught.value.parameter == parameter and caught.value.remedy
    assert scripted.received("add") == []


async def test_without_a_hook_nothing_is_sent(model_dir: str) -> None:
    scripted = ScriptedTwin(model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            for prompt in (PICTURE, {"prompt": "x", "mm_processor_kwargs": {"a": 1}}, MultiModalPrompt(prompt="x")):
                with pytest.raises(RequestRejected) as caught:
                    await client.complete(prompt, FOUR)
                assert caught.value.parameter == "multi_modal_data"
                assert "mm_preprocessor" in str(caught.value.remedy) and "mm_features" in str(caught.value.remedy)
    assert scripted.received("add") == []


async def test_a_model_of_text_alone_does_not_ask_the_hook(text_model_dir: str) -> None:
    hook = Hook()
    with anyio.fail_after(30):
        for directory in (text_model_dir, None):
            engine = ScriptedTwin(model_dir=directory).engine
            async with EngineClient(engine=engine, mm_preprocessor=hook) as client:
                with pytest.raises(RequestRejected, match=r"multi_modal_data: (the model|nothing)"):
                    await client.complete(PICTURE, FOUR)
    assert hook.calls == []


# -------------------------------------------------------------------- a cache's miss


async def test_a_miss_is_sent_once_again_with_the_data(model_dir: str) -> None:
    """One clean stream: its consumer sees nothing of it but ``attempts``."""
    scripted, hook = missing_once(model_dir, "cat"), Hook("cat", "dog")
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=hook) as client:
            async with client.generate(PICTURE, FOUR) as stream:
                first_id = stream.wire_id
                outputs = [output async for output in stream]
            assert client.statistics()["requests_in_flight"] == 0
    assert [token for output in outputs for token in output.token_ids] == expected_tokens(IDS, 4)
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == "length" and stream.attempts == 2
    assert hook.asked_for == [frozenset(), frozenset({"cat"})] and hook.calls[0][0] is hook.calls[1][0]
    assert threading.get_ident() not in hook.threads
    (sent_id, sent), (again_id, again) = ids_and_data(scripted)
    assert (sent_id, again_id) == (first_id, stream.wire_id) and sent_id != again_id
    assert sent == [False, False] and again == [True, False]  # what was not missed is not sent


@pytest.mark.parametrize("retries", [None, RetryPolicy(max_attempts=2)])
async def test_a_second_miss_is_the_requests_error(retries: RetryPolicy | None, model_dir: str) -> None:
    scripted, hook = missing_once(model_dir, "cat", times=2), Hook()
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=hook, retries=retries) as client:
            with pytest.raises(RequestFailed, match="'cat' in its cache, although it has had their data") as caught:
                await client.complete(PICTURE, FOUR, request_id="mine")
            assert list((await client.complete([1], FOUR)).token_ids) == expected_tokens([1], 4)
    error = caught.value
    assert (error.code, error.missing_hashes, error.request_id) == ("multimodal_cache_miss", ("cat",), "mine")
    assert [data for _, data in ids_and_data(scripted)] == [[False], [True], []]


async def test_a_second_miss_of_another_item_is_an_error_as_well(model_dir: str) -> None:
    scripted, hook = (
        ScriptedTwin(Script(requests=(missing(1, "cat"), missing(2, "dog"))), model_dir=model_dir),
        Hook("cat", "dog"),
    )
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=hook) as client:
            with pytest.raises(RequestFailed, match="'dog' in its cache, and the request was sent again") as caught:
                await client.complete(PICTURE, FOUR)
    assert caught.value.missing_hashes == ("dog",)
    assert [data for _, data in ids_and_data(scripted)] == [[False, False], [True, False]]
    assert hook.asked_for == [frozenset(), frozenset({"cat"})]


async def test_an_item_that_came_twice_has_its_data_from_its_double(model_dir: str) -> None:
    """No hook: what the request had is enough."""
    scripted = missing_once(model_dir, "cat")
    features = [feature(cached=True), feature(offset=2)]
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            output = await client.complete(IDS, FOUR, mm_features=features)
    assert list(output.token_ids) == expected_tokens(IDS, 4)
    assert [data for _, data in ids_and_data(scripted)] == [[False, True], [True, True]]
    assert features[0].data is None  # the caller's own is as it was


NO_DATA: dict[str, tuple[list[MultiModalFeatureSpec], str]] = {
    "without data": ([feature(cached=True)], "send the request again with it"),
    "with data": ([feature()], "send the request again with their data"),
    "another item": ([feature("dog", cached=True)], "although it has had their data"),
}


@pytest.mark.parametrize("case", NO_DATA)
async def test_a_miss_without_data_to_send_is_an_error_that_names_the_items(case: str, model_dir: str) -> None:
    features, hint = NO_DATA[case]
    scripted = missing_once(model_dir, "cat")
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            with pytest.raises(RequestFailed, match=hint) as caught:
                await client.complete(IDS, FOUR, mm_features=features)
            assert client.statistics()["requests_in_flight"] == 0
    assert caught.value.missing_hashes == ("cat",) and "'cat'" in str(caught.value)
    assert caught.value.code == "multimodal_cache_miss" and not caught.value.retryable
    assert len(scripted.received("add")) == 1


def unhashable() -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(feature().data, "image", "id", PlaceholderRange(1, 1), ["cat"])  # type: ignore[arg-type]


BAD_SECONDS: dict[str, tuple[Callable[[], Any], str]] = {
    "it raises": (partial(fails, OSError("gone"), frozenset()), "OSError: gone"),
    "it still has none": (lambda: (IDS, [feature(cached=True)]), "gave no data"),
    "other tokens": (lambda: ([1, 2], [feature()]), "other token ids"),
    "other items": (lambda: (IDS, [feature("dog")]), "gave no data"),
    "no features": (lambda: (IDS, [5]), "has a int in it"),
    "no hash": (lambda: (IDS, [unhashable()]), "unhashable"),
}


@pytest.mark.parametrize("case", BAD_SECONDS)
async def test_a_hook_that_does_not_bring_what_is_missed(case: str, model_dir: str) -> None:
    made, hint = BAD_SECONDS[case]
    scripted = missing_once(model_dir, "cat")
    hook = Hook(made=lambda hashes: made() if hashes else (IDS, [feature(cached=True)]))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=hook) as client:
            with pytest.raises(RequestFailed, match=hint) as caught:
                await client.complete(PICTURE, FOUR)
            assert client.statistics()["requests_in_flight"] == 0
            assert list((await client.complete([1], FOUR)).token_ids) == expected_tokens([1], 4)
    assert (caught.value.code, caught.value.missing_hashes) == ("multimodal_cache_miss", ("cat",))
    assert [one[1] for one in scripted.received("add")] == [IDS, [1]]


async def test_completions_ask_once_for_what_they_all_miss(model_dir: str) -> None:
    scripted, hook = missing_once(model_dir, "cat", times=3), Hook()
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=hook) as client:
            output = await client.complete(PICTURE, SamplingParams(n=3, max_tokens=4))
    assert [list(one.token_ids) for one in (output, *output.others)] == [expected_tokens(IDS, 4)] * 3
    assert hook.asked_for == [frozenset(), frozenset({"cat"})]
    sent = ids_and_data(scripted)
    assert [data for _, data in sent] == [[False]] * 3 + [[True]] * 3 and len({one for one, _ in sent}) == 6


async def test_beams_keep_their_image(model_dir: str) -> None:
    """Each of their steps is a request of its own, with the features, and may be sent again with their data."""
    ids, floats = struct.pack("<5q", 7, 7, 8, 9, 10), struct.pack("<5f", -1, -1, -2, -3, -4)
    columns = [["<i8", [1, 5], Ext(3, ids)], ["<f4", [1, 5], Ext(3, floats)], ["<i8", [1], Ext(3, ids[:8])], None]
    rules = (missing(3, "cat"), RequestRule(output={2: columns}))
    scripted, hook = ScriptedTwin(Script(requests=rules), model_dir=model_dir), Hook()
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=hook) as client:
            output = await client.beam_search(PICTURE, BeamSearchParams(beam_width=2, max_tokens=2))
    assert output.prompt == "see <image>" and output.prompt_token_ids == tuple(IDS) and list(output.token_ids) == [7, 7]
    assert [one[1] for one in scripted.received("add")] == [IDS, [*IDS, 7], [*IDS, 8], [*IDS, 8]]
    assert hook.asked_for == [frozenset(), frozenset({"cat"})]
    assert [data for _, data in ids_and_data(scripted)] == [[False], [False], [False], [True]]


@pytest.mark.parametrize("tasks", [("embed",)])
async def test_pooling_requests_are_sent_again_as_well(tasks: Sequence[str], model_dir: str) -> None:
    rule = RequestRule(nth=1, output={1: [], 4: None, 5: 3, HASHES: ["cat"]})
    scripted, hook = ScriptedTwin(Script(tasks=tuple(tasks), requests=(rule,)), model_dir=model_dir), Hook()
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=hook) as client:
            assert (await client.embed(PICTURE)).embedding == [1.0, 2.0, 3.0]
    assert [data for _, data in ids_and_data(scripted)] == [[False], [True]]


async def test_an_input_session_with_features_ends(model_dir: str) -> None:
    """The word that no part follows has no features; a miss is the session's error."""
    scripted = ScriptedTwin(Script(requests=(missing(2, "cat"),)), model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=Hook()) as client:
            async with client.input_session(FOUR) as session:
                await session.send(PICTURE)
                session.end()
                tokens = [token async for output in session for token in output.token_ids]
            assert tokens == expected_tokens(IDS, 4)
            async with client.input_session(FOUR) as session:
                await session.send(PICTURE)
                with pytest.raises(RequestFailed, match="'cat' not in its cache"):
                    await anext(session)
            assert client.statistics()["requests_in_flight"] == 0
    assert [data for _, data in ids_and_data(scripted)] == [[False], [], [False]]


# ----------------------------------------------------------------- ends in between


async def ended_by_abort(client: EngineClient, stream: RequestStream) -> None:
    stream.abort()
    output = await stream.final()
    assert output.finish_reason == "abort" and list(output.token_ids) == []


async def ended_by_label(client: EngineClient, stream: RequestStream) -> None:
    await client.abort("mine")
    assert (await stream.final()).finish_reason == "abort"


async def ended_by_leaving(client: EngineClient, stream: RequestStream) -> None:
    await stream.aclose()


async def ended_by_cancellation(client: EngineClient, stream: RequestStream) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(stream)
    assert stream.is_over


async def ended_by_death(client: EngineClient, stream: RequestStream) -> None:
    with pytest.raises(EngineDeadError):
        await client.reset_mm_cache()
    with pytest.raises(EngineDeadError):
        await anext(stream)


async def ended_by_close(client: EngineClient, stream: RequestStream) -> None:
    await client.aclose()
    assert (await anext(stream)).finish_reason == "abort"


ENDS = [
    ended_by_abort, ended_by_label, ended_by_leaving, ended_by_cancellation, ended_by_death, ended_by_close
]  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
async def test_every_end_between_the_miss_and_the_data_leaves_nothing(
    end: Callable[[EngineClient, RequestStream], Any], model_dir: str
) -> None:
    """While the hook is asked for the data: it comes back for nothing."""
    entered, may_end = threading.Event(), threading.Event()

    def made(hashes: frozenset[str]) -> Any:
        if hashes:
            entered.set()
            may_end.wait()
        return IDS, [feature(cached=not hashes)]

    death = (Fault(do="exit", direction="in", kind="reset_mm_cache"),)
    scripted = missing_once(model_dir, "cat", faults=death)
    try:
        with anyio.fail_after(30):
            async with EngineClient(engine=scripted.engine, mm_preprocessor=Hook(made=made)) as client:
                stream = await client.submit(PICTURE, FOUR, request_id="mine")
                while not entered.is_set():
                    await anyio.lowlevel.checkpoint()
                assert client.statistics()["requests_in_flight"] == 0 and stream.attempts == 1
                await end(client, stream)
                assert client.statistics()["requests_in_flight"] == 0
                may_end.set()
                if end not in (ended_by_death, ended_by_close):
                    assert list((await client.complete([1], FOUR)).token_ids) == expected_tokens([1], 4)
                    assert client.core.session.sent_again == 0
    finally:
        may_end.set()
    assert [one[1] for one in scripted.received("add")][:2] in ([IDS], [IDS, [1]])
    assert len(scripted.received("add")) <= 2 and scripted.received("abort") == []


async def test_an_abort_behind_the_data_is_that_of_the_second_sending(model_dir: str) -> None:
    silent = RequestRule(nth=2, silent=True)
    scripted = ScriptedTwin(Script(requests=(missing(1, "cat"), silent)), model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, mm_preprocessor=Hook()) as client:
            stream = await client.submit(PICTURE, FOUR)
            while stream.attempts == 1:
                await anyio.lowlevel.checkpoint()
            await stream.aclose()
            await client.drain()
            assert client.statistics()["requests_in_flight"] == 0
    assert [ids for [*ids] in scripted.received("abort")] == [[stream.wire_id]]
