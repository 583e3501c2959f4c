"""A real engine process behind real sockets, driven by a front end that shares no code with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign_frontend import ABORT, ERROR, IDENTITY, LENGTH, STOP, ForeignFrontend, pack, request, tokens

from anyengine.testing.toy_runner import expected_tokens

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[ForeignFrontend]:
    with ForeignFrontend(tmp_path) as frontend:
        yield frontend


def still_serves(frontend: ForeignFrontend, why: str) -> None:
    assert frontend.generate(f"after {why}", PROMPT, max_tokens=3) == expected_tokens(PROMPT, 3), why


def test_handshake_order_and_registration(frontend: ForeignFrontend) -> None:
    frontend.launch({"max_num_seqs": 7, "max_model_len": 99})
    assert not frontend.inputs[0].poll(0)  # nothing before the addresses are known
    hello, registration, ready = frontend.shake_hands()
    assert hello == {"status": "HELLO", "local": True, "headless": False}
    assert ready == {"status": "READY", "local": True, "headless": False}
    assert (registration["max_model_len"], registration["max_num_seqs"]) == (99, 7)
    assert (registration["vllm_version"], registration["data_parallel_rank"]) == ("0.33.0", 0)


def test_generate(frontend: ForeignFrontend) -> None:
    frontend.start()
    frontend.add("a", PROMPT, max_tokens=6)
    outputs = frontend.collect("a")["a"]
    assert tokens(outputs) == expected_tokens(PROMPT, 6)
    assert [len(output) for output in outputs] == [19] * 6
    assert [output[5] for output in outputs] == [None] * 5 + [LENGTH]
    assert [output[11] and output[11]["num_prompt_tokens"] for output in outputs] == [5] + [None] * 5
    stats = frontend.receive()  # the numbers of an idle engine
    assert (stats[1], stats[2]["num_running_reqs"], stats[2]["step_counter"]) == ([], 0, 6)


def test_stop_token_is_part_of_the_output(frontend: ForeignFrontend) -> None:
    frontend.start()
    third = expected_tokens(PROMPT, 3)[2]
    frontend.add("a", PROMPT, max_tokens=9, stop_token_ids=[third])
    *_, last = frontend.collect("a")["a"]
    assert last[1] == [third]
    assert last[5:7] == [STOP, third]


def test_abort_is_silent_and_a_utility_reply_is_a_fence_behind_it(frontend: ForeignFrontend) -> None:
    frontend.start(step_delay_s=0.002)
    frontend.add("a", PROMPT, max_tokens=2000)
    frontend.receive()
    frontend.abort("a", "unknown")
    failure, result, _ = frontend.call("get_engine_statistics")
    assert failure is None
    assert (result["aborts_received"], result["unknown_aborts"], result["num_running_requests"]) == (2, 1, 0)
    frontend.add("b", PROMPT, max_tokens=5)
    assert set(frontend.collect("b")) == {"b"}


def test_a_request_that_joins_neither_recomputes_nor_adds_steps(frontend: ForeignFrontend) -> None:
    frontend.start(step_delay_s=0.005)
    frontend.add("long", PROMPT, max_tokens=100)
    for _ in range(3):
        frontend.receive()
    frontend.add("short", [7] * 20, max_tokens=10)
    outputs = frontend.collect("long", "short")
    assert tokens(outputs["short"]) == expected_tokens([7] * 20, 10)
    assert len(tokens(outputs["long"])) == 97
    counts = frontend.statistics()
    assert counts["num_steps"] == 100
    assert counts["num_prefill_tokens_computed"] == 25
    assert counts["num_decode_tokens_computed"] == 99 + 9


def test_tokens_do_not_depend_on_batch_mates(frontend: ForeignFrontend) -> None:
    frontend.start({"max_num_seqs": 3, "max_num_batched_tokens": 16})
    prompts = {f"r{n}": [n + 1] * (1 + 7 * n % 30) for n in range(12)}
    for request_id, prompt in prompts.items():
        frontend.add(request_id, prompt, max_tokens=8)
    outputs = frontend.collect(*prompts)
    for request_id, prompt in prompts.items():
        assert tokens(outputs[request_id]) == expected_tokens(prompt, 8)


def test_utilities(frontend: ForeignFrontend) -> None:
    frontend.start()
    assert frontend.call("get_supported_tasks")[:2] == (None, ["generate"])
    assert frontend.call("is_sleeping")[:2] == (None, False)
    assert frontend.call("reset_prefix_cache", False)[:2] == (None, True)
    failures: dict[tuple[str, *tuple[Any, ...]], str] = {
        ("no_such_method",): "Call to no_such_method method failed: ",
        ("close",): "Call to close method failed: ",  # an attribute of the engine, but no utility
        ("__init__",): "Call to __init__ method failed: ",
        ("is_sleeping", 1): "Call to is_sleeping method failed: too many positional arguments",
        ("reset_prefix_cache", "yes"): "Call to reset_prefix_cache method failed: reset_running_requests='yes'",
        ("pause_scheduler", "nap"): "Call to pause_scheduler method failed: mode='nap'",
    }
    for (method, *args), text in failures.items():
        failure, result, _ = frontend.call(method, *args)
        assert failure is not None
        assert failure.startswith(text)
        assert result is None
    assert frontend.call("is_scheduler_paused")[:2] == (None, False)


def test_pause_abort_answers_behind_the_abort_outputs_and_holds_new_requests(frontend: ForeignFrontend) -> None:
    frontend.start(step_delay_s=0.002)
    frontend.add("a", PROMPT, max_tokens=2000)
    frontend.receive()
    failure, _, before = frontend.call("pause_scheduler", "abort")
    assert failure is None
    assert [output[5] for output in before if output[0] == "a"][-1] == ABORT
    frontend.add("b", PROMPT, max_tokens=4)
    assert frontend.call("is_sleeping") == (None, True, [])
    frontend.call_nowait("resume_scheduler")
    assert tokens(frontend.collect("b")["b"]) == expected_tokens(PROMPT, 4)


def test_pause_wait_answers_when_the_running_requests_have_finished(frontend: ForeignFrontend) -> None:
    frontend.start(step_delay_s=0.002)
    frontend.add("a", PROMPT, max_tokens=30)
    first = frontend.receive()[1]
    failure, _, before = frontend.call("pause_scheduler", "wait")
    assert failure is None
    assert tokens([*first, *before]) == expected_tokens(PROMPT, 30)


def test_pause_keep_freezes_and_resume_goes_on(frontend: ForeignFrontend) -> None:
    frontend.start(step_delay_s=0.002)
    frontend.add("a", PROMPT, max_tokens=50)
    first = frontend.receive()[1]
    _, _, before = frontend.call("pause_scheduler", "keep", False)
    assert frontend.call("is_scheduler_paused") == (None, True, [])
    assert frontend.statistics()["num_running_requests"] == 1
    frontend.call_nowait("resume_scheduler")
    assert tokens([*first, *before, *frontend.collect("a")["a"]]) == expected_tokens(PROMPT, 50)


def test_pause_generation_refuses_new_requests_as_retryable(frontend: ForeignFrontend) -> None:
    frontend.start()
    assert frontend.call("pause_generation")[:2] == (None, None)
    frontend.add("a", PROMPT)
    (output,) = frontend.collect("a")["a"]
    assert output[5] == ERROR
    assert output[18]["code"] == "engine_paused"
    assert output[18]["retryable"] is True
    assert frontend.call("resume_scheduler")[0] is None
    still_serves(frontend, "a pause")


def test_two_clients_get_their_own_outputs_and_replies(tmp_path: Path) -> None:
    with ForeignFrontend(tmp_path, num_clients=2) as frontend:
        frontend.start()
        frontend.add("a", PROMPT, client=0, max_tokens=5)
        frontend.add("b", [9, 9], client=1, max_tokens=5)
        assert tokens(frontend.collect("b", client=1)["b"]) == expected_tokens([9, 9], 5)
        assert tokens(frontend.collect("a", client=0)["a"]) == expected_tokens(PROMPT, 5)
        frontend.send(b"\x00", pack(request("crossed", PROMPT, client=1)), client=0)
        assert set(frontend.collect("crossed", client=1)) == {"crossed"}
        failure, result, _before = frontend.call("is_sleeping", client=1)
        assert (failure, result) == (None, False)


# Everything below kills an engine of vLLM's, or silences it. Ours answers whom it can, counts the rest, and serves on.


def test_messages_that_nobody_can_be_told_about_are_counted_and_dropped(frontend: ForeignFrontend) -> None:
    frontend.start()
    messages: dict[str, list[bytes]] = {
        "unknown type": [b"\x09", pack([])],
        "empty type": [b"", pack([])],
        "READY as type": [b"READY", pack([])],
        "EXECUTOR_FAILED": [b"\x04", pack([])],
        "WAKEUP": [b"\x05", pack([])],
        "START_DP_WAVE": [b"\x02", pack([1, 0])],
        **{f"type {kind} without payload": [bytes([kind])] for kind in range(6)},
        "ADD: not msgpack": [b"\x00", b"\xc1"],
        "ADD: a map": [b"\x00", pack({"request_id": "a"})],
        "ADD: nested too deeply": [b"\x00", b"\x91" * 100_000],
        "ADD: text that is not UTF-8": [b"\x00", b"\x91\xa2\xff\xff"],
        "ADD: int as request id": [b"\x00", pack([17, *request("a", PROMPT)[1:]])],
        "ADD: client index too large": [b"\x00", pack(request("a", PROMPT, client=1))],
        "ADD: client index -1": [b"\x00", pack(request("a", PROMPT, client=-1))],
        "UTILITY: client index too large": [b"\x03", pack([1, 5, "is_sleeping", []])],
        "UTILITY: client index -1": [b"\x03", pack([-1, 5, "is_sleeping", []])],
        "UTILITY: not an array": [b"\x03", pack("is_sleeping")],
        "ABORT: an int": [b"\x01", pack(5)],
        "ABORT: nil": [b"\x01", pack(None)],
        "ABORT: a bare string": [b"\x01", pack("a")],
        "ABORT: integers as ids": [b"\x01", pack([1, 2])],
    }
    for number, (name, frames) in enumerate(messages.items(), start=1):
        frontend.send(*frames)
        assert frontend.statistics()["malformed_messages"] == number, name
    frontend.inputs[0].send(IDENTITY)  # no frame at all
    still_serves(frontend, "all that")
    assert frontend.stderr.count("dropped a malformed message (unknown type)") == 1


def bad_requests() -> dict[str, list[Any]]:
    good = request("bad", PROMPT, max_tokens=5)

    def with_position(position: int, value: Any) -> list[Any]:
        changed = [*good, 0, 0, None, False]
        changed[position] = value
        return changed

    ranges: dict[str, Any] = {
        "temperature": -1.0,
        "top_p": 0.0,
        "top_k": -2,
        "min_p": 1.5,
        "presence_penalty": 3.0,
        "frequency_penalty": -3.0,
        "repetition_penalty": 0.0,
        "max_tokens": 0,
        "min_tokens": 6,
    }
    return {
        **{
            f"position {n} of a wrong type": with_position(n, "wrong")
            for n in (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15)
        },
        "array too short": ["bad"],
        "aux index without a frame": with_position(9, ["float32", [2, 2], 1]),
        **{
            f"{name}={value}": request("bad", PROMPT, **{"max_tokens": 5, name: value})
            for name, value in ranges.items()
        },
        "temperature NaN": request("bad", PROMPT, temperature=float("nan")),
        "empty prompt": request("bad", []),
        "nil prompt": with_position(1, None),
        "prompt too long": request("bad", [1] * 1500),
        "prompt that leaves no room": request("bad", [1] * 1024),
        "token id outside the vocabulary": request("bad", [1, 100_000]),
        "negative token id": request("bad", [1, -1]),
        "pooling": with_position(4, [None, None, None, None, "embed"]),
        "neither sampling nor pooling": with_position(3, None),
        "max_tokens nil": request("bad", PROMPT, max_tokens=None),
        "structured output": request("bad", PROMPT, structured_outputs={"regex": "a"}),
        "logprobs=-2": request("bad", PROMPT, logprobs=-2),
        "prompt_logprobs=-2": request("bad", PROMPT, prompt_logprobs=-2),
        "logprobs, which the toy has not": request("bad", PROMPT, logprobs=1),
        "LoRA": with_position(6, ["l", 1, "/nowhere"]),
        "prompt_embeds": with_position(9, ["float32", [1, 1], 1]),
        "resumable": with_position(15, True),
    }


def test_a_bad_request_gets_an_error_of_its_own(frontend: ForeignFrontend) -> None:
    frontend.start({"max_model_len": 1024})
    for name, add in bad_requests().items():
        frontend.send(b"\x00", pack(add), *([b"\0" * 4] if name == "prompt_embeds" else []))
        (output,) = frontend.collect("bad")["bad"]
        assert (output[5], output[1]) == (ERROR, []), name
        assert output[18] == {"code": "validation_error", "message": output[18]["message"], "retryable": False}, name
        assert output[18]["message"], name
        assert frontend.statistics()["num_steps"] == 0, name
    still_serves(frontend, "bad requests")


def test_a_duplicate_id_fails_and_the_first_goes_on(frontend: ForeignFrontend) -> None:
    frontend.start(step_delay_s=0.002)
    frontend.add("a", PROMPT, max_tokens=40)
    frontend.add("a", [1], max_tokens=40)
    frontend.add("b", PROMPT, max_tokens=40)
    outputs = frontend.collect("b")
    duplicate = [output for output in outputs["a"] if output[5] == ERROR]
    assert len(duplicate) == 1
    assert "already in use" in duplicate[0][18]["message"]
    assert tokens(outputs["a"])[:39] == expected_tokens(PROMPT, 40)[:39]


def test_malformed_utility_calls_fail_and_are_answered(frontend: ForeignFrontend) -> None:
    frontend.start()
    for call in ([0, 5, 17, []], [0, 5, "is_sleeping", 3], [0, 5]):
        frontend.send(b"\x03", pack(call))
        reply = frontend.receive()[4]
        assert reply[0] == 5
        assert reply[1].startswith("Call to ")
        assert reply[2] is None
    failure, _, _ = frontend.call("handle_fault_tolerance", {"instruction": "retry"})
    assert failure is not None
    still_serves(frontend, "malformed calls")


def test_what_is_merely_unknown_is_ignored(frontend: ForeignFrontend) -> None:
    frontend.start()
    add = request("a", PROMPT, max_tokens=3, from_the_future=1)
    frontend.send(b"\x00", pack([*add, 0, 0, None, False, None, None, None, False, None, None, "tail"]), b"spare frame")
    assert tokens(frontend.collect("a")["a"]) == expected_tokens(PROMPT, 3)
    frontend.send(b"\x00", pack([*request("gone", PROMPT), 0, 0, None, False, None, None, None, True]))
    assert frontend.statistics()["num_running_requests"] == 0  # abort_immediately


def test_input_order_is_kept(frontend: ForeignFrontend) -> None:
    frontend.start()
    for number in range(50):
        frontend.add(f"r{number}", PROMPT)
        frontend.abort(f"r{number}")
    counts = frontend.statistics()
    assert (counts["adds_received"], counts["aborts_received"], counts["num_running_requests"]) == (50, 50, 0)
