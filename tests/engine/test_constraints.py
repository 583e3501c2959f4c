"""Constrained generation on a tiny model: what comes out obeys the constraint, whoever else is in the batch."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch
from built_tokenizers import byte_level, write_model
from tiny_models import VOCAB_SIZE, make_sequence, make_tiny_model, open_runner
from tokenizers import Tokenizer

from anyengine import EngineClient, RequestFailed, SamplingParams, StructuredOutputsParams
from anyengine._wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    WireSamplingParams,
    WireStructuredOutputs,
)
from anyengine.config import EmbeddedEngine
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.runner.constraints import Constraints

EOS = 1
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama", eos_token_id=EOS)
    return write_model(directory, byte_level(VOCAB_SIZE, added=()))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture
def engine(model_dir: Path) -> Iterator[EngineCore]:
    engine = open_engine(model_dir)
    yield engine
    engine.close()


def open_engine(model_dir: Path, **settings: Any) -> EngineCore:
    runner = open_runner(model_dir)
    return EngineCore(runner, EmbeddedEngine(max_num_seqs=16, **settings))


def add(engine: EngineCore, request_id: str, constraint: dict[str, Any] | None, **sampling: Any) -> None:
    wire = None if constraint is None else WireStructuredOutputs(**constraint, backend="guidance")
    defaults: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 150, "eos_token_id": EOS}
    params = WireSamplingParams(**{**defaults, **sampling}, structured_outputs=wire)
    engine.add(EngineCoreRequest(request_id, [20, 30, 40], sampling_params=params))


def run(engine: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    while engine.has_work():
        for _, output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def text_of(tokenizer: Tokenizer, outputs: list[EngineCoreOutput]) -> str:
    assert outputs[-1].finish_reason is FinishReason.STOP, outputs[-1]
    return str(tokenizer.decode([token for output in outputs for token in output.new_token_ids]))


def _random_schema(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = choose.choice(["boolean", "null", "integer", "string", "enum"] + ["object", "array"] * (depth < 2))
    if kind == "integer":
        return {"type": kind, "minimum": choose.randrange(-50, 0), "maximum": choose.randrange(0, 2000)}
    if kind == "string":
        return {"type": kind, "maxLength": choose.randrange(1, 6)}
    if kind == "enum":
        return {"enum": choose.sample([None, True, 12, "red", "grün", 'a"b\\'], 3)}
    if kind == "array":
        return {"type": kind, "items": _random_schema(choose, depth + 1), "minItems": 1, "maxItems": 2}
    if kind == "object":
        properties = {name: _random_schema(choose, depth + 1) for name in choose.sample("abcdé", 2)}
        return {"type": kind, "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": kind}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """A reading of its own of the few words that :func:`_random_schema` uses."""
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    match schema["type"]:
        case "object":
            properties = schema["properties"]
            return (
                isinstance(value, dict)
                and value.keys() <= properties.keys()
                and {*schema["required"]} <= value.keys()
                and all(conforms(value[name], properties[name]) for name in value)
            )
        case "array":
            bounds = range(schema["minItems"], schema["maxItems"] + 1)
            return isinstance(value, list) and len(value) in bounds and all(conforms(v, schema["items"]) for v in value)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "boolean":
            return isinstance(value, bool)
    return value is None


@pytest.mark.feature("R23")
def test_fifty_schemas_in_batches_of_sixteen_are_obeyed(engine: EngineCore, tokenizer: Tokenizer) -> None:
    choose = random.Random(5)
    schemas = [_random_schema(choose) for _ in range(50)]
    for number, schema in enumerate(schemas):
        written = schema if number % 2 else json.dumps(schema)
        add(engine, str(number), {"json": written, "disable_any_whitespace": True}, seed=number, max_tokens=400)
        add(engine, f"free {number}", None, max_tokens=3, seed=number)
    outputs = run(engine)
    for number, schema in enumerate(schemas):
        text = text_of(tokenizer, outputs[str(number)])
        assert conforms(json.loads(text), schema), (text, schema)
        assert len(outputs[f"free {number}"]) <= 3


@pytest.mark.feature("R23")
def test_every_kind_of_constraint_is_obeyed(engine: EngineCore, tokenizer: Tokenizer) -> None:
    constraints: dict[str, dict[str, Any]] = {
        "regex": {"regex": r"(ab|c\d){3}-[é日]"},
        "choice": {"choice": ["Paris", "Paris, France", 'a "quoted" \\ one']},
        "ebnf": {"grammar": 'root ::= "x" digit digit\ndigit ::= [0-9]'},
        "lark": {"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{2,4}/'},
        "object": {"json_object": True, "disable_any_whitespace": True},
        "closed": {
            "json": {"type": "object", "properties": {"a": {"type": "boolean"}}},
            "disable_additional_properties": True,
            "disable_any_whitespace": True,
        },
        "tag": {
            "structural_tag": json.dumps(
                {
                    "structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            )
        },
    }
    for name, constraint in constraints.items():
        # Free text would go on for ever: the bias leads it into its tag, and the object to its end.
        bias = {"tag": {"<": 40.0, "f": 40.0}, "object": {"}": 30.0}}.get(name, {})
        logit_bias = {tokenizer.token_to_id(token): value for token, value in bias.items()}
        add(engine, name, constraint, logit_bias=logit_bias or None, max_tokens=80)
    outputs = run(engine)
    texts = {name: tokenizer.decode([t for o in outputs[name] for t in o.new_token_ids]) for name in constraints}
    assert re.fullmatch(r"(ab|c\d){3}-[é日]", texts["regex"])
    assert texts["choice"] in constraints["choice"]["choice"]
    assert re.fullmatch(r"x\d\d", texts["ebnf"])
    assert re.fullmatch(r"<[a-z]{2,4}>", texts["lark"])
    assert isinstance(json.loads(texts["object"]), dict)
    assert json.loads(texts["closed"]).keys() <= {"a"}
    assert re.search(r'<f>\s*\{\s*"name"', texts["tag"]), texts["tag"]


def test_exactly_the_tokens_that_go_on_with_a_choice_are_allowed(model_dir: Path, tokenizer: Tokenizer) -> None:
    """The mask of each step against all tokens, one by one."""
    choices = ["the quick", "the capital", "thé", "3"]
    spelt = {
        token_id: tokenizer.decode([token_id], skip_special_tokens=False)
        for token_id in range(tokenizer.get_vocab_size())
        if token_id > 3
    }
    constraints = Constraints(model_dir / "tokenizer.json", VOCAB_SIZE, [EOS])
    seq = make_sequence("a", [5], structured_outputs=WireStructuredOutputs(choice=choices))
    constraints.start(seq).result(timeout=30)
    text = ""
    while not seq.output_token_ids or seq.output_token_ids[-1] != EOS:
        (row,) = constraints.masked(torch.zeros(1, VOCAB_SIZE), [seq]).tolist()
        allowed = {token_id for token_id, logit in enumerate(row) if logit == 0.0}
        expected = {id_ for id_, spelling in spelt.items() if any(c.startswith(text + spelling) for c in choices)}
        whole = {id_ for id_ in allowed if "\ufffd" not in spelt.get(id_, "")}  # a byte of é has no spelling of its own
        expected |= {EOS} if text in choices else set()
        forks = len({choice[len(text) : len(text) + 1] for choice in choices if choice.startswith(text)}) > 1
        assert whole == expected if forks else whole and whole <= expected  # of one way on, it takes the longest token
        chosen = max(whole)
        assert constraints.accept(seq, chosen) is None
        seq.output_token_ids.append(chosen)
        text += spelt.get(chosen, "")
    assert text in choices
    constraints.close()


def test_masks_do_not_touch_the_rows_of_others(model_dir: Path) -> None:
    constraints = Constraints(model_dir / "tokenizer.json", VOCAB_SIZE, [EOS])
    bound = make_sequence("bound", [5], structured_outputs=WireStructuredOutputs(choice=["the"]))
    free = make_sequence("free", [5])
    constraints.start(bound).result(timeout=30)
    logits = torch.randn(3, VOCAB_SIZE)
    before = logits.clone()
    masked = constraints.masked(logits, [free, bound, free])
    assert torch.equal(logits, before)
    assert torch.equal(masked[[0, 2]], before[[0, 2]])
    assert 0 < masked[1].isfinite().sum() < 10
    assert constraints.masked(logits, [free] * 3) is logits
    constraints.close()


@pytest.mark.feature("R23")
def test_a_bad_constraint_fails_alone_with_the_reason(engine: EngineCore) -> None:
    bad: dict[str, dict[str, Any]] = {
        "unclosed group": {"regex": "("},
        "look-around": {"regex": "(?=a)"},
        "Invalid type": {"json": {"type": "integr"}},
        "structured_outputs: EOF": {"json": "[1"},
        "convert the grammar": {"grammar": 'begin: "a"'},
        "structures and triggers": {"structural_tag": '{"format": {}}'},
        "begins with none of": {
            "structural_tag": '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}'
        },
        "names no constraint": {},
    }
    for reason, constraint in bad.items():
        add(engine, reason, constraint)
    add(engine, "good", {"choice": ["the"]})
    outputs = run(engine)
    assert outputs["good"][-1].finish_reason is FinishReason.STOP
    for reason in bad:
        (output,) = outputs[reason]
        assert output.finish_reason is FinishReason.ERROR and output.error is not None
        assert reason in output.error.message, output.error.message
        assert len(output.error.message) < 1000
    assert engine.scheduler_stats().kv_cache_usage == 0.0


def test_parameters_that_leave_no_token_end_the_request_alone(engine: EngineCore, tokenizer: Tokenizer) -> None:
    add(engine, "too short", {"choice": ["the"]}, min_tokens=10)
    add(engine, "other ids", {"choice": ["the"]}, allowed_token_ids=[tokenizer.token_to_id("Q")], temperature=0.0)
    add(engine, "good", {"choice": ["the"]})
    outputs = run(engine)
    assert text_of(tokenizer, outputs["good"]) == "the"
    for name in ("too short", "other ids"):
        last = outputs[name][-1]
        assert last.finish_reason is FinishReason.ERROR and last.error is not None
        assert "the grammar leaves no token" in last.error.message
    assert engine.scheduler_stats().kv_cache_usage == 0.0


def test_who_ignores_the_end_gets_nothing_behind_it(engine: EngineCore, tokenizer: Tokenizer) -> None:
    add(engine, "a", {"choice": ["the"]}, eos_token_id=None, max_tokens=12)
    outputs = run(engine)["a"]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert tokenizer.decode([token for output in outputs for token in output.new_token_ids]) == "the"


def test_a_constraint_outlives_preemption(model_dir: Path, tokenizer: Tokenizer) -> None:
    """The same answers from a cache in which not all of them fit."""
    block_bytes = 3 * 2 * 2 * 8 * 16 * 4
    texts = []
    for memory_bytes in (None, 34 * block_bytes):
        runner = open_runner(model_dir, kv_cache_memory_bytes=memory_bytes)
        engine = EngineCore(runner, EmbeddedEngine())
        for number in range(12):
            add(engine, str(number), {"regex": "[a-z]{70}"}, seed=number)
        outputs = run(engine)
        texts.append([text_of(tokenizer, outputs[str(number)]) for number in range(12)])
        preemptions = engine.utility("get_engine_statistics", [])["num_preemptions"]
        assert (preemptions > 0) is (memory_bytes is not None)
        engine.close()
    assert texts[0] == texts[1]
    assert all(re.fullmatch("[a-z]{70}", text) for text in texts[0])


def test_a_slow_grammar_delays_nobody_else(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled while others generate; its request can be aborted meanwhile, and waits for nothing else."""
    compiling, proceed = threading.Event(), threading.Event()
    compile_ = Constraints._in_thread_matcher

    def slow(self: Constraints, params: WireStructuredOutputs) -> Any:
        compiling.set()
        assert proceed.wait(30)
        return compile_(self, params)

    monkeypatch.setattr(Constraints, "_in_thread_matcher", slow)
    add(engine, "slow", {"choice": ["the"]})
    add(engine, "aborted", {"choice": ["the"]})
    add(engine, "free", None, max_tokens=3, eos_token_id=None)
    assert compiling.wait(30)
    assert engine.scheduler_stats().num_waiting_reqs == 3
    others = [output for _ in range(4) for _, output in engine.step()]
    assert [output.request_id for output in others] == ["free"] * 3
    assert engine.has_work()
    engine.abort(["aborted"])
    proceed.set()
    assert list(run(engine)) == ["slow"]


def test_one_schema_is_compiled_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    from anyengine.engine.runner import constraints as module

    grammar_text = module._grammar_text
    monkeypatch.setattr(module, "_grammar_text", lambda params: compiled.append("") or grammar_text(params))
    constraints = Constraints(model_dir / "tokenizer.json", VOCAB_SIZE, [EOS])
    for name in "abc":
        seq = make_sequence(name, [5], structured_outputs=WireStructuredOutputs(json=PERSON))
        constraints.start(seq).result(timeout=30)
    assert len(compiled) == 1
    constraints.close()


def test_what_a_constraint_takes_is_named_where_it_is_missing(model_dir: Path, tmp_path: Path) -> None:
    seq = make_sequence("a", [5], structured_outputs=WireStructuredOutputs(regex="a"))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Constraints(tmp_path / "tokenizer.json", VOCAB_SIZE, [EOS]).start(seq)
    with pytest.raises(ValueError, match="end-of-sequence"):
        Constraints(model_dir / "tokenizer.json", VOCAB_SIZE, []).start(seq)


def test_a_missing_package_names_the_extra(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    seq = make_sequence("a", [5], structured_outputs=WireStructuredOutputs(regex="a"))
    with pytest.raises(ValueError, match=r'pip install "anyengine\[structured\]"'):
        Constraints(model_dir / "tokenizer.json", VOCAB_SIZE, [EOS]).start(seq)


def test_logprobs_are_those_of_what_is_allowed(engine: EngineCore) -> None:
    """As vLLM: the mask comes before everything else, so what is forbidden has no probability."""
    add(engine, "a", {"choice": ["t", "3"]}, logprobs=-1)
    (output, *_) = run(engine)["a"]
    assert output.new_logprobs is not None
    values = msgspec.convert(memoryview(output.new_logprobs.logprobs.data).cast("B").cast("f").tolist(), list[float])
    assert sum(value > float("-inf") for value in values[1:]) == 2


@pytest.mark.anyio
@pytest.mark.feature("R23")
async def test_a_client_gets_n_answers_of_the_form_that_it_asked_for(model_dir: Path) -> None:
    engine = EmbeddedEngine(model=str(model_dir), num_threads=1, in_process=True)
    with anyio.fail_after(60):
        async with EngineClient(engine=engine) as client:
            params = SamplingParams(
                n=3,
                temperature=1.0,
                seed=3,
                max_tokens=100,
                structured_outputs=StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
            )
            output = await client.generate("the capital", params).final()
            with pytest.raises(RequestFailed, match="look-around"):
                bad = StructuredOutputsParams(regex="(?=a)")
                await client.generate("the capital", SamplingParams(structured_outputs=bad)).final()
    people = [json.loads(completion.text) for completion in output.outputs]
    assert len({person["name"] for person in people}) > 1
    assert all(person.keys() == {"name", "age"} and 0 <= person["age"] <= 99 for person in people)
