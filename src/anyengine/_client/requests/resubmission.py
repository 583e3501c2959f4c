"""Requests that are sent again: after the death of their engine, after an error that says that it may pass, or with
data that the engine was thought to have in its cache.

Owns the submissions of each request while a policy asks for it: it stands between the registry and the consumer, keeps
what is needed to put the request anew, and passes everything else on. Whether a request can go on elsewhere is
:mod:`anyengine._protocol.replays`'s; when an engine is back is :mod:`anyengine._client.engines.restarts`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import is_
from typing import Final

import anyio
import anyio.lowlevel
import msgspec

from anyengine._client.core_client import EngineCoreClient
from anyengine._client.engines.rank_choice import home_rank
from anyengine._client.inputs.multimodal import DataSource, MultiModalTokens
from anyengine._protocol import OutputConsumer, continued, lacks_data, why_not_replayed, with_data
from anyengine._wire import EngineCoreOutput, EngineCoreRequest, EngineRequestError, finish_reason_name
from anyengine.exceptions import (
    ClientClosedError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestFailed,
    UtilityError,
)
from anyengine.policies import RetryPolicy

from .admission import Admission
from .refusals import in_users_words
from .session_consumer import SessionConsumer
from .state import RequestState

__all__ = ["Resubmissions", "Submission", "state_of"]

_CACHE_MISS: Final = "multimodal_cache_miss"
_FRUITLESS = 2  # deaths in a row that a request may have been in its engine at, without a token in between


class Submission:
    """One request, as often as it is sent: the registry's consumer of its outputs, in front of ``state``.

    Invariant: it is in the registry, or waiting to be sent again, or its state has ended.
    """

    __slots__ = ("_desk", "_fruitless", "_had", "_has_missed", "_source", "received", "request", "state")

    def __init__(
        self,
        desk: Resubmissions,
        request: EngineCoreRequest,
        state: RequestState,
        source: DataSource | None = None,
    ) -> None:
        self._desk = desk
        self._source = source
        self._has_missed = False  # data that was thought to be in the engine's cache
        self._had = 0  # how many tokens there were when it was sent last
        self._fruitless = 0
        self.request = request
        self.state = state
        self.received: list[int] = []

    @property
    def label(self) -> str:
        """What its user calls it."""
        return self.state.label

    def push(self, output: EngineCoreOutput) -> bool:
        """Take one output from the engine; whether the request ends here, although the engine would go on."""
        if output.finish_reason is not None and self._is_sent_again(output):
            return False
        self.received += output.new_token_ids
        return self.state.push(output)

    def fail(self, error: BaseException) -> None:
        """Its engine is dead, or something else has ended it."""
        if self.state.ended:
            return
        if isinstance(error, EngineDeadError):
            refusal = self._desk.rescue(self, error)
            if refusal is None:
                return
            if refusal:
                text = f"{error.args[0]}; request {self.state.label!r} was not replayed: {refusal}"
                error = error.for_waiter()
                error.args = (text,)
        self.state.fail(error)

    def aborted(self) -> None:
        """Aborted through this client."""
        self.state.aborted()

    def next_request(self) -> EngineCoreRequest:
        """What is to be sent as one more attempt."""
        return continued(self.request, self.received, f"{self.request.request_id}.{self.state.attempts + 1}")

    def sent(self, request: EngineCoreRequest, rank: int) -> None:
        """``request``, the next one, has been sent."""
        self.state.attempts += 1
        self.state.moved(request.request_id, rank)
        self._had = len(self.received)

    def why_not(self) -> str | None:
        """Why it cannot go on in another engine; counts the deaths."""
        self._fruitless = self._fruitless + 1 if len(self.received) == self._had else 0
        if self._fruitless >= _FRUITLESS:
            return f"it was there at {_FRUITLESS} deaths in a row without a token in between, and may be what kills"
        return why_not_replayed(self.request, len(self.received))

    async def find_data(self, missing: Collection[str]) -> None:
        """Put the data of the ``missing`` multi-modal items into what is sent next.

        Raises:
            RequestFailed: it is not to be had.

        Cancellation: returns at once.
        """
        wanted, features = frozenset(missing), self.request.mm_features or ()
        filled, lacking = with_data(features, wanted, features)
        cause: Exception | None = None
        if lacking and self._source is not None:
            try:
                filled, lacking = with_data(filled, wanted, await self._source.features(frozenset(lacking)))
            except Exception as exc:  # noqa: BLE001 - rule 5: what a hook returned may do anything
                cause = exc
        if lacking:
            why = "mm_preprocessor gave no data for them" if cause is None else str(cause)
            error = RequestFailed(
                f"request {self.label!r} cannot be sent again with the multi-modal items "
                f"{', '.join(map(repr, lacking))}, which are not in the engine's cache: {why}",
                code=_CACHE_MISS,
                request_id=self.label,
            )
            error.missing_hashes = tuple(lacking)
            raise error from cause
        self.request = msgspec.structs.replace(self.request, mm_features=filled)

    def why_no_data(self, missing: Collection[str]) -> str | None:
        """Why it cannot be sent again with the ``missing`` data; notes that it was asked for."""
        features = self.request.mm_features or ()
        filled, lacking = with_data(features, frozenset(missing), features)
        again, self._has_missed = self._has_missed, True
        if not lacking and all(map(is_, filled, features)):
            return "although it has had their data"
        if again:
            return "and the request was sent again for others before; send it again with all its data"
        if lacking and self._source is None:
            return "and they came without data; send the request again with it, or make the client with mm_preprocessor"
        return None

    def _is_sent_again(self, output: EngineCoreOutput) -> bool:
        if output.mm_cache_miss_hashes and finish_reason_name(output.finish_reason) == "error":
            return not self.received and not output.new_token_ids and self._desk.send_with_data(self, output)
        return self._may_pass(output) and self._desk.retry(self)

    def _may_pass(self, output: EngineCoreOutput) -> bool:
        """Whether it is an end before the first token, which says that another try may go better."""
        if self.received or output.new_token_ids:
            return False
        reason = finish_reason_name(output.finish_reason)
        if reason == "error":
            return output.error is not None and output.error.retryable
        return reason == "abort" and not self.state.abort_expected


def state_of(consumer: OutputConsumer) -> RequestState | None:
    """The state behind a consumer in the registry, if it is one of a request of ours."""
    if isinstance(consumer, Submission | SessionConsumer):
        return consumer.state
    return consumer if isinstance(consumer, RequestState) else None


class Resubmissions:
    """See the module. Lifetime: one session, in whose group each request that is sent again has a task."""

    def __init__(self, core: EngineCoreClient, admission: Admission, retries: RetryPolicy | None) -> None:
        self._core = core
        self._admission = admission
        self._session = core.session
        self._retries = retries
        restart = core.session.settings.restart
        self._replays = restart is not None and restart.in_flight == "replay"
        self._waiting: dict[RequestState, Submission] = {}

    def send(self, request: EngineCoreRequest, state: RequestState, prompt: object = None) -> int:
        """Register and send a request for the first time; the rank that has it. If its engine has died this moment and
        is awaited, the request waits for it as well. ``prompt`` is what it was made of.

        Raises: see :meth:`EngineCoreClient.add`.
        """
        source = prompt.source if isinstance(prompt, MultiModalTokens) else None
        wanted = self._replays or self._retries is not None or lacks_data(request)
        consumer = Submission(self, request, state, source) if wanted else state
        try:
            return self._core.add(request, consumer)
        except EngineDeadError:
            if not self._session.restarts.are_awaited:
                raise
        state.attempts = 0  # nothing was sent
        self._start(consumer if isinstance(consumer, Submission) else Submission(self, request, state, source), 0.0)
        return state.rank

    def waiting(self) -> list[RequestState]:
        """The requests that wait to be sent again: they are in no engine, and in no registry."""
        return list(self._waiting)

    def retry(self, submission: Submission) -> bool:
        """Whether a request that failed before its first token is sent again."""
        policy, attempts = self._retries, submission.state.attempts
        if policy is None or attempts >= policy.max_attempts or self._session.cause is not None:
            return False
        if why_not_replayed(submission.request, 0) is not None:
            return False
        self._start(submission, policy.delay_s(attempts, self._session.restarts.chance()))
        return True

    def send_with_data(self, submission: Submission, miss: EngineCoreOutput) -> bool:
        """Whether a request is sent again with what was not in the engine's cache; if not, ``miss`` says why."""
        missing = miss.mm_cache_miss_hashes or ()
        if self._session.cause is not None:
            return False
        if (refusal := submission.why_no_data(missing)) is not None:
            named = ", ".join(map(repr, missing))
            miss.error = EngineRequestError(
                _CACHE_MISS, f"it does not have the multi-modal items {named} in its cache, {refusal}"
            )
            return False
        self._start(submission, 0.0, missing)
        return True

    def rescue(self, submission: Submission, death: EngineDeadError) -> str | None:
        """Send a request whose engine died to another one, or to the next one: ``None`` if so, or why not; nothing is
        said where that goes without saying."""
        session = self._session
        if session.cause is not None:
            return ""
        if not self._replays:
            return None if death.retryable and not submission.received and self.retry(submission) else ""
        refusal = submission.why_not()
        if refusal is None and self._is_hopeless(submission.request.data_parallel_rank):
            refusal = "no engine is left for it"
        if refusal is None:
            self._start(submission, 0.0)
        return refusal

    def withdraw(self, states: Iterable[RequestState]) -> tuple[str, ...]:
        """Those of ``states`` that wait are aborted, since nobody else has them; their latest wire ids."""
        withdrawn = [state for state in states if state in self._waiting]
        for state in withdrawn:
            self._leave(state)
            state.aborted()
        return tuple(state.wire_id for state in withdrawn)

    def end(self, cause: EngineDeadError) -> None:
        """The session has ended: so have those that wait."""
        for state in self.waiting():
            self._leave(state)
            if isinstance(cause, ClientClosedError):
                state.aborted()
            else:
                state.fail(cause)

    # ------------------------------------------------------------------ internals

    def _start(self, submission: Submission, delay_s: float, missing: Collection[str] = ()) -> None:
        self._waiting[submission.state] = submission
        self._session.sent_again = len(self._waiting)
        self._session.tasks.start_soon(self._session.own, self._send_again, submission, delay_s, missing)

    async def _send_again(self, submission: Submission, delay_s: float, missing: Collection[str]) -> None:
        state, rank = submission.state, submission.request.data_parallel_rank
        await anyio.sleep(delay_s)
        if missing:
            try:
                await submission.find_data(missing)
            except EngineError as exc:
                self._give_up(submission, exc)
        while self._waits(state):
            try:
                await anyio.lowlevel.checkpoint()
                await self._wait_rank(rank)
                only = home_rank(self._session, submission.request) if rank is None else rank
                await self._session.send_budget.wait_room(only)
                if await self._load_adapter(submission.request) or not self._is_taken(rank):
                    continue  # meanwhile a rank may have died, or come back without it, or a pause have begun
                if not self._waits(state):
                    return
                request = submission.next_request()
                with in_users_words(submission.label):
                    submission.sent(request, self._core.put(request, submission))
                self._leave(state)
            except (EngineDeadError, OverloadedError) as exc:
                if self._is_hopeless(rank):
                    self._give_up(submission, exc)
            except EngineError as exc:
                self._give_up(submission, exc)

    def _leave(self, state: RequestState) -> None:
        """It waits no more."""
        self._waiting.pop(state, None)
        self._session.sent_again = len(self._waiting)
        self._session.on_room()
        if not self._waiting:
            self._session.note_idle()

    def _waits(self, state: RequestState) -> bool:
        return state in self._waiting and not state.ended

    def _give_up(self, submission: Submission, error: EngineError) -> None:
        submission.state.fail(error)
        self._leave(submission.state)

    def _is_hopeless(self, rank: int | None) -> bool:
        """Whether nobody will take the request any more. (One that is dying may come back: that is told.)"""
        session = self._session
        rota, pending = session.connection.rota, session.restarts.pending
        hoped_for = bool(rota.alive or pending) if rank is None else rank in rota or rank in pending
        return session.cause is not None or not hoped_for

    async def _wait_rank(self, rank: int | None) -> None:
        session = self._session
        while not self._is_hopeless(rank):
            if self._is_taken(rank):
                return
            await session.restarts.wait_change()
        session.check_usable()
        raise session.burials.death(session.ranks[0] if rank is None else rank)

    def _is_taken(self, rank: int | None) -> bool:
        """Whether it may be sent now. (A pause of those that serve holds for it, too.)"""
        serving = self._session.connection.rota.serving
        return self._admission.is_open and (bool(serving) if rank is None else rank in serving)

    async def _load_adapter(self, request: EngineCoreRequest) -> bool:
        """An engine that was started again has none: whether one had to be asked. Does not wait otherwise."""
        adapter = request.lora_request
        if adapter is None:
            return False
        connection = self._session.connection
        lacking = [rank for rank in connection.rota.serving if adapter.lora_int_id not in connection.adapters.of(rank)]
        if lacking:
            try:
                await self._core.utility_on(lacking, "add_lora", adapter)
            except UtilityError as exc:
                raise RequestFailed(
                    f"request {request.external_req_id!r} cannot go on: the engine that was started again cannot load "
                    f"its LoRA adapter {adapter.lora_name!r} from {adapter.lora_path!r}: {exc}",
                    code="adapter_lost",
                    request_id=request.external_req_id,
                ) from exc
        return bool(lacking)
