"""The scripted engine without I/O: what each switch makes it do, message by message."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from anyengine._wire import EngineCoreOutputs, EngineCoreRequest, OutputBatch, dialect_for
from anyengine.params import SamplingParams
from anyengine.testing.scripted import Fault, RequestRule, Script, StartupStage, UtilityRule, expected_tokens
from anyengine.testing.scripted.core import (
    Action,
    Close,
    Connect,
    Ended,
    Hang,
    Report,
    ScriptedCore,
    Send,
    Serve,
    Sleep,
)
from anyengine.testing.scripted.records import Record, encode_record
from anyengine.testing.scripted.script import End

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
INIT = pack({"addresses": {"inputs": ["memory://i"], "outputs": ["memory://o"]}, "parallel_config": {}})


class Driven:
    """A core that a test drives; ``now_s`` moves only when it says so."""

    def __init__(self, script: Script | None = None, *, started: bool = True) -> None:
        self.log: list[Record] = []
        self.now_s = 100.0
        self.core = ScriptedCore(script or Script(), 0, log=self.log.append)
        self.calls = 0
        self.early = self.core.start(self.now_s)
        if started:
            self.early += self.core.receive("handshake", [INIT], self.now_s)

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 3) -> list[Action]:
        payload = [request_id, prompt, None, {"max_tokens": max_tokens}, None, 0.0, None, None, None]
        return self.core.receive("input", [b"\x00", pack(payload)], self.now_s)

    def abort(self, *request_ids: str) -> list[Action]:
        return self.core.receive("input", [b"\x01", pack(request_ids)], self.now_s)

    def call(self, method: str, *args: Any) -> list[Action]:
        self.calls += 1
        return self.core.receive("input", [b"\x03", pack([0, self.calls, method, args])], self.now_s)

    def run(self, steps: int = 1000) -> list[Action]:
        """Wake it whenever it is due, as long as time need not pass."""
        actions: list[Action] = []
        while steps and self.core.deadline_s() <= self.now_s:
            actions += self.core.wake(self.now_s)
            steps -= 1
        return actions

    def later(self, seconds: float) -> list[Action]:
        self.now_s += seconds
        return self.run()


def outputs(actions: list[Action]) -> list[tuple[str, list[int], int | None]]:
    return [
        (one[0], one[1], one[5])
        for action in actions
        if isinstance(action, Send) and action.socket == "output"
        for one in unpack(action.payload)[1]
    ]


def replies(actions: list[Action]) -> list[Any]:
    sent = [unpack(action.payload)[4] for action in actions if isinstance(action, Send) and action.socket == "output"]
    return [one for one in sent if one is not None]


def test_a_start_in_order() -> None:
    """HELLO; after INIT the sockets, the registration and READY. Our own decoder understands them."""
    driven = Driven()
    sent = [(one.socket, unpack(one.payload)) for one in driven.early if isinstance(one, Send)]
    assert [socket for socket, _ in sent] == ["handshake", "input", "handshake"]
    assert (sent[0][1]["status"], sent[2][1]["status"]) == ("HELLO", "READY")
    assert [one.address for one in driven.early if isinstance(one, Connect)] == [None, "memory://i", "memory://o"]
    assert [one.stage for one in driven.early if isinstance(one, Report)] == ["handshake", "ready"]


def test_stages_are_reported_delayed_and_failed() -> None:
    stages = (
        StartupStage(name="importing", delay_s=2.0),
        StartupStage(name="loading", end=End(error="RuntimeError: no weights", exit_code=3, log="Traceback")),
    )
    driven = Driven(Script(startup=stages))
    assert [one for one in driven.early if isinstance(one, Sleep)] == [Sleep(2.0)]
    assert driven.early[-2:] == [Report("failed", ("RuntimeError", "no weights")), Ended(3)]
    assert driven.run() == []  # nothing happens behind the end


def test_what_it_sends_is_what_our_decoder_reads() -> None:
    driven = Driven()
    actions = driven.add("a", [1, 2]) + driven.run()
    dialect = dialect_for("0.33.0")
    tokens: list[int] = []
    for action in actions:
        assert isinstance(action, Send)
        decoded: EngineCoreOutputs = dialect.decode_outputs([action.payload])
        assert isinstance(decoded, OutputBatch)
        tokens += [token for output in decoded.outputs for token in output.new_token_ids]
    assert tokens == expected_tokens([1, 2], 3)
    request = EngineCoreRequest("b", [1], None, SamplingParams(max_tokens=2), None, 0.0)
    frames = dialect.encode_add(request)
    assert len(outputs(driven.core.receive("input", [bytes(one) for one in frames], 0.0) + driven.run())) == 2


def test_tokens_frames_and_slots() -> None:
    driven = Driven(Script(tokens_per_frame=2, max_running=1, merge_requests=False))
    actions = driven.add("a", [1]) + driven.add("b", [2])
    assert driven.log[-1].kind == "add"  # "b" waits
    actions += driven.run()
    tokens_a, tokens_b = expected_tokens([1], 3), expected_tokens([2], 3)
    assert outputs(actions) == [
        ("a", tokens_a[:2], None),
        ("a", tokens_a[2:], 1),
        ("b", tokens_b[:2], None),
        ("b", tokens_b[2:], 1),
    ]
    assert [one.body for one in driven.log if one.kind == "scheduled"] == ["a", "b"]


def test_times_of_first_and_further_tokens() -> None:
    driven = Driven(Script(first_token_delay_s=1.0, prefill_s_per_token=0.5, step_interval_s=0.25))
    driven.add("a", [1, 2])
    assert driven.core.deadline_s() == 102.0
    assert len(outputs(driven.later(2.0))) == 1
    assert driven.core.deadline_s() == 102.25
    assert driven.later(0.2) == []
    assert len(outputs(driven.later(0.05))) == 1


def test_jitter_is_decided_by_the_seed() -> None:
    def deadlines(seed: int) -> list[float]:
        driven = Driven(Script(step_interval_s=1.0, jitter=0.5, seed=seed))
        driven.add("a", [1], 5)
        times = []
        for _ in range(4):
            driven.run()
            driven.now_s = driven.core.deadline_s()
            times.append(driven.now_s)
        return times

    assert deadlines(1) == deadlines(1) != deadlines(2)
    assert all(0.5 <= b - a <= 1.5 for a, b in zip(deadlines(1), deadlines(1)[1:], strict=False))


def test_rules_for_requests() -> None:
    rules = (
        RequestRule(first_token=7, tokens=(-1, 1 << 40), finish="stop"),
        RequestRule(nth=2, after_tokens=1, finish="error", error={"code": "x"}),
        RequestRule(first_token=8, silent=True),
    )
    driven = Driven(Script(requests=rules))
    actions = driven.add("a", [7]) + driven.add("b", [1]) + driven.add("c", [8]) + driven.run()
    assert outputs(actions) == [("a", [-1], None), ("b", expected_tokens([1], 1), 3), ("a", [1 << 40], 0)]
    assert driven.core.deadline_s() == math.inf
    raw = [unpack(one.payload)[1] for one in actions if isinstance(one, Send)]
    assert raw[0][1][18] == {"code": "x"}


def test_aborts_obeyed_ignored_delayed_answered_and_late() -> None:
    def after_abort(**switches: Any) -> list[tuple[str, list[int], int | None]]:
        driven = Driven(Script(**switches))
        driven.add("a", [1], 3)
        driven.run(1)
        return outputs(driven.abort("a", "unknown") + driven.run())

    rest = [("a", [token], None if number == 0 else 1) for number, token in enumerate(expected_tokens([1], 3)[1:])]
    assert after_abort() == []
    assert after_abort(aborts="ignore") == after_abort(abort_delay_s=1.0) == rest
    assert after_abort(abort_answers=2) == [("a", [], 2)] * 2
    assert after_abort(outputs_after_abort=2) == [("a", [1], None)] * 2


def test_rules_for_calls() -> None:
    rules = (
        UtilityRule(method="profile", do="never"),
        UtilityRule(method="is_sleeping", nth=2, do="fail", message="no"),
        UtilityRule(method="list_loras", do="reply", value=[9], delay_s=1.0),
        UtilityRule(method="collective_rpc", do="twice"),
        UtilityRule(method="get_weight_version", do="unencodable"),
    )
    driven = Driven(Script(utilities=rules))
    assert replies(driven.call("profile")) == []
    assert replies(driven.call("is_sleeping") + driven.call("is_sleeping")) == [
        [2, None, [None, False]],
        [3, "Call to is_sleeping method failed: no", None],
    ]
    assert driven.call("list_loras") == []
    assert replies(driven.later(1.0)) == [[4, None, [None, [9]]]]
    assert replies(driven.call("collective_rpc")) == [[5, None, [None, [None]]]] * 2
    assert replies(driven.call("get_weight_version"))[0][2][1].code == 2
    assert replies(driven.call("no_such"))[0][1] is not None


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pauses(mode: str) -> None:
    """Aborted at once; or run to their end first; or kept as they are. What comes later waits for the resumption."""
    driven = Driven()
    driven.add("a", [1], 3)
    driven.run(1)
    actions = driven.call("pause_generation", mode, True) + driven.add("b", [2], 1)
    paused = outputs(actions + driven.run())
    assert (
        paused
        == {
            "abort": [("a", [], 2)],
            "wait": [("a", [token], end) for token, end in zip(expected_tokens([1], 3)[1:], (None, 1), strict=True)],
            "keep": [],
        }[mode]
    )
    assert replies(driven.call("is_scheduler_paused"))[0][2] == [None, True]
    resumed = outputs(driven.call("resume_scheduler") + driven.run())
    assert ("b", expected_tokens([2], 1), 1) in resumed
    assert len(resumed) == (3 if mode == "keep" else 1)


@pytest.mark.parametrize(
    ("fault", "at_the_end"),
    [
        (Fault(do="kill", signal="SIGSEGV"), [Ended(signal="SIGSEGV")]),
        (Fault(do="exit", exit_code=9), [Ended(9)]),
        (Fault(do="hang"), [Hang()]),
        (Fault(do="dead"), [Send("output", b"ENGINE_CORE_DEAD"), Hang()]),
        (Fault(do="close_output"), [Close("output")]),
    ],
)
def test_faults_before_and_after_a_message(fault: Fault, at_the_end: list[Action]) -> None:
    """Out: the second batch of outputs. In: the second request; behind it no message is sent any more."""
    for when in ("before", "after"):
        script = Script(faults=(msgspec.structs.replace(fault, kind="outputs", nth=2, when=when),))
        driven = Driven(script)
        actions = driven.add("a", [1]) + driven.run()
        assert actions[-len(at_the_end) :] == at_the_end
        assert len(actions) - len(at_the_end) == (1 if when == "before" else 2)
    script = Script(faults=(msgspec.structs.replace(fault, direction="in", kind="add", nth=2),))
    driven = Driven(script)
    assert driven.add("a", [1]) == []
    assert driven.add("b", [2]) == at_the_end
    driven = Driven(Script(faults=(msgspec.structs.replace(fault, direction="in", kind="profile"),)))
    assert len(driven.call("is_sleeping")) == 1
    assert driven.call("profile") == at_the_end


def test_faults_count_all_messages() -> None:
    """In: 1 is INIT. Out: HELLO, the registration, READY, then outputs."""
    driven = Driven(Script(faults=(Fault(do="kill", direction="in", nth=1),)))
    assert driven.early[-1] == Ended(signal="SIGKILL")
    driven = Driven(Script(faults=(Fault(do="exit", nth=3),)))
    assert driven.early[-3:] == [Send("input", driven.core._registration), Serve(), Ended(1)]


def test_deaf_goes_on_writing_and_mute_on_reading() -> None:
    deaf = Driven(Script(faults=(Fault(do="deaf", direction="in", kind="add", nth=2),)))
    assert len(outputs(deaf.add("a", [1]) + deaf.add("b", [2]) + deaf.run())) == 3
    assert deaf.core.reads_after_s() == math.inf
    mute = Driven(Script(faults=(Fault(do="mute", kind="outputs"),)))
    assert mute.add("a", [1]) + mute.run() == []
    assert mute.core.reads_after_s() <= mute.now_s


def test_spoilt_messages() -> None:
    def sent(do: Any, **more: Any) -> list[bytes]:
        driven = Driven(Script(faults=(Fault(do=do, kind="outputs", **more),)))
        return [one.payload for one in driven.add("a", [1], 1) + driven.run() if isinstance(one, Send)]

    (good,) = sent("sleep")
    assert sent("truncate") == [good[: len(good) // 2]]
    assert sent("garbage") == [b"\xc1garbage"]
    assert sent("empty") == [b""]
    assert sent("drop") == []
    assert sent("duplicate") == [good, good]
    assert sent("huge", size_bytes=5000)[1] == good
    assert len(sent("huge", size_bytes=5000)[0]) > 5000
    assert isinstance(unpack(sent("mistype")[0])[1], str)


def test_slow_reads() -> None:
    driven = Driven(Script(read_interval_s=0.5))
    driven.add("a", [1])
    assert driven.core.reads_after_s() == driven.now_s + 0.5


def test_sigterm_aborts_what_runs_and_ends() -> None:
    driven = Driven(Script(shutdown_delay_s=1.0))
    driven.add("a", [1], 9)
    driven.run(1)
    assert driven.core.terminate(driven.now_s) == driven.core.terminate(driven.now_s) == []
    assert outputs(driven.add("late", [1])) == [("late", [], 2)]
    assert replies(driven.call("is_sleeping"))[0][1] == "Server shutting down"
    driven.core._generation.frozen = True
    *actions, last = driven.later(1.0)
    assert outputs(actions) == [("a", [], 2)] and last == Ended(0)
    assert Driven(Script(ignore_sigterm=True)).core.terminate(0.0) == []


def test_strays_and_logs() -> None:
    driven = Driven(Script(stray_outputs=2, log_outputs=True))
    actions = driven.add("a", [1], 1) + driven.run()
    assert [name for name, _, _ in outputs(actions)] == ["a", "stray-0", "stray-1"]
    assert [(one.direction, one.number, one.kind) for one in driven.log] == [
        ("out", 1, "hello"),
        ("in", 1, "init"),
        ("out", 2, "registration"),
        ("out", 3, "ready"),
        ("in", 2, "add"),
        ("event", 0, "scheduled"),
        ("out", 4, "outputs"),
    ]
    driven.core.receive("input", [b"\x07"], 0.0)
    driven.core.receive("input", [b"\x03", pack([0, 1, "m", [msgspec.msgpack.Ext(3, b"x")]])], 0.0)
    assert msgspec.json.decode(encode_record(driven.log[-3]), type=Record).kind == "unknown"
    assert b"Ext" in encode_record(driven.log[-2])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Script(max_running=0),
        lambda: Script(jitter=1.5),
        lambda: Fault(do="kill", nth=0),
        lambda: Fault(do="kill", signal="SIGNOSUCH"),
        lambda: Fault(do="garbage", direction="in"),
        lambda: End(signal="kill"),
        lambda: msgspec.json.decode(b'{"no_such": 1}', type=Script),
        lambda: msgspec.json.decode(b'{"faults": [{"do": "no such"}]}', type=Script),
    ],
)
def test_scripts_that_make_no_sense_are_refused(bad: Any) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError)):
        bad()


def test_a_script_survives_json() -> None:
    script = Script(
        startup=(StartupStage(name="hello", end=End(signal="SIGABRT")),),
        faults=(Fault(do="huge", size_bytes=5),),
        requests=(RequestRule(nth=1, tokens=(1,)),),
        utilities=(UtilityRule(method="*", do="never"),),
    )
    assert msgspec.json.decode(msgspec.json.encode(script), type=Script) == script
