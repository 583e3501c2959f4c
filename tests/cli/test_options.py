"""What the user types becomes frozen options, or a usage message and exit code 2."""

from __future__ import annotations

import pytest

from anyengine import EmbeddedEngine, RequestRejected, SamplingParams
from anyengine.cli.options import parse_arguments


def test_a_question_alone_gets_a_greedy_answer_of_the_default_model() -> None:
    options = parse_arguments(["run", "Where is Paris?"])
    assert options.prompt == "Where is Paris?"
    assert options.sampling_params() == SamplingParams(max_tokens=256, temperature=0.0)
    assert options.engine() == EmbeddedEngine()
    assert options.messages("Hi") == [{"role": "user", "content": "Hi"}]
    assert (options.backend, options.uvloop, options.raw, options.json) == ("asyncio", False, False, False)


def test_every_sampling_option_reaches_the_parameters() -> None:
    typed = "run -q --max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 7 x"
    options = parse_arguments(typed.split())
    expected = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7)
    assert options.sampling_params() == expected
    assert options.quiet


def test_engine_options_reach_the_engine() -> None:
    typed = "run --model org/name --dtype bfloat16 --max-model-len 64 --backend trio x"
    options = parse_arguments(typed.split())
    assert options.engine() == EmbeddedEngine(model="org/name", dtype="bfloat16", max_model_len=64)
    assert options.backend == "trio"


def test_names_of_logits_processors_reach_the_engine() -> None:
    place = ["engine", "m", "--handshake", "tcp://a:1"]
    options = parse_arguments([*place, "--logits-processors", "a", "b:c", "--seed", "3", "--logits-processors", "d"])
    assert options.engine() == EmbeddedEngine("m", seed=3, logits_processors=["a", "b:c", "d"])
    assert parse_arguments(place).engine() == EmbeddedEngine("m")


def test_a_system_message_comes_first() -> None:
    options = parse_arguments(["run", "--system", "Be brief.", "x"])
    assert options.messages("Hi") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_dash_is_a_prompt() -> None:
    assert parse_arguments(["run", "-"]).prompt == "-"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "COMMAND"),
        ("run", "prompt"),
        ("run --backend curio x", "curio"),
        ("run --backend trio --uvloop x", "--uvloop"),
        ("run --raw --system s x", "--system"),
        ("run --max-tokens many x", "many"),
        ("run --dtype int8 x", "int8"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(arguments.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("anyengine ")


def test_ranges_are_those_of_the_library() -> None:
    with pytest.raises(RequestRejected, match="temperature"):
        parse_arguments(["run", "--temperature", "-1", "x"]).sampling_params()
    with pytest.raises(ValueError, match="max_model_len"):
        parse_arguments(["run", "--max-model-len", "1", "x"]).engine()
