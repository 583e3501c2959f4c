"""Data-parallel ranks in lockstep: two engine cores of one mixture of experts, over gloo, and a hand-driven
coordinator."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch
import zmq
from foreign_frontend import ForeignFrontend, address_of, pack, tokens, unpack

from anyengine._wire import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    StartDPWave,
    UtilityCall,
    WireSamplingParams,
)
from anyengine.config import EmbeddedEngine
from anyengine.engine.core.waves import Waves
from anyengine.engine.runner.moe_toy import MoERunner, MoEWeights
from anyengine.engine.serving.busy_loop import BusyLoop
from anyengine.engine.serving.io_threads import COORDINATOR, Command, StopEngine
from anyengine.engine.start import create_core

MOE = "anyengine.engine.runner.moe_toy:create_runner"
DEADLINE_S = 30.0
SEED = 6


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The whole model in one place, one token at a time."""
    weights, tokens = MoEWeights(SEED), list(prompt)
    for _ in range(num_tokens):
        state = weights.hidden_state(tokens)
        expert = int((state @ weights.router).argmax())
        mixed = state + torch.tanh(state @ weights.experts[expert])
        tokens.append(int((weights.embedding @ mixed).argmax()))
    return tokens[len(prompt) :]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module", autouse=True)
def _event_loop_of_torch() -> None:
    """The first store of a process opens a pipe for good, which is no leak of any test."""
    torch.distributed.TCPStore("127.0.0.1", free_port(), 1, True)


class Rank:
    """An engine core in a busy loop of its own thread, with its two ends in hand."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self._config = EmbeddedEngine(
            runner=MOE,
            seed=SEED,
            max_num_batched_tokens=16,
            runner_options={"data_parallel_rank": rank, "data_parallel_size": size, "port": port, "timeout_s": 20.0},
        )
        self._rank = rank
        self.commands: SimpleQueue[Command] = SimpleQueue()
        self.sent: SimpleQueue[tuple[int, EngineCoreOutputs]] = SimpleQueue()
        self.news: list[EngineCoreOutputs] = []
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.replies: dict[int, Any] = {}
        self.runner: MoERunner | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            core = create_core(self._config, self._rank, lambda _status: None)
            self.runner = core._runner  # type: ignore[assignment]
            loop = BusyLoop(core, self.commands, self, rank=self._rank, num_clients=1, has_coordinator=True)
            loop.run()
            core.close()
        except BaseException as exc:  # noqa: BLE001 - the test shows it
            self.error = exc
            self.sent.put((0, EngineCoreOutputs()))

    def send(self, client_index: int, outputs: EngineCoreOutputs, *, method: str = "") -> None:
        self.sent.put((client_index, outputs))

    def add(self, request_id: str, prompt: list[int], wave: int, max_tokens: int = 6) -> None:
        sampling = WireSamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.commands.put(EngineCoreRequest(request_id, prompt, sampling_params=sampling, current_wave=wave))

    def call(self, method: str, *args: Any) -> Any:
        call_id = 1000 + len(self.replies)
        self.commands.put(UtilityCall(0, call_id, method, args))
        self.read_until(lambda: call_id in self.replies)
        reply = self.replies[call_id]
        assert reply.failure_message is None, reply
        return reply.result

    def read_until(self, satisfied: Any) -> None:
        while not satisfied():
            try:
                client_index, message = self.sent.get(timeout=DEADLINE_S)
            except Empty:
                pytest.fail(f"rank {self._rank} is silent; {self.error!r}")
            assert self.error is None, self.error
            if client_index == COORDINATOR:
                self.news.append(message)
            elif message.utility_output is not None:
                self.replies[message.utility_output.call_id] = message.utility_output
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def read_to_the_end_of(self, *request_ids: str) -> None:
        self.read_until(lambda: all(self.has_ended(request_id) for request_id in request_ids))

    def has_ended(self, request_id: str) -> bool:
        return request_id in self.outputs and self.outputs[request_id][-1].finish_reason is not None

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def told(self, field: str) -> list[int]:
        return [value for message in self.news if (value := getattr(message, field)) is not None]

    def stop(self) -> None:
        self.commands.put(StopEngine())

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@contextmanager
def ranks(size: int = 2) -> Iterator[list[Rank]]:
    port = free_port()
    started = [Rank(rank, size, port) for rank in range(size)]
    try:
        for rank in started:  # an answer: it is there
            rank.call("is_scheduler_paused")
        yield started
    finally:
        for rank in started:
            rank.stop()
        for rank in started:
            rank.join()
    assert [rank.error for rank in started] == [None] * size


def start_wave(started: list[Rank], wave: int, exclude: int | None = None) -> None:
    for rank in started:
        rank.commands.put(StartDPWave(wave, exclude))


@pytest.mark.feature("F16")
def test_an_idle_rank_takes_part_in_every_step_of_the_others() -> None:
    """What no rank can compute alone comes out as if one had all experts; the wave ends when nobody has work."""
    prompts = {"short": [1, 2, 3], "long": list(range(40)), "later": [9]}
    with ranks() as started:
        busy, idle = started
        busy.add("short", prompts["short"], wave=0)
        busy.add("long", prompts["long"], wave=0, max_tokens=20)
        start_wave(started, 0, exclude=0)
        busy.read_to_the_end_of("short", "long")
        busy.read_until(lambda: busy.told("wave_complete") == [0])
        assert idle.runner is not None and busy.runner is not None
        assert idle.runner.num_dummy_batches == 32  # all steps until the ranks agreed
        assert 0 < busy.runner.num_dummy_batches < 32
        idle.add("later", prompts["later"], wave=1)
        start_wave(started, 1, exclude=1)
        idle.read_to_the_end_of("later")
        busy.read_until(lambda: busy.told("wave_complete") == [0, 1])
        assert idle.told("wave_complete") == []  # rank 0 speaks for all
    for rank, name, count in ((busy, "short", 6), (busy, "long", 20), (idle, "later", 6)):
        assert rank.tokens(name) == expected_tokens(prompts[name], count), name


def test_ranks_with_work_of_their_own_serve_each_other() -> None:
    prompts = {f"{rank} {number}": [rank, number, 5] for rank in range(2) for number in range(5)}
    with ranks() as started:
        for name, prompt in prompts.items():
            started[prompt[0]].add(name, prompt, wave=0, max_tokens=3 + prompt[1] * 4)
        start_wave(started, 0)
        for rank, engine in enumerate(started):
            engine.read_to_the_end_of(*(name for name in prompts if name.startswith(str(rank))))
    for name, prompt in prompts.items():
        assert started[prompt[0]].tokens(name) == expected_tokens(prompt, 3 + prompt[1] * 4)


def test_a_request_of_a_wave_that_is_over_asks_for_the_present_one() -> None:
    """Its front end has told the coordinator nothing. Until the wave starts, nothing runs, and calls are answered."""
    with ranks() as started:
        first, second = started
        start_wave(started, 0)
        first.read_until(lambda: first.told("wave_complete") == [0])
        second.call("is_sleeping")
        second.add("late", [3, 4], wave=0)
        second.read_until(lambda: second.told("start_wave") == [1])
        assert second.call("get_engine_statistics")["num_waiting_requests"] == 1
        start_wave(started, 0)  # stale: it is over
        assert second.call("get_engine_statistics")["num_steps"] == 0
        start_wave(started, 1, exclude=1)
        second.read_to_the_end_of("late")
        assert second.tokens("late") == expected_tokens([3, 4], 6)
        first.add("early", [5], wave=7)  # its front end knows of a wave that this rank does not
        start_wave(started, 7, exclude=0)
        first.read_to_the_end_of("early")
        first.read_until(lambda: first.told("wave_complete")[-1] == 7)


def test_the_load_is_told_with_the_number_of_the_wave() -> None:
    with ranks(1) as (engine,):
        engine.add("a", [1], wave=0)
        engine.read_until(lambda: engine.told("scheduler_stats"))
        (waiting,) = engine.told("scheduler_stats")
        assert (waiting.num_waiting_reqs, waiting.num_running_reqs, waiting.current_wave) == (1, 0, 0)  # type: ignore[attr-defined]
        start_wave([engine], 0)
        engine.read_until(lambda: engine.told("wave_complete") == [0])
        counts = [(stats.num_waiting_reqs, stats.num_running_reqs) for stats in engine.told("scheduler_stats")]  # type: ignore[attr-defined]
        assert counts == [(1, 0), (0, 1), (0, 0)]


def test_a_paused_rank_still_takes_part_and_asks_for_a_wave_when_it_goes_on() -> None:
    with ranks() as started:
        first, second = started
        second.add("kept", [1, 2], wave=0, max_tokens=300)
        start_wave(started, 0)
        second.read_until(lambda: "kept" in second.outputs)
        second.call("pause_scheduler", "keep")
        first.add("other", [8], wave=0, max_tokens=60)
        first.read_until(lambda: first.told("wave_complete") or first.has_ended("other"))
        if not first.has_ended("other"):  # it came behind the end of the wave
            start_wave(started, 1)
            first.read_to_the_end_of("other")
        assert not second.has_ended("kept")
        first.read_until(lambda: first.told("wave_complete"))
        second.call("resume_scheduler")
        second.read_until(lambda: second.told("start_wave") or second.has_ended("kept"))
        for wave in second.told("start_wave")[:1]:
            start_wave(started, wave, exclude=1)
        second.read_to_the_end_of("kept")
        assert second.tokens("kept") == expected_tokens([1, 2], 300)
        assert first.tokens("other") == expected_tokens([8], 60)


def test_an_abort_of_the_last_request_ends_the_wave() -> None:
    with ranks() as started:
        started[1].add("a", [1], wave=0, max_tokens=2000)
        start_wave(started, 0)
        started[1].read_until(lambda: "a" in started[1].outputs)
        started[1].commands.put(AbortRequests(["a"]))
        started[0].read_until(lambda: started[0].told("wave_complete") == [0])
        assert started[1].call("get_engine_statistics")["num_running_requests"] == 0


def test_a_rank_that_stops_leaves_with_the_end_of_the_wave() -> None:
    """The other one is not left alone in the middle of a step."""
    with ranks() as started:
        first, second = started
        first.add("a", [1], wave=0, max_tokens=40)
        second.add("b", [2], wave=0, max_tokens=2000)
        start_wave(started, 0)
        second.read_until(lambda: "b" in second.outputs)
        second.stop()
        second.read_to_the_end_of("b")
        assert second.outputs["b"][-1].finish_reason is FinishReason.ABORT
        first.read_to_the_end_of("a")
        first.read_until(lambda: first.told("wave_complete"))
        second.join()
    assert first.tokens("a") == expected_tokens([1], 40)


def test_waves() -> None:
    waves = Waves()
    assert not waves.note_request(0)
    assert waves.note_request(0) is False and not waves.running
    waves.start(2)
    assert (waves.current, waves.running) == (2, True)
    waves.start(1)
    assert waves.current == 2
    assert not waves.note_request(1)  # it runs
    assert [waves.count_step() for _ in range(64)].count(True) == 2
    assert waves.end() == 2
    assert (waves.current, waves.running, waves.step_counter) == (3, False, 0)
    waves.start(2)
    assert not waves.running
    assert waves.note_request(2)
    assert not waves.note_request(5)
    assert waves.current == 5


class Coordinator:
    """vLLM's, by hand: an XPUB to the engines, and a PULL from them."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self.output = self._context.socket(zmq.XPUB)
        self.input = self._context.socket(zmq.PULL)
        self.output.bind(f"ipc://{directory}/cb")
        self.input.bind(f"ipc://{directory}/co")
        self.addresses = {"coordinator_input": address_of(self.output), "coordinator_output": address_of(self.input)}

    def wait_for_subscription(self) -> None:
        assert self.output.poll(int(DEADLINE_S * 1000))
        assert self.output.recv() == b"\x01"

    def next_of(self, position: int) -> Any:
        """The next message that has something at ``position`` of EngineCoreOutputs."""
        while True:
            assert self.input.poll(int(DEADLINE_S * 1000)), "the engine tells nothing"
            message = unpack(self.input.recv_multipart()[0])
            if len(message) > position and message[position] is not None:
                return message[position]

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_over_sockets_a_coordinator_starts_the_waves(tmp_path: Path) -> None:
    """READY of the coordinator before READY of the engine; news on its socket alone."""
    coordinator = Coordinator(tmp_path)
    try:
        with ForeignFrontend(tmp_path) as frontend:
            frontend.addresses.update(coordinator.addresses)  # type: ignore[arg-type]
            frontend.launch({"runner": MOE, "seed": SEED}, port=free_port())
            frontend.answer_hello()
            coordinator.wait_for_subscription()
            assert frontend.inputs[0].poll(int(DEADLINE_S * 1000))
            registration = unpack(frontend.inputs[0].recv_multipart()[1])
            assert registration["data_parallel_size"] == 1
            assert not frontend.handshake.poll(0)  # it is not READY before the coordinator is
            coordinator.output.send(b"READY")
            assert frontend.handshake.poll(int(DEADLINE_S * 1000))
            frontend.add("a", [1, 2], max_tokens=5)
            assert coordinator.next_of(2)["num_waiting_reqs"] == 1
            coordinator.output.send_multipart([b"\x02", pack([0, None])])
            assert tokens(frontend.collect("a")["a"]) == expected_tokens([1, 2], 5)
            assert coordinator.next_of(6) == 0
    finally:
        coordinator.close()


def test_without_a_coordinator_such_an_engine_does_not_start(tmp_path: Path) -> None:
    with ForeignFrontend(tmp_path) as frontend:
        process = frontend.launch({"runner": MOE}, port=free_port())
        frontend.answer_hello()
        assert process.wait(DEADLINE_S) == 1
        assert "INIT names no coordinator" in frontend.stderr
