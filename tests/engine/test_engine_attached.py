"""Our engine core, started by hand, behind a front end that did not start it: what AsyncLLM (0.32) and vllm-rs (0.33)
expect of a remote engine, and how such an engine ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from foreign_frontend import (
    ABORT,
    DEAD,
    DEADLINE_S,
    ERROR,
    LENGTH,
    ForeignFrontend,
    pack,
    receive,
    request,
    tokens,
    unpack,
)

from anyengine.testing.toy_runner import expected_tokens

PROMPT = [3, 1, 4, 1, 5]
NO_GRACE = ("--reconnect-grace", "0")

SLOW_TOY = """
from anyengine.testing.toy_runner import ToyOptions, ToyRunner
def create_runner(config, report):
    return ToyRunner(ToyOptions(step_delay_s=0.005), seed=config.seed, max_model_len=100_000)
def broken(config, report):
    return ToyRunner(ToyOptions(fail_at_step=3), seed=config.seed, max_model_len=99)
"""


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[ForeignFrontend]:
    with ForeignFrontend(tmp_path, tcp=True) as frontend:
        yield frontend


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Options for a model that takes its time."""
    (tmp_path / "slow_toy.py").write_text(SLOW_TOY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    return "--runner", "slow_toy:create_runner"


@contextmanager
def second_front_end(first: ForeignFrontend, directory: Path) -> Iterator[ForeignFrontend]:
    """Another front end at the handshake address of the first, which has closed it."""
    directory.mkdir()
    with ForeignFrontend(directory, tcp=True) as second:
        second.handshake.close(linger=0)
        second.handshake = second.bind_at(first.handshake_address)
        yield second


@pytest.mark.feature("D02")
def test_it_says_what_a_remote_engine_must_say(frontend: ForeignFrontend) -> None:
    frontend.launch_by_hand("--max-num-seqs", "7", "--max-model-len", "99")
    hello, registration, ready = frontend.shake_hands()
    assert hello == {"status": "HELLO", "local": False, "headless": True}
    assert ready == {"status": "READY", "local": False, "headless": True}
    assert (registration["max_num_seqs"], registration["max_model_len"]) == (7, 99)
    assert frontend.generate("a", PROMPT, max_tokens=6) == expected_tokens(PROMPT, 6)


def test_load_balancing_outside_wants_no_headless_engine(frontend: ForeignFrontend) -> None:
    frontend.launch_by_hand("--no-headless")
    assert frontend.shake_hands()[0] == {"status": "HELLO", "local": False, "headless": False}


def test_the_rank_is_the_identity(frontend: ForeignFrontend) -> None:
    frontend.launch_by_hand("--rank", "258")
    identity, _hello = receive(frontend.handshake)
    assert identity == b"\x02\x01"


def test_what_vllms_decoders_insist_on(frontend: ForeignFrontend) -> None:
    """Both are typed: a nil in a place that is not optional to them ends the front end, and so does a field that is
    missing."""
    frontend.launch_by_hand()
    _hello, registration, _ready = frontend.shake_hands()
    types = {
        "max_model_len": int, "num_gpu_blocks": int, "block_size": int, "dtype": str, "vllm_version": str,
        "world_size": int, "data_parallel_size": int, "tensor_parallel_size": int, "pipeline_parallel_size": int,
        "decode_context_parallel_size": int, "data_parallel_rank": int, "max_num_seqs": int,
        "max_num_batched_tokens": int, "instance_id": str, "supports_lora": bool, "max_loras": int,
        "enable_sleep_mode": bool, "supports_draft_weight_updates": bool,
    }  # fmt: skip
    assert {name: type(registration[name]) for name in types} == types
    frontend.add("a", PROMPT, max_tokens=1)
    message = frontend.receive()
    assert message[8] == "default"  # weight version
    (output,) = message[1]
    queued, scheduled = output[7]
    assert (queued["type"], scheduled["type"]) == (1, 2)
    assert 0 < queued["timestamp"] <= scheduled["timestamp"] <= message[3]
    nested = message[2]["prefix_cache_stats"]
    assert set(nested) >= {"reset", "requests", "queries", "hits", "preempted_requests"}
    assert message[2]["kv_cache_usage"] == 0.0


# As (method, arguments): result. What AsyncLLM 0.32 and vllm-rs 0.33 call at start-up, from their routes, and by timer.
CALLS: list[tuple[str, list[Any], Any]] = [
    ("get_supported_tasks", [], ["generate"]),
    ("is_sleeping", [], False),
    ("is_scheduler_paused", [], False),
    ("reset_mm_cache", [], None),
    ("reset_encoder_cache", [], None),
    ("reset_prefix_cache", [False, False], True),
    ("list_loras", [], []),
    ("execute_dummy_batch", [], None),
    ("collective_rpc", ["check_health", None, [], None], [None]),
    ("get_weight_version", [], "default"),
    ("set_weight_version", ["v2"], None),
    ("get_weight_version", [], "v2"),
    ("pause_scheduler", ["keep", True], None),
    ("is_scheduler_paused", [], True),
    ("resume_scheduler", [], None),
    ("sleep", [1, "abort"], None),
    ("is_sleeping", [], True),
    ("wake_up", [None], True),
    ("is_sleeping", [], False),
    ("sleep", [0, "wait"], None),
    ("wake_up", [["scheduling"]], True),
]
REFUSED: list[tuple[str, list[Any], str]] = [
    ("add_lora", [["l", 1, "/l"]], "no LoRA adapters"),
    ("remove_lora", [1], "no LoRA adapters"),
    ("pin_lora", [1], "no LoRA adapters"),
    ("profile", [True, None, None, None], "no profiler"),
    ("profile", [False, None, None, None, {}], "no profiler"),
    ("sleep", [3, "abort"], "level=3"),
    ("collective_rpc", ["get_kv_cache_spec", None, [], {}], "no worker method 'get_kv_cache_spec'"),
    ("handle_fault_tolerance", [{"instruction": "retry"}], "not a utility"),
    ("shutdown", [], "not a utility"),
]


@pytest.mark.feature("D02")
def test_every_call_of_both_front_ends_is_answered(frontend: ForeignFrontend) -> None:
    frontend.launch_by_hand()
    frontend.shake_hands()
    for method, args, expected in CALLS:
        failure, result, _ = frontend.call(method, *args)
        assert (method, failure, result) == (method, None, expected)
    for method, args, reason in REFUSED:
        failure, _, _ = frontend.call(method, *args)
        assert failure is not None
        assert failure.startswith(f"Call to {method} method failed: ")
        assert reason in failure
    assert frontend.generate("a", PROMPT, max_tokens=3) == expected_tokens(PROMPT, 3)


# As vllm-rs 0.33 and AsyncLLM 0.32 write them: everything spelled out, or only what is off its default.
RUST_PARAMS = {
    "temperature": 0.0, "watermarking": True, "top_p": 1.0, "top_k": 0, "seed": None, "max_tokens": 4, "min_tokens": 0,
    "thinking_token_budget": None, "logprobs": None, "prompt_logprobs": None, "min_p": 0.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "repetition_penalty": 1.0, "repetition_detection": None, "stop_token_ids": [],
    "_eos_token_id": None, "_all_stop_token_ids": [], "logit_bias": None, "allowed_token_ids": None,
    "_bad_words_token_ids": None, "structured_outputs": None, "logprob_token_ids": None, "stream_interval": 1,
    "skip_reading_prefix_cache": False, "extra_args": None, "routed_experts_prompt_start": 0, "some_day": {"a": 1},
}  # fmt: skip
PYTHON_PARAMS = {
    "temperature": 0.0, "stop": [], "stop_token_ids": [], "bad_words": [], "max_tokens": 4, "output_kind": 1,
    "skip_clone": True, "_all_stop_token_ids": [9], "skip_reading_prefix_cache": False,
}  # fmt: skip


@pytest.mark.parametrize("params", [RUST_PARAMS, PYTHON_PARAMS], ids=["vllm-rs", "AsyncLLM"])
def test_requests_as_they_write_them(frontend: ForeignFrontend, params: dict[str, Any]) -> None:
    frontend.launch_by_hand()
    frontend.shake_hands()
    add = request("cmpl-1-ab", PROMPT)
    add[3] = params
    add += [0, -3, {"traceparent": "00-1"}, False, "cmpl-1", None, None, False, None, None]  # positions 12 to 21
    frontend.send(b"\x00", pack(add))
    outputs = frontend.collect("cmpl-1-ab")["cmpl-1-ab"]
    assert tokens(outputs) == expected_tokens(PROMPT, 4)
    assert outputs[0][10] == {"traceparent": "00-1"}


def test_two_clients_and_the_one_that_leaves(tmp_path: Path, slow: tuple[str, str]) -> None:
    """Its requests end with it; the other goes on."""
    with ForeignFrontend(tmp_path, tcp=True, num_clients=2) as frontend:
        process = frontend.launch_by_hand(*NO_GRACE, *slow)
        frontend.shake_hands()
        frontend.add("mine", PROMPT, client=0, max_tokens=50_000)
        frontend.add("theirs", PROMPT, client=1, max_tokens=50_000)
        frontend.receive(client=0)
        frontend.receive(client=1)
        frontend.inputs[1].close(linger=0)
        frontend.outputs[1].close(linger=0)
        while frontend.statistics()["num_running_requests"] == 2:
            frontend.receive(client=0)
        frontend.abort("mine")
        assert frontend.generate("next", PROMPT, max_tokens=3) == expected_tokens(PROMPT, 3)
        frontend.inputs[0].close(linger=0)
        assert process.wait(DEADLINE_S) == 0
        assert "front end 1 has gone" in frontend.stderr


def test_an_abort_that_leaves_nothing_is_told_as_load(frontend: ForeignFrontend, slow: tuple[str, str]) -> None:
    """Or a front end that shows the load would show a running request until the next one."""
    frontend.launch_by_hand(*slow)
    frontend.shake_hands()
    frontend.add("a", PROMPT, max_tokens=50_000)
    assert frontend.receive()[2]["num_running_reqs"] == 1
    frontend.abort("a")
    *_, last = frontend.receive_until(lambda message: message[1] == [])
    assert last[2]["num_running_reqs"] == 0


def test_where_ranks_are_coordinated_it_tells_who_has_left(frontend: ForeignFrontend, slow: tuple[str, str]) -> None:
    """vLLM's balancing client counts what each rank has by these; it would count ever more."""
    frontend.addresses["coordinator_input"] = frontend.addresses["coordinator_output"] = "ipc:///nowhere"
    frontend.launch_by_hand(*slow)
    frontend.shake_hands()
    frontend.add("finished", PROMPT, max_tokens=2)
    *_, last = frontend.receive_until(lambda message: bool(message[5]))
    assert (last[5], last[1][0][5]) == (["finished"], LENGTH)
    frontend.add("bad", [])
    *_, last = frontend.receive_until(lambda message: bool(message[5]))
    assert (last[5], last[1][0][5]) == (["bad"], ERROR)
    frontend.add("aborted", PROMPT, max_tokens=50_000)
    frontend.receive_until(lambda message: bool(message[1]))
    frontend.abort("aborted")
    *_, last = frontend.receive_until(lambda message: bool(message[5]))
    assert (last[5], last[1]) == (["aborted"], [])


@pytest.mark.feature("D02")
def test_it_ends_when_its_front_end_has_gone(frontend: ForeignFrontend, slow: tuple[str, str]) -> None:
    process = frontend.launch_by_hand(*NO_GRACE, *slow)
    frontend.shake_hands()
    frontend.add("a", PROMPT, max_tokens=50_000)
    frontend.receive()
    frontend.inputs[0].close(linger=0)
    frontend.outputs[0].close(linger=0)
    assert process.wait(DEADLINE_S) == 0


def test_a_connection_that_breaks_and_comes_back_is_no_end(frontend: ForeignFrontend, slow: tuple[str, str]) -> None:
    process = frontend.launch_by_hand("--reconnect-grace", "60", *slow)
    frontend.shake_hands()
    address = frontend.addresses["inputs"][0]
    frontend.inputs[0].close(linger=0)
    frontend.inputs[0] = frontend.bind_at(address)
    frontend.send_when_reachable(b"\x00", pack(request("a", PROMPT, max_tokens=3)))
    assert tokens(frontend.collect("a")["a"]) == expected_tokens(PROMPT, 3)
    assert process.poll() is None


@pytest.mark.feature("F15")
def test_with_stay_it_keeps_the_model_for_the_next_front_end(
    frontend: ForeignFrontend, tmp_path: Path, slow: tuple[str, str]
) -> None:
    process = frontend.launch_by_hand(*NO_GRACE, "--stay", *slow)
    frontend.shake_hands()
    assert frontend.call("pause_scheduler", "keep")[0] is None
    frontend.add("a", PROMPT, max_tokens=50_000)
    frontend.close_sockets()
    with second_front_end(frontend, tmp_path / "second") as second:
        second.process = frontend.process
        hello, registration, _ready = second.shake_hands()
        assert hello == {"status": "HELLO", "local": False, "headless": True}
        assert registration["max_model_len"] == 100_000
        counts = second.statistics()
        assert (counts["num_running_requests"], counts["num_waiting_requests"], counts["adds_received"]) == (0, 0, 1)
        assert second.generate("a", PROMPT, max_tokens=3) == expected_tokens(PROMPT, 3)  # neither paused nor in use
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


def test_a_front_end_that_leaves_before_it_answered_is_replaced(frontend: ForeignFrontend, tmp_path: Path) -> None:
    frontend.launch_by_hand()
    receive(frontend.handshake)  # HELLO, which nobody will ever answer
    frontend.close_sockets()
    with second_front_end(frontend, tmp_path / "second") as second:
        second.process = frontend.process
        second.shake_hands()
        assert second.generate("a", PROMPT, max_tokens=3) == expected_tokens(PROMPT, 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_the_front_end_is_told(
    frontend: ForeignFrontend, slow: tuple[str, str], number: int
) -> None:
    """Nobody watches the process for the front end; without the sentinel it would wait for ever."""
    process = frontend.launch_by_hand(*slow)
    frontend.shake_hands()
    frontend.add("a", PROMPT, max_tokens=50_000)
    frontend.receive()
    process.send_signal(number)
    *messages, last = frontend.receive_until(lambda message: message is DEAD)
    assert last is DEAD
    assert [output[5] for message in messages for output in message[1]][-1] == ABORT
    assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_it_waits_for_a_front_end(frontend: ForeignFrontend, number: int) -> None:
    process = frontend.launch_by_hand()
    receive(frontend.handshake)
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == 0


def test_a_failing_step_is_the_end_for_everybody(frontend: ForeignFrontend, slow: tuple[str, str]) -> None:
    process = frontend.launch_by_hand("--runner", "slow_toy:broken")
    frontend.shake_hands()
    frontend.add("a", PROMPT, max_tokens=9)
    *_, last = frontend.receive_until(lambda message: message is DEAD)
    assert last is DEAD
    assert process.wait(DEADLINE_S) == 1
    assert "error: unexpected RuntimeError: the toy fails at step 3, as told" in frontend.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--handshake", "localhost:29550"], "must be tcp://HOST:PORT or ipc://PATH"),
        (["--handshake", "tcp://localhost:0"], "must be tcp://HOST:PORT"),
        (["--rank", "-1"], "rank=-1 must be from 0"),
        (["--reconnect-grace", "nan"], "must be a number of seconds"),
        (["--max-num-seqs", "0"], "max_num_seqs=0 must be at least 1"),
    ],
)
def test_bad_options_are_refused_before_anything_is_started(
    frontend: ForeignFrontend, options: list[str], message: str
) -> None:
    process = frontend.launch_by_hand(*options)
    assert process.wait(DEADLINE_S) == 2
    assert message in frontend.stderr
    assert "Traceback" not in frontend.stderr
    assert not frontend.handshake.poll(0)


def test_refusals_are_one_requests_error(frontend: ForeignFrontend) -> None:
    frontend.launch_by_hand()
    frontend.shake_hands()
    for name, change in {
        "structured_outputs": {3: {"structured_outputs": {"regex": "a"}}},
        "pooling_params": {3: None, 4: [None, None, None, None, "embed"]},
        "lora_request": {6: ["l", 1, "/nowhere"]},
        "mm_features": {2: [{"modality": "image"}]},
    }.items():
        add = request(name, PROMPT)
        for position, value in change.items():
            add[position] = value
        frontend.send(b"\x00", pack(add))
        (output,) = frontend.collect(name)[name]
        assert output[5] == ERROR
        assert unpack(pack(output[18]))["retryable"] is False
    assert frontend.generate("a", PROMPT, max_tokens=3) == expected_tokens(PROMPT, 3)
