"""The engine core without a process: stop conditions, admission, pauses and what a runner may do to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyengine._wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Tensor,
    WireRepetitionDetection,
    WireSamplingParams,
)
from anyengine.config import EmbeddedEngine
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.core.stopping import Stop, check_stop
from anyengine.engine.core.validation import check_request
from anyengine.engine.interfaces import SampledToken, ScheduledSequence, SequenceState
from anyengine.testing.toy_runner import ToyOptions, ToyRunner, create_runner, expected_tokens

PROMPT = [3, 1, 4, 1, 5]
REPETITION = Stop(FinishReason.REPETITION, "repetition_detected")


def core(runner: ToyRunner | None = None, **config: Any) -> EngineCore:
    runner = runner or ToyRunner(ToyOptions(), seed=0, max_model_len=64)
    return EngineCore(runner, EmbeddedEngine(**config))


def add(engine: EngineCore, request_id: str, prompt: list[int] | None = None, **sampling: Any) -> None:
    engine.add(EngineCoreRequest(request_id, prompt or PROMPT, sampling_params=WireSamplingParams(**sampling)))


def run(engine: EngineCore) -> list[EngineCoreOutput]:
    """Step until nothing is left to do."""
    outputs: list[EngineCoreOutput] = []
    while engine.has_work():
        outputs += [output for _, output in engine.step()]
    return outputs


def finished(outputs: Sequence[EngineCoreOutput]) -> dict[str, int]:
    return {output.request_id: output.finish_reason for output in outputs if output.finish_reason is not None}


@pytest.mark.parametrize(
    ("output", "sampling", "stop"),
    [
        ([5], {"eos_token_id": 5}, Stop(FinishReason.STOP)),
        ([5], {"eos_token_id": 5, "stop_token_ids": [5], "max_tokens": 1}, Stop(FinishReason.STOP)),
        ([5], {"stop_token_ids": [4, 5], "max_tokens": 1}, Stop(FinishReason.STOP, 5)),
        ([5], {"max_tokens": 1}, Stop(FinishReason.LENGTH)),
        ([5], {"eos_token_id": 5, "min_tokens": 2}, None),
        ([5], {"stop_token_ids": [5], "min_tokens": 2}, None),
        ([5], {"eos_token_id": 5, "min_tokens": 1, "max_tokens": 1}, Stop(FinishReason.STOP)),
        ([1, 2, 3], {"min_tokens": 9}, Stop(FinishReason.LENGTH)),  # max_model_len
        ([1, 2], {}, None),
        ([7, 7], {"repetition_detection": WireRepetitionDetection(1, 1, 2)}, REPETITION),
        ([7, 7], {"repetition_detection": WireRepetitionDetection(1, 0, 2)}, REPETITION),
        (
            [7, 7],
            {"repetition_detection": WireRepetitionDetection(1, 1, 2), "max_tokens": 2},
            Stop(FinishReason.LENGTH),
        ),
        ([7, 7], {"repetition_detection": WireRepetitionDetection(1, 1, 2), "min_tokens": 3}, None),
        ([7, 7], {"repetition_detection": WireRepetitionDetection(1, 1, 3)}, None),
        ([7, 7], {"repetition_detection": WireRepetitionDetection(0, 0, 0)}, None),
        ([7, 8], {"repetition_detection": WireRepetitionDetection(5, 1, 2)}, None),
    ],
)
def test_stop_conditions(output: list[int], sampling: dict[str, Any], stop: Stop | None) -> None:
    seq = SequenceState("a", [0] * 7, WireSamplingParams(**sampling), output_token_ids=output)
    assert check_stop(seq, max_model_len=10) == stop


@pytest.mark.feature("R30")
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    sizes=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    count=st.integers(0, 5),
)
def test_repetitions_are_found_where_the_definition_says(tokens: list[int], sizes: tuple[int, int], count: int) -> None:
    detection = WireRepetitionDetection(*sizes, count)
    sampling = WireSamplingParams(max_tokens=99, repetition_detection=detection)
    seq = SequenceState("a", [0], sampling, output_token_ids=tokens)
    candidates = range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1)
    repeats = count >= 2 and any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count for size in candidates
    )
    assert check_stop(seq, max_model_len=99) == (REPETITION if repeats else None)


def test_generation_ends_at_max_model_len() -> None:
    engine = core()
    add(engine, "a", [1] * 60, max_tokens=50)
    outputs = run(engine)
    assert [token for output in outputs for token in output.new_token_ids] == expected_tokens([1] * 60, 4)
    assert finished(outputs) == {"a": FinishReason.LENGTH}


def test_an_abort_takes_its_unsent_error_along() -> None:
    engine = core()
    add(engine, "bad", [-1])
    engine.abort(["bad"])
    assert run(engine) == []


class PickyRunner(ToyRunner):
    """Does not like some requests, and has no memory for others."""

    def __init__(self) -> None:
        super().__init__(ToyOptions(), seed=0, max_model_len=64)
        self.held: set[str] = set()

    def start(self, seq: SequenceState) -> None:
        super().start(seq)
        self.held.add(seq.request_id)
        if seq.sampling.logit_bias:
            raise ValueError("logit_bias is not supported")
        if seq.sampling.min_tokens:
            raise MemoryError("the cache is full")

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        self.held.discard(request_id)

    def step(self, scheduled: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        assert scheduled
        return super().step(scheduled)


def small(num_kv_blocks: int, **config: Any) -> EngineCore:
    """An engine with a cache of so many blocks of 4 tokens."""
    options = ToyOptions(num_kv_blocks=num_kv_blocks, kv_block_tokens=4)
    return core(ToyRunner(options, seed=0, max_model_len=16), **config)


def tokens_of(outputs: Sequence[EngineCoreOutput], request_id: str) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.new_token_ids]


def test_requests_that_the_cache_has_no_room_for_wait_their_turn() -> None:
    engine = small(4)
    for name in ("a", "b", "c", "d"):
        add(engine, name, max_tokens=3)
    outputs = run(engine)
    assert list(finished(outputs)) == ["a", "b", "c", "d"]
    for name in "abcd":
        assert tokens_of(outputs, name) == expected_tokens(PROMPT, 3)


def test_a_full_cache_preempts_the_last_and_nobody_notices() -> None:
    engine = small(4)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6]}  # 12 tokens each at the end: 3 blocks, of which there are 4
    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=9)
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert tokens_of(outputs, name) == expected_tokens(prompt, 9)
    assert engine.utility("get_engine_statistics", [])["num_preemptions"] >= 1
    events = [[event.type for event in output.events or ()] for output in outputs if output.request_id == "b"]
    assert events[0] == [1, 2]  # queued, scheduled
    assert [3] in events[1:]
    assert engine.scheduler_stats().kv_cache_usage == 0.0


def test_a_pause_that_waits_waits_for_the_preempted_too() -> None:
    engine = small(4)
    add(engine, "a", [1, 2, 3], max_tokens=9)
    add(engine, "b", [4, 5, 6], max_tokens=9)
    while engine.scheduler_stats().num_running_reqs != 1:
        engine.step()
    paused = engine.utility("pause_scheduler", ["wait"])
    add(engine, "new", [7], max_tokens=1)
    assert finished(run(engine)) == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert paused.done()


@pytest.mark.feature("R37")
def test_a_beginning_is_computed_once_for_all_who_have_the_same_salt() -> None:
    engine = core()
    prompt = list(range(40))  # two full blocks of 16, and more

    def ask(name: str, salt: str | None = None, **sampling: Any) -> tuple[int, int]:
        sampling_params = WireSamplingParams(max_tokens=2, **sampling)
        engine.add(EngineCoreRequest(name, prompt, sampling_params=sampling_params, cache_salt=salt))
        outputs = run(engine)
        assert tokens_of(outputs, name) == expected_tokens(prompt, 2)
        stats = outputs[0].prefill_stats
        assert stats is not None and stats.num_prompt_tokens == 40
        return stats.num_computed_tokens, stats.num_cached_tokens

    assert ask("first") == (40, 0)
    assert ask("second") == (8, 32)
    assert ask("salted", "pepper") == (40, 0)
    assert ask("salted again", "pepper") == (8, 32)
    assert ask("all of it", skip_reading_prefix_cache=True) == (40, 0)
    stats = engine.scheduler_stats().prefix_cache_stats
    assert stats is not None and (stats.requests, stats.queries, stats.hits) == (5, 200, 64)
    assert engine.utility("reset_prefix_cache", []) is True
    assert ask("after the reset") == (40, 0)


def test_a_prefix_cache_is_not_reset_under_running_requests_unless_they_are_to_start_again() -> None:
    engine = core()
    add(engine, "a", list(range(20)), max_tokens=6)
    outputs = [output for _, output in engine.step()]
    assert engine.utility("reset_prefix_cache", []) is False
    assert engine.utility("reset_prefix_cache", [True]) is True
    assert engine.scheduler_stats().kv_cache_usage == 0.0
    outputs += run(engine)
    assert tokens_of(outputs, "a") == expected_tokens(list(range(20)), 6)


def test_a_pause_that_clears_the_cache_has_frozen_requests_computed_again() -> None:
    """As vLLM: ``clear_cache`` is on by default, and takes the blocks of those that are kept."""
    engine = core()
    prompt = list(range(20))
    add(engine, "a", prompt, max_tokens=6)
    outputs = [output for _, output in engine.step()]
    engine.utility("pause_scheduler", ["keep"])
    assert engine.scheduler_stats().kv_cache_usage == 0.0
    assert not engine.has_work()
    engine.utility("resume_scheduler", [])
    outputs += run(engine)
    assert tokens_of(outputs, "a") == expected_tokens(prompt, 6)
    engine.utility("pause_scheduler", ["wait"])
    assert run(engine) == []
    engine.utility("resume_scheduler", [])
    add(engine, "b", prompt, max_tokens=1)
    (output,) = run(engine)
    assert output.prefill_stats is not None and output.prefill_stats.num_cached_tokens == 0


def test_without_a_prefix_cache_everything_is_computed() -> None:
    engine = core(enable_prefix_caching=False)
    for name in "ab":
        add(engine, name, list(range(40)), max_tokens=1)
        (output,) = run(engine)
        assert output.prefill_stats is not None and output.prefill_stats.num_computed_tokens == 40


def test_a_request_that_there_is_no_memory_for_fails_alone() -> None:
    runner = PickyRunner()
    engine = core(runner)
    add(engine, "a", min_tokens=1)
    (output,) = run(engine)
    assert output.error is not None
    assert (output.error.code, output.error.message) == ("out_of_memory", "the cache is full")
    assert not engine.has_work()
    assert not runner.held


def test_what_the_runner_refuses_fails_alone() -> None:
    engine = core(PickyRunner())
    add(engine, "odd", logit_bias={1: 1.0})
    add(engine, "a", max_tokens=2)
    outputs = run(engine)
    assert finished(outputs) == {"odd": FinishReason.ERROR, "a": FinishReason.LENGTH}
    assert outputs[0].error is not None
    assert outputs[0].error.message == "logit_bias is not supported"


def test_max_num_seqs_bounds_the_batch() -> None:
    engine = core(max_num_seqs=2)
    for number in range(7):
        add(engine, f"r{number}", max_tokens=4)
    engine.step()
    assert engine.scheduler_stats().num_running_reqs == 2
    assert engine.scheduler_stats().num_waiting_reqs == 5
    assert len(finished(run(engine))) == 7


def test_resuming_fails_a_pause_that_still_waits() -> None:
    engine = core()
    add(engine, "a", max_tokens=20)
    engine.step()
    paused = engine.utility("pause_scheduler", ["wait"])
    engine.step()
    assert not paused.done()
    engine.utility("resume_scheduler", [])
    with pytest.raises(RuntimeError, match="resumed before the engine was idle"):
        paused.result(timeout=0)
    assert finished(run(engine)) == {"a": FinishReason.LENGTH}


def test_aborting_the_last_running_request_completes_a_pause() -> None:
    engine = core()
    add(engine, "a")
    engine.step()
    paused = engine.utility("pause_scheduler", ["wait"])
    engine.abort(["a"])
    assert run(engine) == []
    assert paused.done()


@pytest.mark.feature("R40")
def test_priority_decides_who_joins_first() -> None:
    engine = core(max_num_seqs=1)
    for name, priority in (("later", 1), ("normal", 0), ("urgent", -1)):
        sampling = WireSamplingParams(max_tokens=1)
        engine.add(EngineCoreRequest(name, PROMPT, sampling_params=sampling, priority=priority))
    assert list(finished(run(engine))) == ["urgent", "normal", "later"]


def test_trace_headers_are_echoed() -> None:
    engine = core()
    sampling = WireSamplingParams(max_tokens=2)
    engine.add(EngineCoreRequest("a", PROMPT, sampling_params=sampling, trace_headers={"traceparent": "00-1"}))
    assert [output.trace_headers for output in run(engine)] == [{"traceparent": "00-1"}] * 2


def test_the_toy_honours_its_settings() -> None:
    assert expected_tokens([1, 2, 3], 4) == expected_tokens([1, 2, 3], 2) + expected_tokens(
        [1, 2, 3, *expected_tokens([1, 2, 3], 2)], 2
    )
    assert expected_tokens([1], 8, seed=1) != expected_tokens([1], 8, seed=2)
    assert max(expected_tokens([1], 200, vocab_size=7)) < 7
    config = EmbeddedEngine(seed=3, max_model_len=10, runner_options={"vocab_size": 50, "eos_token_id": 2})
    runner = create_runner(config, lambda status: None)
    assert (runner.vocab_size, runner.max_model_len, runner.eos_token_ids) == (50, 10, (2,))
    engine = EngineCore(runner, config)
    add(engine, "a", [1], max_tokens=6)
    tokens = [token for output in run(engine) for token in output.new_token_ids]
    assert tokens == expected_tokens([1], 6, seed=3, vocab_size=50)


def test_an_aborted_id_can_be_used_again_at_once() -> None:
    """On an idle vLLM engine core the late ABORT swallows the ADD behind it."""
    engine = core()
    for held in (False, True):
        if held:
            add(engine, "a", max_tokens=9)
            engine.step()
        engine.abort(["a"])
        add(engine, "a", max_tokens=2)
        assert finished(run(engine)) == {"a": FinishReason.LENGTH}


@pytest.mark.parametrize(("k", "most"), [(-1, 262143), (2**40, 262143)])
def test_prompt_logprobs_that_would_fill_the_memory_are_refused(k: int, most: int) -> None:
    options = ToyOptions(vocab_size=2**20, max_model_len=1000)
    engine = core(ToyRunner(options, seed=0, max_model_len=1000))
    add(engine, "a", [1] * 128, prompt_logprobs=k)
    (output,) = run(engine)
    assert output.error is not None
    assert output.error.message == f"prompt_logprobs={k} is too much for a prompt of 128 tokens: at most {most}"


def int32(*rows: list[int]) -> Tensor:
    return Tensor.from_array(np.array(rows, dtype=np.int32))


@pytest.mark.feature("R14")
@pytest.mark.parametrize(
    ("start", "ids", "words"),
    [
        (1, None, "prompt_logprob_start=1 has nothing to start"),
        (None, int32([1], [2]), "has 2 rows, and must have 3"),
        (1, int32([1], [2], [3]), "has 3 rows, and must have 2"),
        (-1, int32([1], [2], [3], [4]), "from prompt_logprob_start=-1 on"),
        (10**12, int32([1]), f"must have {3 - 10**12}"),
        (None, int32([1], [-2], [3]), "contains -2, which is outside the vocabulary of 1000 tokens"),
        (None, int32([1], [1000], [3]), "contains 1000"),
        (None, int32([], [], []), "must be int32"),
        (None, Tensor.from_array(np.zeros(3, dtype=np.int32)), "of shape (3,)"),
        (None, Tensor.from_array(np.zeros((3, 1), dtype=np.float32)), "is <f4"),
        (None, Tensor("no such type", (3, 1), b"abc"), "is no such type"),
    ],
)
def test_a_matrix_of_prompt_token_ids_that_does_not_fit_is_refused(
    start: int | None, ids: Tensor | None, words: str
) -> None:
    sampling = WireSamplingParams(max_tokens=1, prompt_logprob_start=start, prompt_logprob_token_ids=ids)
    request = EngineCoreRequest("a", [1, 2, 3, 4], sampling_params=sampling)
    refusal = check_request(request, vocab_size=1000, max_model_len=100)
    assert isinstance(refusal, str) and words in refusal


def test_the_clients_of_a_request_that_left_are_told_apart() -> None:
    engine = core()
    for client, name in enumerate("abc"):
        request = EngineCoreRequest(name, PROMPT, sampling_params=WireSamplingParams(max_tokens=1 + 5 * client))
        request.client_index = client
        engine.add(request)
    engine.step()
    assert engine.take_finished() == {0: {"a"}}
    engine.abort_client(2)
    assert engine.take_finished() == {2: {"c"}}
    assert finished(run(engine)) == {"b": FinishReason.LENGTH}
    assert engine.take_finished() == {1: {"b"}}
    assert engine.take_finished() == {}


def test_after_a_reset_nothing_is_left_of_the_last_front_end() -> None:
    engine = core()
    add(engine, "a", max_tokens=9)
    engine.step()
    add(engine, "bad", [-1])
    engine.utility("pause_generation", ["keep"])
    engine.utility("set_weight_version", ["v2"])
    engine.reset()
    assert not engine.has_work()
    assert engine.take_finished() == {}
    assert engine.weight_version == "v2"  # the weights have not changed
    add(engine, "a", max_tokens=2)
    assert finished(run(engine)) == {"a": FinishReason.LENGTH}
