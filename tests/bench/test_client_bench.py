"""``anyengine bench client``: the counting, the table, the command's JSON, and our own contestant for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import make_tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anyengine.bench.client import ClientBench, ClientMeasurement, as_json, ratio_to_vllm, table_lines
from anyengine.bench.contestants.window import Window
from anyengine.cli import main


def measurement(contestant: str, loop: str, cost: float) -> ClientMeasurement:
    return ClientMeasurement(
        contestant=contestant,
        loop=loop,
        cpu_us_per_token=cost,
        items_per_token=1.0,
        tokens_per_s=32_000.0,
        peak_rss_bytes=80 << 20,
        rounds_cpu_us_per_token=[cost - 1, cost, cost + 1],
    )


def test_the_steady_part_is_between_the_first_and_the_last_eighth() -> None:
    window = Window(64)
    noted = []
    for _ in range(64):
        window.items += 1
        window.tokens += 1
        if window.tokens >= window.mark:
            window.note()
            noted.append(window.tokens)
    assert noted == [8, 56]
    assert window.figures()["items_per_token"] == 1.0


def test_a_token_that_is_missing_is_an_error() -> None:
    window = Window(64)
    window.tokens = 63
    window.note()
    window.note()
    with pytest.raises(RuntimeError, match="63 tokens came, of 64"):
        window.figures()


def test_each_loop_is_compared_with_its_own_and_trio_with_the_cheaper_one() -> None:
    found = [
        measurement("anyengine", "asyncio", 6.0),
        measurement("anyengine", "trio", 5.0),
        measurement("vllm AsyncLLM", "asyncio", 24.0),
        measurement("vllm AsyncLLM", "uvloop", 20.0),
        measurement("vllm with statistics", "uvloop", 10.0),
    ]
    assert [ratio_to_vllm(one, found) for one in found] == [0.25, 0.25, 1.0, 1.0, 0.5]
    assert ratio_to_vllm(found[0], found[:2]) is None
    _head, first, *_ = table_lines(found)
    assert first.split() == ["anyengine,", "asyncio", "6.00", "[5.00-7.00]", "0.25", "1.00", "32000", "80"]
    rows = json.loads(as_json(ClientBench(model_dir="m"), found))["measurements"]
    assert [row["ratio_to_vllm"] for row in rows] == [0.25, 0.25, 1.0, 1.0, 0.5]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model with a tokenizer of bytes."""
    directory = make_tiny_model("llama", tmp_path / "llama", vocab_size=30_000)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.feature("O26")
def test_the_command_measures_our_client(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["bench", "client", "--model", str(model_dir), "--loops", "trio", "--json", "-", "--rounds", "1"]
    assert main([*typed, "--streams", "4", "--input-tokens", "8", "--output-tokens", "32", "--step-ms", "1"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["benchmark"], document["bench"]["streams"]) == ("client", 4)
    (row,) = document["measurements"]
    assert (row["contestant"], row["loop"], row["ratio_to_vllm"]) == ("anyengine", "trio", None)
    assert row["cpu_us_per_token"] > 0 and len(row["rounds_cpu_us_per_token"]) == 1
    assert 0 < row["items_per_token"] <= 1 and row["tokens_per_s"] > 0 and row["peak_rss_bytes"] > 1 << 20
    assert "round 1 of 1" in printed.err


@pytest.mark.parametrize(
    "options",
    [
        ["--streams", "0"],
        ["--output-tokens", "8"],
        ["--step-ms", "-1"],
        ["--loops", "trio,curio"],
        ["--max-ratio", "0.3"],
    ],
)
def test_options_that_make_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "client", *options]) == 2
    assert options[0].strip("-").replace("-", "_") in capsys.readouterr().err
