"""The link to an engine under test: what checks send by, wait by and look at.

Owns the mailboxes of requests and calls, and what is known of the engine's health. Decides nothing about right or
wrong: checks do. A front end of its own, beside the client that users have: it shares sockets and codec with that, and
none of its decisions. Owning tasks: those of :func:`~.starting.open_engine`, which read the sockets.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from anyengine._transport.abc import PeerUnreachable
from anyengine._wire import (
    NEWEST,
    Dialect,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    Frame,
    RankDialects,
    UtilityCall,
    WireSamplingParams,
    is_engine_dead,
)
from anyengine._wire.layouts import Release
from anyengine.exceptions import DecodeError

from .outcomes import CheckFailed, CheckSkipped
from .traffic import Call, Evidence, TrackedRequest, note

if TYPE_CHECKING:
    from anyengine._process.supervisor import SupervisedEngine

    from .ports import Ports

__all__ = ["PROMPT", "EngineLink", "StartRecord"]

PROMPT = (5, 9, 2, 17, 3, 11, 8)
"""Token ids so small that every vocabulary has them."""

_MAX_PROMPT_TOKENS = 2_000_000

_LAST_WORDS_S = 0.5
"""What has arrived when a connection ends is still read, and what else ends with it is still noticed."""

_GREEDY: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 4}


@dataclass
class StartRecord:
    """Everything that an engine sent before it was ready (and on the two handshake paths ever since), in order."""

    expect_local: bool
    expect_headless: bool
    handshake: list[tuple[bytes, list[bytes]]] = field(default_factory=list)
    """(identity, frames) of each message on the handshake socket."""
    inits_sent: int = 0
    ready_after_init: bool | None = None
    """Whether INIT had been sent when READY came."""
    registrations: dict[int, list[tuple[bytes, list[bytes]]]] = field(default_factory=dict)
    """By client: what came on its input socket."""
    failure: str | None = None
    """Why it did not become ready."""


class EngineLink:
    """One running engine. Lifetime: the block of ``open_engine``."""

    def __init__(self, ports: Ports, start: StartRecord, rank: int, patience_s: float) -> None:
        self.ports: Ports = ports
        self.start: StartRecord = start
        self.rank: int = rank
        self.identity: bytes = b""
        self.patience_s: float = patience_s
        self.dialect: Dialect = NEWEST
        self.registration: EngineCoreReadyResponse | None = None
        self.process: SupervisedEngine | None = None
        self.evidence: Evidence = Evidence(rank)
        self.dead_clients: set[int] = set()
        """Clients that were sent ENGINE_CORE_DEAD."""
        self.lost_links: set[str] = set()
        """"input" or "output": sockets whose connection ended."""
        self.gone: str | None = None
        """How the engine ended, in words."""
        self.paused: bool = False
        """A check paused it and has not resumed it."""
        self._prefix = f"check-{secrets.token_hex(4)}"
        self._count = 0
        self._call_ids = secrets.randbits(31) << 20
        self._requests: dict[str, TrackedRequest] = {}
        self._settled: dict[str, TrackedRequest] = {}  # of earlier checks: nothing may come for them
        self._calls: dict[int, Call] = {}
        self._dialects = RankDialects({rank: NEWEST})
        self._changed = anyio.Event()

    # What is known of the engine.

    def settle_dialect(self, dialect: Dialect) -> None:
        """From now on it is spoken to, and understood, so."""
        self.dialect = dialect
        self._dialects = RankDialects({self.rank: dialect})

    @property
    def release(self) -> Release:
        """The release whose rules hold."""
        return self.dialect.since

    @property
    def max_model_len(self) -> int:
        """In tokens."""
        return self.registration.max_model_len if self.registration is not None else 512

    def fill(self, num_tokens: int) -> list[int]:
        """A prompt of so many tokens.

        Raises:
            CheckSkipped: more than a check sends, by what the engine says of itself.
        """
        if num_tokens > _MAX_PROMPT_TOKENS:
            raise CheckSkipped(f"it takes a prompt of {num_tokens} tokens; checks send {_MAX_PROMPT_TOKENS} at most")
        return [1 + index % 19 for index in range(num_tokens)]

    @property
    def trouble(self) -> str | None:
        """What keeps the engine from answering, as far as can be seen; ``None``: nothing."""
        if self.dead_clients:
            return f"dead: it sent ENGINE_CORE_DEAD to clients {sorted(self.dead_clients)}"
        if self.gone is not None:
            return f"gone: it {self.gone}"
        if self.lost_links == {"input"}:
            return "deaf: it lives, and has closed its input sockets"
        if self.lost_links == {"output"}:
            return "mute: it lives, and has closed its output sockets"
        return "gone: its connections are closed" if self.lost_links else None

    def knows(self, method: str, *, args: int = 0) -> None:
        """The engine's release has ``method``, with so many arguments.

        Raises:
            CheckSkipped: it has not.
        """
        arity = self.dialect.utility_arity(method)
        if arity is None or arity < args:
            raise CheckSkipped(f"{self.dialect.releases} has no {method} with {args} arguments")

    # Sending.

    def new_id(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def send(self, *frames: Frame, client: int = 0) -> None:
        """Raw frames to the engine, by the input socket of ``client``. They are lost if it has closed its end this
        moment: word of that is on its way to whoever waits for an answer.

        Raises:
            CheckFailed: it is known not to be connected.
        """
        try:
            self.ports.clients[client].inputs.send_nowait([self.identity, *frames])
        except PeerUnreachable:
            if self.trouble is not None:
                where = f"input socket {client}"
                raise CheckFailed(where, expected="the engine is connected", got=self.trouble) from None

    def request(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        client: int = 0,
        fields: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> EngineCoreRequest:
        """A greedy request for 4 tokens, but for ``sampling`` and ``fields`` (of EngineCoreRequest)."""
        values = {
            "request_id": self.new_id(),
            "sampling_params": WireSamplingParams(**{**_GREEDY, **sampling}),
            **(fields or {}),
        }
        return EngineCoreRequest(prompt_token_ids=list(prompt), arrival_time=time.time(), client_index=client, **values)

    def add(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        client: int = 0,
        via: int | None = None,
        fields: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> TrackedRequest:
        """Send :meth:`request`, by the input socket of ``via`` (default: of the client that the outputs go to)."""
        request = self.request(prompt, client=client, fields=fields, **sampling)
        return self.send_add(request.request_id, self.dialect.encode_add(request), client=client, via=via)

    def send_add(
        self, request_id: str, frames: Sequence[Frame], *, client: int = 0, via: int | None = None
    ) -> TrackedRequest:
        """Send ``frames``, an ADD of ``request_id``, as they are."""
        via = client if via is None else via
        tracked = self._requests[request_id] = TrackedRequest(request_id, client, via)
        self.send(*frames, client=via)
        return tracked

    def abort(self, *requests: TrackedRequest) -> None:
        """Send one abort for all of them by each socket that they were sent by: between two sockets there is no
        order, and an abort that overtakes its request is one for nobody."""
        for via in sorted({tracked.via for tracked in requests}):
            mine = [tracked for tracked in requests if tracked.via == via]
            for tracked in mine:
                tracked.aborted = True
            self.send(*self.dialect.encode_abort([tracked.request_id for tracked in mine]), client=via)

    def call_nowait(self, method: str, *args: Any, client: int = 0, call_id: int | None = None) -> Call:
        """Send a utility call."""
        self._call_ids += 1
        call = Call(self._call_ids if call_id is None else call_id, method, client)
        self._calls[call.call_id] = call
        self.send(*self.dialect.encode_utility(UtilityCall(client, call.call_id, method, args)), client=client)
        return call

    # Waiting.

    async def until(self, condition: Callable[[], object], where: str, *, got: Callable[[], str] | None = None) -> None:
        """Wait until ``condition`` holds.

        Raises:
            CheckFailed: it does not in time, or the engine has gone before.

        Cancellation: changes nothing.
        """
        with anyio.move_on_after(self.patience_s) as limit:
            while not condition():
                if self.trouble is not None:
                    limit.deadline = min(limit.deadline, anyio.current_time() + _LAST_WORDS_S)
                await self._changed.wait()
            return
        if self.trouble is not None:
            raise CheckFailed(where, expected="the engine goes on", got=self.trouble)
        text = got() if got is not None else "nothing"
        raise CheckFailed(where, expected=f"something within {self.patience_s:g} s", got=text)

    async def change(self) -> None:
        """Wait until something arrives, or ends."""
        await self._changed.wait()

    async def finish(self, *requests: TrackedRequest) -> None:
        """Wait until each of ``requests`` has its last output."""
        for tracked in requests:
            await self.until(
                lambda it=tracked: it.last,  # type: ignore[misc]  # a default value binds it
                f"request {tracked.request_id}",
                got=lambda it=tracked: f"{len(it.token_ids)} tokens and no finish reason",  # type: ignore[misc]
            )

    async def first_token(self, *requests: TrackedRequest) -> None:
        """Wait until each of ``requests`` runs."""
        for tracked in requests:
            await self.until(lambda it=tracked: it.outputs, f"request {tracked.request_id}")  # type: ignore[misc]

    async def generate(self, prompt: Sequence[int] = PROMPT, **options: Any) -> TrackedRequest:
        """Send a request as :meth:`add` does and wait for its end."""
        tracked = self.add(prompt, **options)
        await self.finish(tracked)
        return tracked

    async def answer(self, call: Call) -> Call:
        """Wait for the reply of ``call``."""
        await self.until(lambda: call.reply, f"utility {call.method}")
        return call

    async def call(self, method: str, *args: Any, client: int = 0) -> Any:
        """The result of a utility call.

        Raises:
            CheckFailed: it failed, or nothing came.
        """
        reply = (await self.answer(self.call_nowait(method, *args, client=client))).reply
        assert reply is not None
        if reply.failure_message is not None:
            raise CheckFailed(f"utility {method}{args!r}", expected="a result", got=f"failure: {reply.failure_message}")
        return reply.result

    async def failure_of(self, method: Any, *args: Any) -> str | None:
        """The failure text of a utility call; ``None`` if it succeeded."""
        reply = (await self.answer(self.call_nowait(method, *args))).reply
        assert reply is not None
        return reply.failure_message

    async def fence(self, client: int = 0) -> None:
        """Wait for all that the engine sent to ``client`` before now. What was aborted by the same socket is silent
        from then on."""
        aborted = [item for item in self._requests.values() if item.aborted and item.client == item.via == client]
        await self.call("get_supported_tasks", client=client)
        for tracked in aborted:
            tracked.fenced = True

    async def settle(self) -> None:
        """Leave nothing running behind a check.

        Raises:
            CheckFailed: the engine does not answer.
        """
        running = [item for item in self._requests.values() if item.last is None and not item.aborted]
        if running:
            self.abort(*running)
        if self.paused:
            self.paused = False
            await self.call("resume_scheduler")
        for client in range(len(self.ports.clients)):
            await self.fence(client)
        self._settled.update(self._requests)
        self._requests.clear()

    # Receiving: called by the tasks of open_engine.

    def take_message(self, client: int, frames: Sequence[Frame]) -> None:
        """A message of the output socket of ``client``."""
        if is_engine_dead(frames):
            self.dead_clients.add(client)
            return
        self.evidence.look(frames)
        try:
            message = self._dialects.decode_outputs(frames)
        except DecodeError as exc:
            note(self.evidence.undecodable, str(exc))
            return
        self.evidence.take(client, message)
        if (reply := message.utility_output) is not None and reply.call_id >= 0:
            call = self._calls.pop(reply.call_id, None)
            if call is None:
                note(self.evidence.strays, f"a reply to call {reply.call_id}, which nobody made or which had its reply")
            else:
                call.reply, call.reply_client, call.order = reply, client, self.evidence.num_replies
            self.evidence.num_replies += 1
        for output in message.outputs:
            tracked = self._requests.get(output.request_id) or self._settled.get(output.request_id)
            self.evidence.take_output(tracked, client, output)

    def wake(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._changed.set()
        self._changed = anyio.Event()

    def note_end(self, how: str) -> None:
        """The engine has ended."""
        if self.gone is None:
            self.gone = how
        self.wake()

    def raw_add(self, request: EngineCoreRequest) -> list[Any]:
        """The positions of ``request`` as plain data, for checks that change them."""
        raw: list[Any] = msgspec.msgpack.decode(self.dialect.encode_add(request)[1])
        return raw

    def send_raw_add(self, request_id: str, positions: Sequence[Any], *aux: Frame) -> TrackedRequest:
        """An ADD of exactly these positions."""
        return self.send_add(request_id, [b"\x00", msgspec.msgpack.encode(positions), *aux])

    async def answers(self) -> bool:
        """Whether its main loop answers a call.

        Cancellation: changes nothing.
        """
        with suppress(CheckFailed):
            await self.fence()
            return True
        return False
