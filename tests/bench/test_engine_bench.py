"""``anyengine bench engine``: the schedule, the table, and our own contestant for real."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import transformers
from tiny_models import make_tiny_model

from anyengine.bench.contestants.protocol import make_prompts, tree_cpu_s
from anyengine.bench.contestants.reading_weights import num_weights_read
from anyengine.bench.engine import EngineBench, Measurement, as_json, measure, table_lines
from anyengine.bench.line_driven import Contestant, ended_at_last


def test_a_table_has_a_row_for_each_point_and_a_column_for_each_contestant() -> None:
    found = [
        Measurement("anyengine", "float32", 1, 20.04, 6.4, [3.2]),
        Measurement("vllm", "float32", 1, 14.0, 9.1, [4.6]),
        Measurement("anyengine", "float32", 8, 80.0, 12.0, [6.4]),
    ]
    head, first, second = table_lines(found)
    assert head.split()[-2:] == ["anyengine", "vllm"]
    assert first.split() == ["float32,", "1", "sequences", "20.0", "(6.4)", "14.0", "(9.1)"]
    assert second.split() == ["float32,", "8", "sequences", "80.0", "(12.0)"]
    written = json.loads(as_json(EngineBench(model_dir="m"), found))
    assert [row["tokens_per_s"] for row in written["measurements"]] == [20.04, 14.0, 80.0]
    assert written["bench"]["batch_sizes"] == [1, 8, 32]


def test_all_contestants_get_the_same_prompts_and_no_two_begin_alike() -> None:
    prompts = make_prompts(32, 128, seed=7)
    assert prompts == make_prompts(32, 128, seed=7)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 32
    assert {len(prompt) for prompt in prompts} == {128}


def test_the_processor_time_of_a_process_grows_with_its_work() -> None:
    before = tree_cpu_s(os.getpid())
    while tree_cpu_s(os.getpid()) - before < 0.05:
        random.Random(1).random()
    assert tree_cpu_s(1 << 30) == 0.0  # there is no such process


def test_it_measures_our_engine(tmp_path: Path) -> None:
    model_dir = make_tiny_model("llama", tmp_path / "llama", vocab_size=30_000)
    bench = EngineBench(
        model_dir=str(model_dir),
        dtypes=("float32",),
        batch_sizes=(2,),
        input_tokens=8,
        output_tokens=4,
        rounds=2,
        num_threads=1,
        with_transformers=False,
    )
    progress = io.StringIO()
    ours, limit = measure(bench, progress)
    assert (ours.contestant, ours.dtype, ours.num_seqs) == ("anyengine", "float32", 2)
    assert ours.tokens_per_s > 0 and len(ours.wall_s) == 2
    assert (limit.contestant, limit.num_seqs, len(limit.wall_s)) == ("(reading weights)", 2, 2)
    assert "round 2 of 2" in progress.getvalue()


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_that_a_step_reads_are_all_but_a_table_that_is_looked_up(tied: bool, tmp_path: Path) -> None:
    model_dir = make_tiny_model("llama", tmp_path / "llama", vocab_size=1000, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    table = 0 if tied else model.get_input_embeddings().weight.numel()
    assert num_weights_read(model_dir) == sum(weight.numel() for weight in model.parameters()) - table


def test_a_contestant_that_fails_is_named(tmp_path: Path) -> None:
    bench = EngineBench(model_dir=str(tmp_path), dtypes=("float32",), with_transformers=False, with_limit=False)
    with pytest.raises(RuntimeError, match="anyengine ended with 1"):
        measure(bench, io.StringIO())


def test_what_rests_is_ended_with_all_that_it_has_started() -> None:
    program = "sleep 1000 & echo {}; read line; echo '{}'; read line; true"
    process = subprocess.Popen(
        ["sh", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    with ended_at_last(process):
        contestant = Contestant("sleeper", process)
        contestant.rest()
        contestant.go_on()
        assert contestant.ask({}) == {}
        contestant.rest()
    assert process.returncode == 0, "it has come to its end"
    while group_lives(process.pid):
        os.sched_yield()  # until whoever inherits it has seen its end


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
