"""What a client tells of its work, and to whom: figures as they stand, a line in the log, statistics sinks.

Owns the records, the timer and the calls of the sinks, which may be slow, fail, or never return: no request notices.
Registers nothing anywhere: whoever wants the figures in a registry of theirs has a sink put them there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TypeAlias

import anyio
import anyio.to_thread
import msgspec

from anyengine._client.requests.account import RankTotals
from anyengine._client.requests.desk import RequestDesk
from anyengine._client.session.session import Session
from anyengine._protocol import RankState

__all__ = ["ClientStatistics", "RankStatistics", "Reports", "StatisticsReports", "StatisticsSink", "take_statistics"]

_logger = logging.getLogger("anyengine.statistics")


class RankStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. ``num_running``, ``num_waiting`` and ``kv_cache_usage`` (a fraction) are the engine's own words of
    ``age_s`` seconds ago, which counts the requests of all its clients; ``None`` if it says nothing. An engine is
    silent once it is idle: with none of our requests in flight and no later word, old figures mean nothing."""

    rank: int
    state: RankState
    in_flight: int
    totals: RankTotals
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    age_s: float | None = None

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has confirmed that it sleeps."""
        return self.state is RankState.ASLEEP


class ClientStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A client's figures at one moment. Those of several clients, or of several ranks, add up to the truth.

    Attributes:
        client_id: tells clients apart: random, and part of the wire id of each of its requests.
        taken_s: when, on this host's monotonic clock.
        in_flight: requests that have been sent and have not ended; each completion counts.
        waiting: requests that wait to be sent.
        queued_prompt_tokens: prompt tokens of the requests that have had no output yet.
    """

    client_id: str
    taken_s: float
    in_flight: int
    waiting: int
    queued_prompt_tokens: int
    ranks: tuple[RankStatistics, ...]

    @property
    def prompt_tokens(self) -> int:
        """Of all ranks since the session began."""
        return sum(rank.totals.prompt_tokens for rank in self.ranks)

    @property
    def generation_tokens(self) -> int:
        """Of all ranks since the session began."""
        return sum(rank.totals.generation_tokens for rank in self.ranks)

    @property
    def ended(self) -> int:
        """Requests that have ended, in whatever way."""
        return sum(sum(rank.totals.ended.values()) for rank in self.ranks)


StatisticsSink: TypeAlias = Callable[[ClientStatistics], object]
"""Called in a worker thread, so it may block; what it returns means nothing, and what it raises is logged once."""


def take_statistics(session: Session, desk: RequestDesk) -> ClientStatistics:
    """The figures as they stand. Synchronous; in proportion to the requests in flight."""
    live, registry = desk.live(), session.connection.requests
    totals = desk.account.totals(session.ranks, live)
    in_flight = dict.fromkeys(session.ranks, 0)
    for state in live:
        in_flight[state.rank] = in_flight.get(state.rank, 0) + 1
    ranks = [_of_rank(session, rank, in_flight[rank], totals[rank]) for rank in session.ranks]
    return ClientStatistics(
        client_id=desk.builder.client_id,
        taken_s=monotonic(),
        in_flight=len(live),
        waiting=desk.admission.num_waiting,
        queued_prompt_tokens=registry.num_queued_tokens,
        ranks=tuple(ranks),
    )


def _of_rank(session: Session, rank: int, in_flight: int, totals: RankTotals) -> RankStatistics:
    liveness = session.liveness
    said, at_s = liveness.last_statistics.get(rank), liveness.last_statistics_s.get(rank)
    return RankStatistics(
        rank=rank,
        state=session.life.ranks[rank],
        in_flight=in_flight,
        totals=totals,
        num_running=None if said is None else said.num_running_reqs,
        num_waiting=None if said is None else said.num_waiting_reqs,
        kv_cache_usage=None if said is None else said.kv_cache_usage,
        age_s=None if at_s is None else anyio.current_time() - at_s,
    )


class _Sink:
    """A function that is told, and whether it is at it: a thread that was left alone may be, after its session.

    Invariant: it is called once at a time. Whoever calls it says so, and the thread that has done it says so, too.
    """

    __slots__ = ("has_failed", "is_busy", "tell")

    def __init__(self, tell: StatisticsSink) -> None:
        self.tell = tell
        self.is_busy = False
        self.has_failed = False

    def work(self, statistics: ClientStatistics, unclaimed: list[None]) -> BaseException | None:
        """Runs in a worker thread, unless nobody waited before it could begin; what the function raised."""
        try:
            unclaimed.pop()
        except IndexError:
            return None
        try:
            self.tell(statistics)
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - rule 5: sys.exit() in a sink is its own trouble, too
            return exc  # noqa: ASYNC104 - nothing is cancelled in this thread
        finally:
            self.is_busy = False
        return None


class Reports:
    """The log line and the sinks of one client. Owning task: the one that runs :meth:`run`. Lifetime: the client's."""

    def __init__(
        self, take: Callable[[], ClientStatistics], sinks: Sequence[StatisticsSink], interval_s: float | None
    ) -> None:
        if interval_s is not None and not 0 < interval_s < math.inf:
            raise ValueError(f"stats_interval_s={interval_s!r} must be a number of seconds above 0, or None for never")
        several: object = sinks
        if not isinstance(several, Sequence) or not all(map(callable, several)):
            raise ValueError(f"stats_sinks={sinks!r} must be a sequence of functions: [function]")
        self._take = take
        self._sinks = [_Sink(sink) for sink in sinks]
        self._interval_s = interval_s
        self.begin()

    def begin(self) -> None:
        """A session begins, whose figures start at nothing; it may be on another event loop than the last one."""
        self._threads = anyio.CapacityLimiter(max(len(self._sinks), 1))
        self._latest: ClientStatistics | None = None
        self._was_idle = True
        self.failures: int = 0
        """How often a sink or the log has raised, or a sink was still at its former figures when the next ones came."""

    async def run(self) -> None:
        """Report at every interval; ends at once if there is none."""
        if self._interval_s is None:
            return
        async with anyio.create_task_group() as calls:  # a sink that blocks holds up neither the log nor the others
            while True:
                await anyio.sleep(self._interval_s)
                statistics = self._next()
                for sink in self._sinks:
                    calls.start_soon(self._call, sink, statistics)

    async def flush(self) -> None:
        """Report now; returns when the sinks have had it."""
        statistics = self._next()
        async with anyio.create_task_group() as calls:
            for sink in self._sinks:
                calls.start_soon(self._call, sink, statistics)

    def _next(self) -> ClientStatistics:
        """The figures for the sinks; writes the line, if it says something."""
        statistics = self._take()
        ended_before = 0 if self._latest is None else self._latest.ended
        is_idle = statistics.in_flight == statistics.waiting == 0 and statistics.ended == ended_before
        if not (is_idle and self._was_idle):
            try:
                _log(statistics, self._latest)
            except Exception:  # noqa: BLE001 - rule 5: a filter of the log is the user's; there is no log to tell it
                self.failures += 1
        self._latest, self._was_idle = statistics, is_idle
        return statistics

    async def _call(self, sink: _Sink, statistics: ClientStatistics) -> None:
        if sink.is_busy:
            self.failures += 1
            return
        sink.is_busy, unclaimed = True, [None]
        try:
            failure = await anyio.to_thread.run_sync(
                sink.work, statistics, unclaimed, abandon_on_cancel=True, limiter=self._threads
            )
        finally:
            if unclaimed:  # cancelled before its thread has begun, which it will not do any more
                with suppress(IndexError):  # unless it has just now
                    unclaimed.pop()
                    sink.is_busy = False
        if failure is not None:
            self._note_failure(sink, failure)

    def _note_failure(self, sink: _Sink, failure: BaseException) -> None:
        self.failures += 1
        if sink.has_failed:
            return
        sink.has_failed = True
        with suppress(Exception):  # rule 5: a filter of the log is the user's, and raises what it likes
            what = "the statistics sink %r failed; later failures are only counted"
            _logger.error(what, sink.tell, exc_info=failure)


def _log(statistics: ClientStatistics, former: ClientStatistics | None) -> None:
    interval_s = max(statistics.taken_s - former.taken_s, 1e-9) if former else math.inf
    prompt = statistics.prompt_tokens - (former.prompt_tokens if former else 0)
    generated = statistics.generation_tokens - (former.generation_tokens if former else 0)
    usages = [rank.kv_cache_usage for rank in statistics.ranks if rank.kv_cache_usage is not None]
    _logger.info(
        "client %s: avg prompt throughput %.1f tokens/s, avg generation throughput %.1f tokens/s, in flight %d reqs, "
        "waiting %d reqs, highest KV cache usage %s",
        statistics.client_id,
        prompt / interval_s,
        generated / interval_s,
        statistics.in_flight,
        statistics.waiting,
        f"{max(usages):.1%}" if usages else "unknown",
    )


class StatisticsReports:
    """Part of :class:`EngineClient`. Lifetime: the client's."""

    _reports: Reports

    def _take_statistics(self) -> ClientStatistics:
        raise NotImplementedError

    def stats(self) -> ClientStatistics:
        """The client's figures as they stand: what is in flight, what it has done, how each rank is. Asks no engine.

        Raises:
            ClientClosedError: the client has not been entered.
        """
        return self._take_statistics()

    async def do_log_stats(self) -> None:
        """Write the line of statistics and tell the sinks now, besides the interval; returns when the sinks have had
        it. Two lines in a row never say that nothing happens.

        Raises:
            ClientClosedError: the client has not been entered.

        Cancellation: a sink that blocks keeps only its worker thread.
        """
        await self._reports.flush()
