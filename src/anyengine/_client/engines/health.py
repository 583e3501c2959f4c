"""How a client's engines are, asked now: is the process there, does its main loop answer, does it still generate?

Owns the question, one rank beside the other and bounded by its time, and the reading of the answers. Ends nothing and
changes nothing: what follows from a bad answer is the asker's, and, at its own limit, :mod:`.liveness`'s.
"""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

import anyio
import msgspec

from anyengine._client.core_client import EngineCoreClient
from anyengine._client.session.session import Session
from anyengine._process.supervisor import SupervisedEngine
from anyengine._protocol import ClientState, RankState
from anyengine._setting_rules import check_seconds
from anyengine._wire import EngineCoreOutput, EngineCoreRequest, WireSamplingParams, finish_reason_name
from anyengine.exceptions import EngineDeadError, EngineError, EngineUnresponsiveError, OverloadedError, UtilityError

from .calls import call_ranks
from .liveness import PROBE

__all__ = ["ClientHealth", "HealthLevel", "RankHealth", "Verdict", "examine"]

HealthLevel: TypeAlias = Literal["process", "rpc", "generate"]
"""How much is asked: nothing but what is known; a call through the main loop; a request of one token behind it."""

Verdict: TypeAlias = Literal["starting", "healthy", "busy", "failing", "wedged", "silent", "restarting", "dead"]
"""``busy``: it works, on others' requests; ``failing``: it ends requests with errors; ``wedged``: its main loop
answers, and schedules nothing; ``silent``: its main loop has not answered; ``restarting``: it is started again."""


class RankHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's. The ages are in seconds, ``None`` where there was none yet; the queue is what the engine said last of
    it, ``None`` where it says nothing. ``asked`` is the level that was asked of it: a pause is not tested by requests,
    nor is a model that does not generate."""

    rank: int
    state: RankState
    verdict: Verdict
    asked: HealthLevel
    pid: int | None = None
    last_heard_age_s: float | None = None
    last_step_age_s: float | None = None
    requests_in_flight: int = 0
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    error: EngineError | None = None
    """What it died of, or ended the request with."""

    @property
    def is_healthy(self) -> bool:
        return self.verdict in ("healthy", "busy")


class ClientHealth(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks', and the client's."""

    level: HealthLevel
    state: ClientState
    ranks: tuple[RankHealth, ...]
    cause: EngineError | None = None
    """What the client died of."""

    @property
    def degraded(self) -> tuple[int, ...]:
        """The ranks that are no help at present, whatever the reason."""
        return tuple(rank.rank for rank in self.ranks if not rank.is_healthy)

    @property
    def silent(self) -> tuple[int, ...]:
        """The ranks whose main loop has not answered in time."""
        return tuple(rank.rank for rank in self.ranks if rank.verdict == "silent")

    @property
    def is_healthy(self) -> bool:
        """Whether the client serves, and every rank is well."""
        return bool(self.ranks) and not self.degraded and self.state in _SERVING

    def raise_unhealthy(self) -> None:
        """Raise if a rank does not do its work, or none is left.

        Raises:
            EngineUnresponsiveError: ranks are silent or wedged; the text names all of them, ``rank`` the first.
            EngineError: what a rank died of, or failed with; or what the client did.
        """
        if self.cause is not None:
            raise self.cause.for_waiter()
        stuck = [rank for rank in self.ranks if rank.verdict in ("silent", "wedged")]
        if stuck:
            names = ", ".join(f"{rank.rank} ({rank.verdict})" for rank in stuck)
            error = EngineUnresponsiveError(
                f"engines that did not answer in time: {names}", rank=stuck[0].rank, pid=stuck[0].pid
            )
            error.silent_s = stuck[0].last_heard_age_s
            raise error
        for rank in self.ranks:
            if rank.error is not None:
                raise rank.error.for_waiter()
        if self.state not in _SERVING:
            raise EngineDeadError(f"the client is {self.state.value}: nothing serves")


_SERVING = (ClientState.READY, ClientState.PAUSED, ClientState.ASLEEP)


async def examine(core: EngineCoreClient, level: HealthLevel, timeout_s: float) -> ClientHealth:
    """See :meth:`EngineClient.health`."""
    if level not in ("process", "rpc", "generate"):
        raise ValueError(f"level={level!r} must be 'process', 'rpc' or 'generate'")
    check_seconds("timeout_s", timeout_s)
    life = core.life
    verdicts: dict[int, _Finding] = {}
    if life.is_running:
        session = core.session
        session.check_thread()
        verdicts = {rank: _Finding(session, rank) for rank in session.connection.rota.alive}
        if level != "process":
            with anyio.move_on_after(timeout_s):
                async with anyio.create_task_group() as tasks:
                    for finding in verdicts.values():
                        tasks.start_soon(finding.ask, core, level)
    return ClientHealth(
        level=level,
        state=life.state,
        ranks=tuple(_report(core, rank, verdicts.get(rank)) for rank in life.ranks),
        cause=life.cause,
    )


class _Finding:
    """What one rank has shown while it was asked. Owning task: the one that asks it."""

    def __init__(self, session: Session, rank: int) -> None:
        self.verdict: Verdict = "healthy"
        self.asked: HealthLevel = "process"
        self.error: EngineError | None = None
        self._session = session
        self._rank = rank

    async def ask(self, core: EngineCoreClient, level: HealthLevel) -> None:
        """Ask the rank; cut short when the time is over, which leaves the verdict of that moment."""
        session, rank = self._session, self._rank
        self.asked, self.verdict = "rpc", "silent"
        try:
            await call_ranks(session, PROBE, (), [rank])
        except UtilityError:
            pass  # a refusal is an answer
        except EngineDeadError as exc:
            self.verdict, self.error = "dead", exc
            return
        self.verdict = "healthy"
        tasks = session.connection.limits[rank].tasks
        generates = tasks is None or "generate" in tasks
        if level == "generate" and generates and core.life.ranks[rank] is RankState.READY:
            self.asked = "generate"
            await self._generate(core)

    async def _generate(self, core: EngineCoreClient) -> None:
        steps = self._session.liveness.last_step_s
        before_s = steps.get(self._rank)
        canary = _Canary()
        request = EngineCoreRequest(
            f"health-{os.urandom(8).hex()}", [0], sampling_params=WireSamplingParams(max_tokens=1, temperature=0.0)
        )
        try:
            core.add(request, canary, rank=self._rank)
            try:
                await canary.ended.wait()
            finally:
                if not canary.ended.is_set():
                    core.abort(request.request_id)
                    self.verdict = "wedged" if steps.get(self._rank) == before_s else "busy"
            if canary.error is not None:
                self.verdict, self.error = "failing", canary.error
        except OverloadedError:
            self.verdict = "busy"
        except EngineDeadError as exc:
            self.verdict, self.error = "dead", exc


class _Canary:
    """The consumer of a request that nobody wants the tokens of."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.error: EngineError | None = None

    def push(self, output: EngineCoreOutput) -> None:
        if output.finish_reason is not None:
            if finish_reason_name(output.finish_reason) == "error":
                detail = output.error.message if output.error else "it gave no reason"
                self.error = EngineError(f"the engine fails requests: {detail}")
            self.ended.set()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, EngineError):
            self.error = error
        self.ended.set()

    def aborted(self) -> None:
        self.ended.set()


def _report(core: EngineCoreClient, rank: int, finding: _Finding | None) -> RankHealth:
    state = core.life.ranks[rank]
    verdict: Verdict = "dead"
    if state is RankState.RESTARTING:
        verdict = "restarting"
    elif state is not RankState.DEAD and core.life.is_running:
        verdict = "dead" if finding is None else finding.verdict
    if core.life.state in (ClientState.CREATED, ClientState.STARTING):
        return RankHealth(rank=rank, state=state, verdict="starting", asked="process")
    session = core.session
    engine, liveness = session.engines.get(rank), session.liveness
    child = engine.child if isinstance(engine, SupervisedEngine) else None
    if child is not None and verdict != "restarting" and child.poll() is not None:
        verdict = "dead"
    stats, step_s = liveness.last_statistics.get(rank), liveness.last_step_s.get(rank)
    return RankHealth(
        rank=rank,
        state=state,
        verdict=verdict,
        asked="process" if finding is None else finding.asked,
        pid=None if child is None else child.pid,
        last_heard_age_s=liveness.silence_s(rank),
        last_step_age_s=None if step_s is None else anyio.current_time() - step_s,
        requests_in_flight=sum(entry.rank == rank for entry in session.connection.requests.live.values()),
        num_running=None if stats is None else stats.num_running_reqs,
        num_waiting=None if stats is None else stats.num_waiting_reqs,
        kv_cache_usage=None if stats is None else stats.kv_cache_usage,
        error=session.burials.deaths.get(rank) or (None if finding is None else finding.error),
    )
