"""The connection of one client to its engines, as a state machine: commands in, frames out; frames in, events out.

Owns the registries and the dialect of each rank. Holds no socket, clock or randomness: ids, prefixes and times are
arguments. The order inside a command is the rule "state before bytes": encode (which may refuse), register, return the
frames; the caller sends them without an await in between, and closes what it opened if the send is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from anyengine._rules import a_type, reject
from anyengine._wire import (
    EEP_NOTIFICATION_CALL_ID,
    FAULT_STATUS_CALL_ID,
    Dialect,
    EngineCoreRequest,
    Frame,
    RankDialects,
    UtilityCall,
    UtilityOutput,
    is_engine_dead,
)
from anyengine.exceptions import DecodeError, LocalProtocolError

from .adapters import LoadedAdapters
from .admission import EngineLimits, check_request, check_utility
from .events import DeadSentinel, EEPNotification, Event, FaultStatus, MalformedMessage, UtilityReply
from .life_events import RankState
from .modes import MODE_METHODS, mode_after
from .ranks import RankRota
from .requests import OutputConsumer, RequestEntry, RequestRegistry
from .utilities import PendingCall, UtilityRegistry

__all__ = ["Connection", "Frames", "checked_ids", "num_prompt_tokens"]

Frames: TypeAlias = Sequence[Frame]

_UNKNOWN: Final = EngineLimits.unknown()


class Connection:
    """One client's view of its engines, from the end of the handshake on.

    ``dialects`` maps each rank to the dialect that its registration selected. ``client_index`` is our position among
    the clients of these engines: the index of the output socket that answers go to. ``limits`` maps a rank to what is
    known of its engine, and may be filled in later; what hurts every engine is refused without it. ``on_mode`` is told
    what each answer says of an engine: that it runs, is paused, or sleeps.
    """

    def __init__(
        self,
        dialects: Mapping[int, Dialect],
        *,
        call_id_prefix: int,
        client_index: int = 0,
        limits: Mapping[int, EngineLimits] | None = None,
        on_mode: Callable[[int, RankState], None] | None = None,
    ) -> None:
        self.dialects: RankDialects = RankDialects(dialects)
        self.rota: RankRota = RankRota(dialects)
        self._decode = self.dialects.decode_outputs
        self._client_index = client_index
        self.requests: RequestRegistry = RequestRegistry()
        self.utilities: UtilityRegistry = UtilityRegistry(call_id_prefix)
        self.malformed_messages: int = 0
        self.limits: dict[int, EngineLimits] = dict(limits or {})
        self.adapters: LoadedAdapters = LoadedAdapters()
        self._on_mode = on_mode
        self._modes: dict[int, RankState] = {}
        self._incarnations: Counter[int] = Counter()  # how often each rank's engine has been replaced

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.dialects)

    # ------------------------------------------------------------------ commands

    def check(self, request: EngineCoreRequest, rank: int) -> Frames:
        """What :meth:`add` does before it registers ``request``.

        Raises:
            EncodeError, RequestRejected, LocalProtocolError: see :meth:`add`.
        """
        if not isinstance(request, EngineCoreRequest):
            reject("request", request, f"is {a_type(request)}", "use an EngineCoreRequest")
        if type(request.client_index) is not int or request.client_index != self._client_index:
            raise LocalProtocolError(
                f"client_index={request.client_index} is not this client's {self._client_index}: "
                "the engine would answer elsewhere, or fall silent: leave it at ours"
            )
        dialect = self._dialect(rank)
        frames = dialect.encode_add(request)
        check_request(request, frames, dialect, self._limits(rank), self.adapters.of(rank))
        return frames

    def add(self, request: EngineCoreRequest, rank: int, consumer: OutputConsumer) -> Frames:
        """Register ``request`` for ``rank``; the frames of its ADD.

        Raises:
            EncodeError: a value cannot be encoded; nothing is registered.
            RequestRejected: the engine would not survive it; nothing is registered.
            LocalProtocolError: the id is alive already or was aborted, or the request names another client's output
                socket.
        """
        frames = self.check(request, rank)
        self.requests.open(request.request_id, rank, consumer, num_prompt_tokens=num_prompt_tokens(request))
        return frames

    def part(self, request: EngineCoreRequest, rank: int) -> Frames:
        """The frames of a further part of a request that is alive, or of the word that none follows.

        Raises:
            EncodeError, RequestRejected: see :meth:`add`.
            LocalProtocolError: it is not alive in ``rank``: the engine would take it for a new one.
        """
        entry = self.requests.live.get(request.request_id)
        if entry is None or entry.rank != rank:
            raise LocalProtocolError(f"request id {request.request_id!r} is not alive in engine {rank}")
        return self.check(request, rank)

    def abort(self, request_ids: str | Iterable[str]) -> list[tuple[int, Frames]]:
        """Forget the live ones among ``request_ids`` and tell their consumers; one ABORT for each rank concerned, to be
        sent at once.

        Raises:
            RequestRejected: one is not a str; nothing has changed.
        """
        request_ids = checked_ids(request_ids)
        messages: list[tuple[int, Frames]] = []
        closed: list[RequestEntry] = []
        for rank, ids in self.requests.by_rank(request_ids).items():
            messages.append((rank, self._dialect(rank).encode_abort(ids)))
            closed += filter(None, [self.requests.close(request_id, aborted=True) for request_id in ids])
        for entry in closed:
            if not entry.broken:
                with suppress(Exception):  # whatever a consumer makes of it: the engine must hear of all of them
                    entry.consumer.aborted()
        return messages

    def repeat_abort(self, request_ids: Sequence[str], rank: int) -> Frames:
        """The frames of one more ABORT, for ids that are forgotten here and go on in the engine."""
        return self._dialect(rank).encode_abort(list(request_ids))

    def utility(
        self, method: str, args: Sequence[Any], rank: int, on_done: Callable[[], None], *, unchecked: bool = False
    ) -> tuple[PendingCall, Frames]:
        """Register a utility call; it and its frames. ``unchecked``: the caller knows the engine, and what it does.

        Raises:
            EncodeError: an argument cannot be encoded; nothing is registered.
            UtilityRejected: the engine has no such method, or would not survive the call; nothing is registered.
        """
        dialect = self._dialect(rank)
        if not unchecked:
            check_utility(method, args, dialect, self._limits(rank), rank=rank)
        call = self.utilities.open(method, rank, on_done)
        try:
            frames = dialect.encode_utility(UtilityCall(self._client_index, call.call_id, method, list(args)))
        except BaseException:
            self.utilities.forget(call.call_id)
            raise
        self.adapters.watch(call, args)
        if self._on_mode is not None and method in MODE_METHODS:
            self._watch_mode(call, args, self._on_mode)
        return call, frames

    def utility_arity(self, method: str, rank: int) -> int | None:
        """How many arguments ``method`` takes at most in the rank's release; ``None`` if it has no such method."""
        return self._dialect(rank).utility_arity(method)

    def replace(self, rank: int, dialect: Dialect) -> None:
        """The engine of ``rank``, which is dead, has been started again: nothing that was known of it holds."""
        self.dialects.replace(rank, dialect)
        self.adapters.forget(rank)
        self._modes.pop(rank, None)
        self._incarnations[rank] += 1

    # -------------------------------------------------------------------- events

    def receive(self, frames: Frames) -> Event:
        """Decode and classify one message of the output socket."""
        if is_engine_dead(frames):
            return DeadSentinel()
        try:
            outputs = self._decode(frames)
        except DecodeError as exc:
            self.malformed_messages += 1
            return self._salvaged(frames, exc) or MalformedMessage(exc)
        if outputs.utility_output is None:
            return outputs
        return self._classify_reply(outputs.engine_index, outputs.utility_output)

    def _salvaged(self, frames: Frames, error: DecodeError) -> Event | None:
        """What a message that cannot be decoded says to those who wait here: who is concerned must hear of it, or
        would wait for ever, or take what follows for the whole."""
        part = self.dialects.salvage_outputs(frames, error)
        if part is None:
            return None
        if part.utility_output is not None:
            reply = UtilityReply(part.engine_index, part.utility_output)
            return reply if reply.output.call_id in self.utilities.pending else None
        return part if any(output.request_id in self.requests.live for output in part.outputs) else None

    def _classify_reply(self, rank: int, output: UtilityOutput) -> Event:
        if output.call_id >= 0:
            return UtilityReply(rank, output)
        try:
            if output.call_id == EEP_NOTIFICATION_CALL_ID:
                name, subject = output.result
                if isinstance(name, str) and isinstance(subject, int):
                    return EEPNotification(name, subject)
            elif output.call_id == FAULT_STATUS_CALL_ID:
                status = output.result
                return FaultStatus(int(status["id"]), str(status["status"]), status.get("fault_info"))
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            pass
        self.malformed_messages += 1
        return MalformedMessage(
            DecodeError(f"unsolicited message with call id {output.call_id} from engine {rank}: {output.result!r:.200}")
        )

    def _watch_mode(self, call: PendingCall, args: Sequence[Any], on_mode: Callable[[int, RankState], None]) -> None:
        """Have the answer to a call, when it is one, say what the engine is in."""
        tell, incarnation = call.on_done, self._incarnations[call.rank]

        def learn() -> None:
            # What an engine has said says nothing of its successor, should that be there when the reply is taken.
            if call.error is None and incarnation == self._incarnations[call.rank]:
                sleep_is_pause = self.utility_arity("is_scheduler_paused", call.rank) is not None
                before = self._modes.get(call.rank, RankState.READY)
                mode = mode_after(call.method, args, call.value, before, sleep_is_pause=sleep_is_pause)
                self._modes[call.rank] = mode
                on_mode(call.rank, mode)
            tell()

        call.on_done = learn

    def _limits(self, rank: int) -> EngineLimits:
        return self.limits.get(rank) or _UNKNOWN

    def _dialect(self, rank: int) -> Dialect:
        try:
            return self.dialects[rank]
        except KeyError:
            raise LocalProtocolError(f"rank {rank} is not connected; connected: {list(self.dialects)}") from None


def num_prompt_tokens(request: EngineCoreRequest) -> int:
    """The length of the request's prompt, whatever it is made of."""
    if request.prompt_embeds is not None:
        return request.prompt_embeds.shape[0]
    return len(request.prompt_token_ids or ())


def checked_ids(request_ids: str | Iterable[str]) -> list[str]:
    """``request_ids`` as a list; one str is one id.

    Raises:
        RequestRejected: one is not a str.
    """
    if isinstance(request_ids, str):
        request_ids = (request_ids,)
    elif not isinstance(request_ids, Iterable):
        reject("request_ids", request_ids, f"is {a_type(request_ids)}", "use a str, or several")
    ids = list(request_ids)
    for request_id in ids:
        if not isinstance(request_id, str):
            reject("request_ids", request_id, f"is {a_type(request_id)}", "use the str ids of requests")
    return ids
