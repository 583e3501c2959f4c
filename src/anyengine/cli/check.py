"""``anyengine check``: runs the conformance suite and shows what it finds.

Owns the terminal's table, the report files and the exit code of this command. Decides nothing about engines: the
suite (:mod:`anyengine.testing.conformance`) does.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import anyio

from anyengine.cli.rendering import StartupProgress
from anyengine.cli.run import until_signal
from anyengine.testing.conformance import FAMILIES, Report, run, select
from anyengine.testing.conformance.outcomes import NOT_READY, Outcome

if TYPE_CHECKING:
    from anyengine.cli.check_options import CheckOptions
    from anyengine.testing.conformance import CheckResult, EngineTarget

__all__ = ["ResultTable", "check_engine"]

_MARKS = {Outcome.PASSED: "pass", Outcome.FAILED: "FAIL", Outcome.DEVIATES: "known", Outcome.SKIPPED: "skip"}
_SIGNAL = 128


class ResultTable:
    """Writes a line for each result, and a heading for each family. With ``quiet`` only what failed. What is skipped
    because the engine does not run is one line: the one failure shall be seen."""

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        self._stream = stream
        self._quiet = quiet
        self._family = ""
        self._started = True

    def add(self, result: CheckResult) -> None:
        """Show ``result``."""
        if self._quiet and result.outcome is not Outcome.FAILED:
            return
        if result.outcome is Outcome.SKIPPED and result.detail == NOT_READY:
            if self._started:
                print(f"\n  {_MARKS[result.outcome]:5} everything else: {NOT_READY}", file=self._stream)
            self._started = False
            return
        family = result.check_id.partition("-")[0]
        if family != self._family and not self._quiet:
            self._family = family
            print(f"\n{FAMILIES.get(family, family)}", file=self._stream)
        print(f"  {_MARKS[result.outcome]:5} {result.check_id:7} {result.title}", file=self._stream)
        if result.detail and result.outcome is not Outcome.PASSED:
            print(textwrap.indent(textwrap.fill(result.detail, 104), " " * 16), file=self._stream)
        if result.outcome is Outcome.FAILED:
            print(f"{' ' * 16}see {result.source}", file=self._stream)
        self._stream.flush()


def check_engine(options: CheckOptions, target: EngineTarget) -> int:
    """Run the checks, show and write the report; the exit code.

    Raises:
        ValueError: no check fits the patterns.
        OSError: the engine's program cannot be started, or a report cannot be written.
    """
    selected = select(options.only, destructive=options.destructive or options.list)
    if not selected:
        raise ValueError(f"no check fits {options.only}: see --list (malformed input and the end need --destructive)")
    if options.list:
        for check in selected:
            print(f"{check.check_id:7} {check.title}  [{check.source}]")
        return 0
    for path in filter(None, (options.junit, options.json)):
        Path(path).touch()  # now, rather than after minutes of checking
    report: Report | None = None

    async def job() -> None:
        nonlocal report
        report = await _checked(options, target)

    number = anyio.run(
        until_signal,
        job,
        backend=options.backend,
        backend_options={"use_uvloop": True} if options.uvloop else {},
    )
    if number is not None or report is None:
        print("\nanyengine: interrupted; the engine has been stopped, no report was written", file=sys.stderr)
        return _SIGNAL + (number or 0)
    if options.junit:
        Path(options.junit).write_bytes(report.to_junit())
    if options.json:
        Path(options.json).write_bytes(report.to_json())
    print(
        f"\n{report.engine}, spoken to as {report.facts.get('spoken to as', 'an unknown release')}\n{report.summary()}"
    )
    return 0 if report.ok else 1


async def _checked(options: CheckOptions, target: EngineTarget) -> Report:
    progress = None if options.quiet else StartupProgress(sys.stderr)
    table = ResultTable(sys.stdout, quiet=options.quiet)
    if options.attach and not options.quiet:
        print(f"anyengine: waiting for an engine at {options.attach}", file=sys.stderr, flush=True)
    try:
        return await run(
            target,
            only=options.only,
            destructive=options.destructive,
            vllm_deviations=options.vllm_deviations,
            rank=options.rank,
            startup_timeout_s=options.startup_timeout,
            patience_s=options.patience,
            on_progress=progress.report if progress else None,
            on_result=table.add,
        )
    except anyio.BrokenResourceError as error:
        raise ValueError(f"attach={options.attach!r}: cannot listen there: {error}") from error
    finally:
        if progress is not None:
            progress.close()
