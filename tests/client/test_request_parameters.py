"""What a user asks of a request, and what becomes of it: on the wire, in the engine, or refused before."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import anyio
import pytest
from built_tokenizers import built, ids_of_bytes, write_model
from memory_engines import in_loop
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from anyengine import (
    CommandEngine,
    EngineClient,
    KvHintsEnvelope,
    LoRARequest,
    RequestRejected,
    SamplingParams,
)
from anyengine._wire import sampling_to_wire
from anyengine.testing.scripted import RequestRule, Script, ScriptedProcess, ScriptedTwin
from anyengine.testing.scripted import expected_tokens as scripted_tokens
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = {"vocab_size": 400, "max_position_embeddings": 2048}
    return str(write_model(tmp_path_factory.mktemp("rows") / "model", config=config))


async def sent(scripted: ScriptedTwin, params: SamplingParams, prompt: Any = (1, 2), **fields: Any) -> list[Any]:
    """The ADD of one request, by position (docs/protocol.md)."""
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            async with client.generate(prompt, params, **fields):
                pass
            await client.drain()
    return scripted.received("add")[-1]


# ------------------------------------------------------------------------------------------------- the call itself

VLLM_ARGUMENTS = (  # AsyncLLM.generate, 0.32.0, in order
    "prompt", "sampling_params", "request_id", "prompt_text", "lora_request", "tokenization_kwargs", "trace_headers",
    "priority", "data_parallel_rank", "session_id", "kv_hints", "reasoning_ended", "reasoning_parser_kwargs",
)  # fmt: skip
WIRE = {  # docs/protocol.md: EngineCoreRequest
    "lora_request": 6, "data_parallel_rank": 8, "priority": 13, "trace_headers": 14, "reasoning_ended": 17,
    "reasoning_parser_kwargs": 18, "session_id": 20, "kv_hints": 21,
}  # fmt: skip


@pytest.mark.feature("C01", "R41")
async def test_every_argument_of_vllms_generate(model_dir: str) -> None:
    """By its name, and the first three by position; each where the engine looks for it."""
    positional = [
        name
        for name, one in inspect.signature(EngineClient.generate).parameters.items()
        if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    assert positional == ["self", *VLLM_ARGUMENTS[:3]]
    lora, hints = LoRARequest("a", 1, "/a"), KvHintsEnvelope("1", "m", [])
    given: dict[str, Any] = {
        "lora_request": lora, "data_parallel_rank": 1, "priority": -3, "trace_headers": {"traceparent": "00-1-2-01"},
        "reasoning_ended": True, "reasoning_parser_kwargs": {"a": 1}, "session_id": "s", "kv_hints": hints,
    }  # fmt: skip
    others = {"prompt_text": "told", "tokenization_kwargs": {"truncate_prompt_tokens": 2}}
    assert {"prompt", "sampling_params", "request_id", *given, *others} == set(VLLM_ARGUMENTS)
    registration = {"supports_lora": True, "max_loras": 1}
    engines = [ScriptedTwin(Script(registration=registration), model_dir=model_dir) for _ in range(2)]
    with anyio.fail_after(30):
        async with EngineClient(engine=[one.engine for one in engines]) as client:
            stream = client.generate("the quick brown fox", ONE, "label", **given, **others)
            assert stream.request_id == "label"
            async with stream:
                out = await stream.final()
            aborted = client.generate([1], SamplingParams(max_tokens=1900))
            async for _ in aborted:
                aborted.abort()
    assert out.prompt == "the quick brown fox"
    (add,) = engines[1].received("add")
    assert not any(add[16] == "label" for add in engines[0].received("add"))
    wire = {**given, "lora_request": ["a", 1, "/a", None, False, False]}
    wire["kv_hints"] = {"protocol_version": "1", "message_id": "m", "actions": []}
    assert {name: add[position] for name, position in WIRE.items()} == wire
    assert (len(add[1]), add[16], add[0] != "label") == (2, "label", True)


@pytest.mark.feature("R41")
async def test_a_rank_that_is_named_gets_the_request_whoever_has_the_turn() -> None:
    engines = [ScriptedTwin() for _ in range(3)]
    with anyio.fail_after(30):
        async with EngineClient(engine=[one.engine for one in engines]) as client:
            for _ in range(4):
                assert (await client.complete([1], ONE, data_parallel_rank=2)).metrics.rank == 2
            with pytest.raises(RequestRejected, match="there is no rank 3"):
                await client.complete([1], ONE, data_parallel_rank=3)
    assert [len(one.received("add")) for one in engines] == [0, 0, 4]


@pytest.mark.case("K44")
@pytest.mark.parametrize("label", ["x", "", None])
async def test_requests_of_one_label_are_not_mixed_up(label: str | None) -> None:
    """A hundred at once, and again: every wire id is new, each gets its own tokens, an abort hits all that live."""
    scripted = ScriptedTwin(Script(step_interval_s=0.001, tokens_per_frame=2))
    answers: dict[int, list[int]] = {}

    async def ask(client: EngineClient, nonce: int) -> None:
        out = await client.complete([nonce, 7], SamplingParams(max_tokens=5), request_id=label)
        answers[nonce] = out.token_ids
        assert label is None or out.request_id == label

    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:
            async with anyio.create_task_group() as tasks:
                for nonce in range(100):
                    tasks.start_soon(ask, client, nonce)
            for nonce in range(100, 110):  # a retry loop
                await ask(client, nonce)
            if label is not None:
                streams = [
                    await client.submit([n], SamplingParams(max_tokens=1900), request_id=label) for n in range(5)
                ]
                other = await client.submit([5], SamplingParams(max_tokens=1900), request_id="other")
                assert set(await client.abort(label)) == {stream.wire_id for stream in streams}
                assert client.stats().in_flight == 1
                await other.aclose()
    assert answers == {nonce: scripted_tokens([nonce, 7], 5) for nonce in range(110)}
    ids = [add[0] for add in scripted.received("add")]
    assert len(set(ids)) == len(ids)


# -------------------------------------------------------------------------------------------------- how to sample


@pytest.mark.feature("R02", "R03", "R04", "R24", "R25", "R27")
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("presence_penalty", (-2, 2), (-2.01, 2.01, float("nan"))),
        ("frequency_penalty", (-2, 2), (-2.01, 2.01, float("inf"))),
        ("repetition_penalty", (0.01, 50), (0, -1, float("inf"), float("nan"))),
        ("temperature", (0.01, 1.5, 2), (-0.1, 2.01, float("inf"), float("nan"))),
        ("logit_bias", ({5: -1.0}, {399: 2.0}), ({"x": 1.0}, {5: float("nan")}, {-1: 1.0}, {400: 1.0})),
        ("allowed_token_ids", ([5], [399]), ([], [400], [-1])),
        ("extra_args", ({"a": 2**64 - 1}, {"a": -(2**63)}), ({"a": 2**64}, {"a": [-(2**63) - 1]}, {5: 1})),
    ],
)
async def test_limits_of_parameters(model_dir: str, name: str, good: Any, bad: Any) -> None:
    """At their limits they reach the engine as they are; beyond, nothing is sent, and the error names them."""
    scripted = ScriptedTwin(model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            for value in good:
                await client.complete([1], SamplingParams(max_tokens=1, **{name: value}))
            for value in bad:
                with pytest.raises(RequestRejected) as caught:
                    await client.complete([1], SamplingParams(max_tokens=1, **{name: value}))
                assert (caught.value.parameter or "").startswith(name)
    adds = scripted.received("add")
    assert [next(iter(v for k, v in add[3].items() if k == name)) for add in adds] == [
        {str(k): v for k, v in value.items()} if name == "extra_args" else value for value in good
    ]


@pytest.mark.feature("R04")
@pytest.mark.parametrize(
    ("temperature", "kept"), [(0, 0.0), (1e-9, 0.01), (0.009, 0.01), (0.01, 0.01), (0.5, 0.5), (1, None), (2, 2.0)]
)
def test_temperatures_at_the_edge(temperature: float, kept: float | None) -> None:
    """Too low for arithmetic is raised; greedy needs no truncation; vLLM's default is not written."""
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3, min_p=0.1)
    wire = sampling_to_wire(params, eos_token_id=None, max_tokens=1)
    assert wire.temperature == (1.0 if kept is None else kept)
    assert (wire.top_p, wire.top_k, wire.min_p) == ((1.0, 0, 0.0) if temperature == 0 else (0.5, 3, 0.1))


@pytest.mark.feature("R24")
def test_biases_of_json_are_ids_within_bounds() -> None:
    params = SamplingParams.from_optional(logit_bias={"5": 150, 6: -1e9, "7": 1.5}, temperature=None, top_k=None)
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 1.5}
    assert (params.temperature, params.top_k) == (1.0, 0)
    with pytest.raises(RequestRejected, match=r"\['x', '1\.5', True\]") as caught:
        SamplingParams.from_optional(logit_bias={"x": 1, "5": 1, "1.5": 2, True: 3})
    assert (caught.value.parameter, caught.value.value) == ("logit_bias", ["x", "1.5", True])


# ---------------------------------------------------------------------------------------------- where it ends


@pytest.fixture(params=[1, [1, 3]], ids=["one eos", "several eos"])
def eos_dir(request: pytest.FixtureRequest, tmp_path: Any) -> tuple[str, list[int]]:
    config = {"vocab_size": 400, "max_position_embeddings": 2048}
    path = write_model(tmp_path / "model", config=config, generation_config={"eos_token_id": request.param})
    return str(path), [request.param] if isinstance(request.param, int) else request.param


@pytest.mark.feature("R08", "R10")
async def test_what_ends_an_output_on_the_wire(eos_dir: tuple[str, list[int]]) -> None:
    """The model's own ends beside the user's, each once; with ``ignore_eos`` they are only known, for min_tokens."""
    directory, (first, *further) = eos_dir
    scripted = ScriptedTwin(model_dir=directory)
    plain = (await sent(scripted, SamplingParams(stop_token_ids=[9, 9, 7])))[3]
    assert plain["_eos_token_id"] == first
    assert plain["stop_token_ids"] in ([9, 7, *further], [9, 9, 7, *further])
    assert sorted(plain["_all_stop_token_ids"]) == sorted({7, 9, first, *further})
    ignoring = (await sent(scripted, SamplingParams(ignore_eos=True, stop_token_ids=[9])))[3]
    assert "_eos_token_id" not in ignoring and ignoring["stop_token_ids"] == [9]
    assert sorted(ignoring["_all_stop_token_ids"]) == sorted({9, first, *further})
    assert "stop_token_ids" not in (await sent(scripted, SamplingParams(ignore_eos=True)))[3]


@pytest.mark.feature("R10", "R08")
async def test_an_engine_goes_on_when_told_to() -> None:
    """Our engine core: a token that would end the output does not with ``ignore_eos``, and a stop id still does."""
    prompt = [3, 4]
    tokens = expected_tokens(prompt, 12)
    end = tokens[4]
    assert end not in tokens[:4]
    with anyio.fail_after(30):
        async with EngineClient(engine=in_loop()) as client:
            client._entered_desk().builder._eos_token_ids = (end,)  # the toy's model has no files to say so
            stopped = await client.complete(prompt, SamplingParams(max_tokens=12))
            ignored = await client.complete(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
            by_id = await client.complete(prompt, SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[end]))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (tokens[:5], "stop", None)
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")
    assert (by_id.token_ids, by_id.finish_reason, by_id.stop_reason) == (tokens[:5], "stop", end)


@pytest.mark.feature("R11")
async def test_how_much_is_generated_at_most() -> None:
    """16 by default; all that the engine's length leaves, if asked for; and never less than min_tokens."""
    scripted = ScriptedTwin(Script(registration={"max_model_len": 100}))
    assert SamplingParams().max_tokens == 16
    assert (await sent(scripted, SamplingParams()))[3].get("max_tokens", 16) == 16
    assert (await sent(scripted, SamplingParams(max_tokens=None), [1] * 30))[3]["max_tokens"] == 70
    assert (await sent(scripted, SamplingParams(max_tokens=90), [1] * 30))[3]["max_tokens"] == 70
    assert (await sent(scripted, SamplingParams(max_tokens=5, min_tokens=5)))[3]["min_tokens"] == 5
    for refused in ({"max_tokens": 5, "min_tokens": 6}, {"max_tokens": 0}, {"min_tokens": -1}):
        with pytest.raises(RequestRejected):
            SamplingParams(**refused)
    with pytest.raises(RequestRejected, match="min_tokens"):
        await sent(scripted, SamplingParams(max_tokens=None, min_tokens=80), [1] * 30)


# ---------------------------------------------------------------------------------------------------------- text


@pytest.mark.feature("R17")
async def test_text_is_left_out_when_nobody_wants_it(model_dir: str) -> None:
    tokens = tuple(ids_of_bytes(built("byte_level"), b"hello"))
    scripted = ScriptedTwin(Script(requests=(RequestRule(tokens=tokens, finish="length"),)), model_dir=model_dir)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            outs = [out async for out in client.generate([4], SamplingParams(max_tokens=5, detokenize=False))]
            texts = [out.text async for out in client.generate([4], SamplingParams(max_tokens=5))]
            assert outs[-1].finished and [t for out in outs for t in out.token_ids] == list(tokens)
    assert {out.text for out in outs} == {""} and "".join(texts) == "hello"


IDS_ONLY = """
import sys, anyio
from anyengine import EngineClient, SamplingParams
from anyengine.testing.scripted import ScriptedTwin

async def main():
    async with EngineClient(engine=ScriptedTwin().engine) as client:
        assert len((await client.complete([1, 2], SamplingParams(max_tokens=3))).token_ids) == 3

anyio.run(main)
assert not {"tokenizers", "transformers", "jinja2", "torch", "numpy"} & set(sys.modules)
"""


@pytest.mark.feature("R17")
@pytest.mark.blocking_ok
def test_a_client_of_token_ids_loads_no_tokenizer() -> None:
    subprocess.run([sys.executable, "-c", IDS_ONLY], check=True, timeout=60)


@pytest.mark.feature("R18")
@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a</s>b")])
async def test_special_tokens_are_shown_when_asked_for(model_dir: str, skip: bool, expected: str) -> None:
    tokenizer = built("byte_level")
    special = tokenizer._backend.token_to_id("</s>")
    tokens = (*ids_of_bytes(tokenizer, b"a"), special, *ids_of_bytes(tokenizer, b"b"))
    scripted = ScriptedTwin(Script(requests=(RequestRule(tokens=tokens, finish="length"),)), model_dir=model_dir)
    params = SamplingParams(max_tokens=3, skip_special_tokens=skip)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            pieces = [piece async for piece in client.generate([4], params).text_stream()]
            whole = await client.complete([4], params)
    assert "".join(pieces) == whole.text == expected
    assert whole.token_ids == list(tokens)


# ------------------------------------------------------------------------------------------------ order and traces


@pytest.mark.feature("R40")
async def test_an_engine_that_has_no_priorities_is_asked_for_none(tmp_path: Any) -> None:
    scripted = ScriptedProcess(log=tmp_path / "log")
    engine = CommandEngine(argv=scripted.engine.argv, args={"scheduling_policy": "fcfs"})
    with anyio.fail_after(30):
        async with EngineClient(engine=engine) as client:
            with pytest.raises(RequestRejected, match="first come, first served") as caught:
                await client.complete([1], ONE, priority=1)
            assert caught.value.parameter == "priority"
            assert (await client.complete([1], ONE, priority=0)).finished
    assert (await sent(ScriptedTwin(), ONE, priority=5))[13] == 5  # nobody says how it schedules


@pytest.mark.feature("R40")
async def test_the_urgent_run_first() -> None:
    """Our engine core, with room for one at a time: lower numbers overtake."""
    order: list[int] = []

    async def ask(client: EngineClient, priority: int) -> None:
        await client.complete([priority + 9], SamplingParams(max_tokens=2), priority=priority)
        order.append(priority)

    with anyio.fail_after(30):
        async with EngineClient(engine=in_loop(max_num_seqs=1, step_s=0.001)) as client:
            async with client.generate([1], SamplingParams(max_tokens=1900)) as holder:
                await anext(holder)
                async with anyio.create_task_group() as tasks:
                    for priority in (3, -2, 1, 0):
                        tasks.start_soon(ask, client, priority)
                    while client.stats().in_flight < 5:
                        await anyio.lowlevel.checkpoint()
                    await client.ping()  # a fence: the engine has all of them
                    holder.abort()
    assert order == [-2, 0, 1, 3]


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def tracer(exporter: InMemorySpanExporter) -> trace.Tracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


@pytest.mark.feature("R45")
async def test_the_callers_span_is_the_parent_of_the_engines(
    exporter: InMemorySpanExporter, tracer: trace.Tracer
) -> None:
    exporter.clear()
    scripted = ScriptedTwin()
    own = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "a=b"}
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            await client.complete([1], ONE)
            with tracer.start_as_current_span("caller"):
                await client.complete([2], ONE)
                await client.complete([3], ONE, trace_headers=own)
                await client.complete([4], ONE, trace_headers=None)
    outside, inside, given, none = (add[14] for add in scripted.received("add"))
    assert (outside, given, none) == (None, own, None)
    context = TraceContextTextMapPropagator().extract(inside)
    with tracer.start_as_current_span("engine", context=context):
        pass
    caller, engine = exporter.get_finished_spans()
    assert engine.parent is not None and caller.context is not None
    assert engine.parent.span_id == caller.context.span_id
    assert trace.get_current_span(context).get_span_context().trace_id == caller.context.trace_id
