"""The busy loop of an engine process: commands between steps, steps, outputs.

Owns who is told what, and in which order: commands are handled in order of arrival, so that a utility reply is a fence
behind every earlier message of the same client. Drives an :class:`~anyengine.engine.interfaces.Engine`; knows nothing
of models and sockets. Mirrors ``EngineCoreProc.run_busy_loop`` of vLLM 0.32/0.33.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, assert_never

from anyengine._wire import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
    StartDPWave,
    UtilityCall,
    UtilityOutput,
)
from anyengine.engine.interfaces import Engine
from anyengine.engine.serving.front_ends import FrontEndsGone
from anyengine.engine.serving.io_threads import COORDINATOR, Command, StopEngine, ThreadFailed, utility_failure
from anyengine.engine.serving.malformed import Malformed

__all__ = ["BusyLoop", "Outputs"]

_SHUTTING_DOWN = "Server shutting down"  # vLLM's words

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _DeferredReply:
    client_index: int
    call: UtilityCall
    result: Future[object]


class Outputs(Protocol):
    """Where the busy loop's messages go: a thread with sockets, or a queue in memory."""

    def send(self, client_index: int, outputs: EngineCoreOutputs, *, method: str = "") -> None:
        """Encode and send, in the order of the calls. ``method``: the utility that this is the reply of."""


class BusyLoop:
    """Commands in, steps, outputs out. One thread, the main one, from :meth:`run` to its return."""

    def __init__(
        self,
        engine: Engine,
        commands: SimpleQueue[Command],
        output: Outputs,
        *,
        rank: int,
        num_clients: int,
        has_coordinator: bool,
    ) -> None:
        self._engine = engine
        self._commands = commands
        self._output = output
        self._rank = rank
        self._num_clients = num_clients
        # Clients that balance count what each rank has: they are told of all that have left it, as by vLLM.
        self._has_coordinator = has_coordinator
        self._deferred: list[_DeferredReply] = []
        self._stopping = False
        self._load_is_known = True
        """Whether the last statistics that were sent tell of an idle engine that has stayed so."""
        self.abandoned: bool = False
        """Why it stopped: all front ends have gone for good."""
        self._logged_kinds: set[str] = set()

    def run(self) -> None:
        """Serve until :class:`StopEngine` arrives, or until every front end has gone; then end all requests with ABORT.

        Raises:
            Exception: what the engine raised.
        """
        while True:
            self._handle_commands(block=not self._engine.has_work())
            if self._stopping:
                break
            if self._engine.has_work():
                self._deliver(self._engine.step())
                self._answer_deferred()
            else:
                self._deliver([])  # an abort may have taken the last request away
            self._tell_coordinator()
        self._engine.abort_all()
        self._deliver(self._engine.step())
        while self._engine.has_work():  # a wave: other ranks would wait for us in the middle of a step
            self._deliver(self._engine.step())
        self._tell_coordinator()

    def refuse_rest(self) -> None:
        """Answer what arrived too late. The input thread must have ended."""
        for deferred in self._deferred:
            self._reply(deferred.client_index, UtilityOutput(deferred.call.call_id, _SHUTTING_DOWN, None))
        self._deferred.clear()
        self._handle_commands(block=False)

    def _handle_commands(self, *, block: bool) -> None:
        if block:
            self._handle(self._commands.get())
        while not self._commands.empty():  # this thread is the only consumer
            self._handle(self._commands.get())

    def _handle(self, command: Command) -> None:
        match command:
            case EngineCoreRequest():
                self._add(command)
            case AbortRequests():
                self._engine.abort(command.request_ids)
            case UtilityCall():
                self._call(command)
            case Malformed():
                self._report_malformed(command)
            case StartDPWave():
                if not self._engine.start_wave(command.wave):
                    self._note_malformed("START_DP_WAVE", "this engine takes no part in waves")
            case StopEngine():
                self._stopping = True
            case FrontEndsGone():
                self._drop_clients(command)
            case ThreadFailed():
                raise command.error
            case _:
                assert_never(command)

    def _drop_clients(self, gone: FrontEndsGone) -> None:
        _logger.warning("front end %s has gone: its requests end here", ", ".join(map(str, gone.client_indices)))
        for client_index in gone.client_indices:
            self._engine.abort_client(client_index)
        if gone.all_gone:
            self._stopping = self.abandoned = True

    def _add(self, request: EngineCoreRequest) -> None:
        if not self._is_client(request.client_index):
            self._note_malformed("client index", f"request {request.request_id!r} names client {request.client_index}")
        elif self._stopping:
            output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            self._send(request.client_index, EngineCoreOutputs(outputs=[output]))
        else:
            self._load_is_known = False
            self._engine.add(request)

    def _call(self, call: UtilityCall) -> None:
        if not self._is_client(call.client_index):
            self._note_malformed("client index", f"utility call {call.method!r} names client {call.client_index}")
            return
        if self._stopping:
            self._reply(call.client_index, UtilityOutput(call.call_id, _SHUTTING_DOWN, None))
            return
        try:
            result = self._engine.utility(call.method, call.args)
        except Exception as exc:  # noqa: BLE001 - the caller is told; the engine has other callers
            self._reply(call.client_index, utility_failure(call.call_id, call.method, str(exc)))
            return
        if isinstance(result, Future):
            self._deferred.append(_DeferredReply(call.client_index, call, result))
        else:
            self._reply(call.client_index, UtilityOutput(call.call_id, None, result), method=call.method)
        self._answer_deferred()

    def _answer_deferred(self) -> None:
        """Behind the outputs of the step: a pause is confirmed after the last output it waited for."""
        done = [deferred for deferred in self._deferred if deferred.result.done()]
        self._deferred = [deferred for deferred in self._deferred if not deferred.result.done()]
        for deferred in done:
            call, error = deferred.call, deferred.result.exception()
            if error is None:
                output = UtilityOutput(call.call_id, None, deferred.result.result())
            else:
                output = utility_failure(call.call_id, call.method, str(error))
            self._reply(deferred.client_index, output, method=call.method)

    def _report_malformed(self, message: Malformed) -> None:
        self._note_malformed(message.kind, message.reason)
        if not self._is_client(message.client_index):
            return
        if message.request_id is not None:
            self._engine.refuse(message.client_index, message.request_id, message.reason)
        elif message.call_id is not None:
            self._reply(message.client_index, utility_failure(message.call_id, message.method, message.reason))

    def _note_malformed(self, kind: str, reason: str) -> None:
        self._engine.count_malformed()
        if kind not in self._logged_kinds:  # one broken client must not fill the disk
            self._logged_kinds.add(kind)
            _logger.error(
                "dropped a malformed message (%s); further ones of this kind are only counted: %s", kind, reason
            )

    def _is_client(self, client_index: int) -> bool:
        return 0 <= client_index < self._num_clients

    def _deliver(self, outputs: Iterable[tuple[int, EngineCoreOutput]]) -> None:
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for client_index, output in outputs:
            by_client.setdefault(client_index, []).append(output)
            self._load_is_known = False
        finished = self._engine.take_finished()
        if not self._has_coordinator:
            finished.clear()
        told = dict.fromkeys([*by_client, *finished])
        # What is counted since the last reading must not be read without being sent.
        stats: SchedulerStats | None = self._engine.scheduler_stats() if told else None
        for client_index in told:
            outputs_of_client, gone = by_client.get(client_index, []), finished.get(client_index)
            self._send_step(client_index, outputs_of_client, stats, gone)
            stats = None  # on one message of a step only, as vLLM
        if not self._load_is_known and not self._engine.has_work():
            self._load_is_known = True
            self._send_step(0, [], self._engine.scheduler_stats(), None)

    def _tell_coordinator(self) -> None:
        for news in self._engine.take_coordinator_news():
            if self._has_coordinator:
                self._send(COORDINATOR, news)

    def _send_step(
        self,
        client_index: int,
        outputs: list[EngineCoreOutput],
        stats: SchedulerStats | None,
        finished: set[str] | None,
    ) -> None:
        message = EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, finished_requests=finished)
        message.weight_version = self._engine.weight_version
        self._send(client_index, message)

    def _reply(self, client_index: int, output: UtilityOutput, *, method: str = "") -> None:
        self._send(client_index, EngineCoreOutputs(utility_output=output), method=method)

    def _send(self, client_index: int, message: EngineCoreOutputs, *, method: str = "") -> None:
        message.engine_index, message.timestamp = self._rank, time.monotonic()
        self._output.send(client_index, message, method=method)
