"""One run: start the engine, let each check have it, judge what comes, start another one if a check has broken it.

Owns the order, the limits and the judgement by the table of known deviations. Knows no check by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from anyengine._process.status import Status
from anyengine._wire.layouts import Release
from anyengine.config import VLLMEngine

from .deviations import known_deviation
from .engine_link import EngineLink
from .outcomes import NOT_READY, CheckFailed, CheckResult, CheckSkipped, Outcome
from .registry import Check, select
from .report import Report
from .starting import AttachedEngine, EngineTarget, open_engine

__all__ = ["examine", "run"]

_MAX_RESTARTS = 5
"""How often a fresh engine replaces one that a harmless check has broken: one that breaks at everything is told so."""


async def run(
    target: EngineTarget,
    *,
    only: Sequence[str] = (),
    destructive: bool = False,
    vllm_deviations: bool | None = None,
    rank: int = 0,
    startup_timeout_s: float = 120.0,
    patience_s: float = 20.0,
    on_progress: Callable[[Status], None] | None = None,
    on_result: Callable[[CheckResult], None] | None = None,
) -> Report:
    """Check an engine core; the report has one result for each check.

    Args:
        target: what to start, or to wait for.
        only: patterns of check ids, or parts of ids or titles; empty: all checks.
        destructive: also run the checks that may hurt the engine or end it. Each gets a fresh engine, unless the one
            before it survived.
        vllm_deviations: whether failures that are known of vLLM's releases count as deviations; by default, if
            ``target`` is a :class:`~anyengine.VLLMEngine`.
        rank: the data-parallel index that the engine is started with.
        startup_timeout_s: how long a start may take.
        patience_s: how long a check waits for any one message.
        on_progress: called with each start-up stage.
        on_result: called with each result, as it comes.

    Raises:
        OSError: the program cannot be started.
        ValueError: an address to attach to that cannot be used.
        BrokenResourceError: an address that cannot be bound.

    Cancellation: at any point; every process is gone before it propagates.
    """
    known = isinstance(target, VLLMEngine) if vllm_deviations is None else vllm_deviations
    pending = select(only, destructive=destructive)
    state = _Run(Report(_described(target)), known, on_result)
    restarts_left = _MAX_RESTARTS
    while pending:
        async with open_engine(
            target, rank=rank, startup_timeout_s=startup_timeout_s, patience_s=patience_s, on_progress=on_progress
        ) as link:
            state.report.learn(link)
            if link.start.failure is not None:
                await _judge_start(state, link, pending)
                break
            broken_by = await _examine(link, pending, state)
        if broken_by is None:
            break
        if not broken_by.destructive:
            restarts_left -= 1
        if isinstance(target, AttachedEngine) or restarts_left < 0:
            state.skip(pending, f"the engine did not outlive {broken_by.check_id}")
            break
    return state.report


@dataclass
class _Run:
    """What a run has come to so far."""

    report: Report = field(default_factory=lambda: Report("an engine"))
    vllm_deviations: bool = False
    on_result: Callable[[CheckResult], None] | None = None

    def add(self, check: Check, outcome: Outcome, detail: str = "", seconds: float = 0.0) -> None:
        result = CheckResult(check.check_id, check.title, check.source, outcome, detail, seconds)
        self.report.results.append(result)
        if self.on_result is not None:
            self.on_result(result)

    def skip(self, checks: list[Check], reason: str) -> None:
        for check in checks:
            self.add(check, Outcome.SKIPPED, reason)
        checks.clear()

    def judge(self, check: Check, error: Exception | None, release: Release, seconds: float) -> None:
        if error is None:
            self.add(check, Outcome.PASSED, seconds=seconds)
        elif isinstance(error, CheckSkipped):
            self.add(check, Outcome.SKIPPED, str(error), seconds)
        elif not isinstance(error, CheckFailed):  # what came was so odd that the check stumbled over it
            self.add(check, Outcome.FAILED, f"the check stumbled: {type(error).__name__}: {error}", seconds)
        elif self.vllm_deviations and (known := known_deviation(check.check_id, release, error.got)) is not None:
            self.add(check, Outcome.DEVIATES, f"{known.reason} ({error})", seconds)
        else:
            self.add(check, Outcome.FAILED, str(error), seconds)


async def examine(link: EngineLink, checks: Sequence[Check]) -> Report:
    """Run ``checks`` on an engine that runs already, as far as it goes along.

    Cancellation: between two messages; the engine keeps what was sent.
    """
    state = _Run()
    await _examine(link, list(checks), state)
    return state.report


async def _examine(link: EngineLink, pending: list[Check], state: _Run) -> Check | None:
    """Take each of ``pending`` and run it. The check that broke the engine, or ``None`` if all are done."""
    while pending:
        check = pending.pop(0)
        began_s = anyio.current_time()
        error = await _attempt(link, check)
        broken: CheckFailed | None = None
        if not check.handshake:
            try:
                await link.settle()
            except CheckFailed as exc:
                broken = exc
        if broken is not None and error is None and not check.destructive:
            error = CheckFailed("after the check", expected="the engine goes on", got=link.trouble or str(broken))
        state.judge(check, error, link.release, anyio.current_time() - began_s)
        if broken is not None or (check.destructive and link.lost_links):
            return check
    return None


async def _attempt(link: EngineLink, check: Check) -> Exception | None:
    """How the check failed, or ``None``."""
    if check.since is not None and link.release < check.since:
        return CheckSkipped(f"new in vLLM {'.'.join(map(str, check.since))}")
    try:
        await check.run(link)
    except Exception as exc:  # noqa: BLE001 - one check's trouble is one check's result
        return exc
    return None


async def _judge_start(state: _Run, link: EngineLink, pending: list[Check]) -> None:
    """The engine did not become ready: only the checks of the start itself have something to look at."""
    for check in [check for check in pending if check.handshake]:
        pending.remove(check)
        state.judge(check, await _attempt(link, check), link.release, 0.0)
    state.skip(pending, NOT_READY)


def _described(target: EngineTarget) -> str:
    if isinstance(target, AttachedEngine):
        return f"engine attached at {target.address}"
    if isinstance(target, VLLMEngine):
        return f"vLLM's engine core with {target.model}"
    argv = getattr(target, "argv", None)
    return f"engine started by {' '.join(argv)}" if argv else f"embedded engine with {target.model}"  # type: ignore[union-attr]
