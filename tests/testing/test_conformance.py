"""The conformance suite on engines that are right: ours with a toy model on three loops, with a model, attached."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest
from engines import mutant, toy

from anyengine import CommandEngine
from anyengine.testing.conformance import FAMILIES, AttachedEngine, CheckResult, Outcome, registered, run, select

pytestmark = pytest.mark.anyio


def skipped(results: list[CheckResult]) -> set[str]:
    """The families that were skipped in part."""
    return {result.check_id.partition("-")[0] for result in results if result.outcome is Outcome.SKIPPED}


@pytest.mark.feature("P06")
async def test_our_engine_core_passes_all_of_it() -> None:
    """Malformed input and all three ways to end it included; without any deviation."""
    seen: list[CheckResult] = []
    with anyio.fail_after(120):
        report = await run(toy(max_num_seqs=64, step_delay_s=0.0005), destructive=True, on_result=seen.append)
    report.raise_for_failures()
    assert report.ok and report.results == seen
    assert [result.check_id for result in seen] == [check.check_id for check in registered()]
    assert not report.of(Outcome.DEVIATES)
    assert not skipped(seen) & {"HS", "REQ", "SMP", "ABT", "LOD", "END"}
    assert report.facts["max_num_seqs"] == "64"


async def test_any_rank() -> None:
    with anyio.fail_after(60):
        report = await run(toy(), rank=259, only=["HS-*", "ENC-04"])
    report.raise_for_failures()
    assert len(report.results) == 13


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def foreign() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An engine that connects to an address, and says that it is neither local nor with a front end."""
    address = f"tcp://127.0.0.1:{free_port()}"
    line = json.dumps({"handshake_address": address}).encode() + b"\n"
    process = subprocess.Popen(mutant("not local").argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()
    yield address, process
    process.kill()
    process.wait()
    process.stdin.close()


async def test_an_engine_that_somebody_else_starts(foreign: tuple[str, subprocess.Popen[bytes]]) -> None:
    """It is left running: it is not ours to stop."""
    address, process = foreign
    with anyio.fail_after(60):
        report = await run(AttachedEngine(address), only=["HS-*", "REQ-0*", "END-*"], destructive=True)
    report.raise_for_failures()
    assert process.poll() is None
    assert {result.detail for result in report.of(Outcome.SKIPPED)} == {"somebody else started this engine"}
    assert address in report.engine


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:1", "ipc:///x", "tcp://*:5", "tcp://host"])
async def test_an_address_that_no_engine_can_use(address: str) -> None:
    with pytest.raises(ValueError, match="HOST"):
        await run(AttachedEngine(address))


async def test_a_program_that_is_no_engine() -> None:
    """The report says how far it came; a program that is not there is an error."""
    with anyio.fail_after(30):
        report = await run(CommandEngine(argv=(sys.executable, "-c", "import sys; sys.exit('no engine')")))
    assert not report.ok
    (result,) = report.of(Outcome.FAILED)
    assert result.check_id == "HS-01"
    assert "exited with code 1" in result.detail and "no engine" in result.detail
    assert len(report.of(Outcome.SKIPPED)) == len(select()) - 1
    with pytest.raises(FileNotFoundError):
        await run(CommandEngine(argv=("/no/such/program",)))


async def test_cancelling_it_leaves_nothing() -> None:
    with anyio.move_on_after(0.7) as scope:
        await run(toy(step_delay_s=0.05))
    assert scope.cancelled_caught


def test_ids_are_unique_and_each_has_a_family() -> None:
    checks = registered()
    assert len({check.check_id for check in checks}) == len(checks) >= 80
    assert {check.family for check in checks} == set(FAMILIES)
    assert all(check.source and check.title for check in checks)
    assert {check.family for check in checks if check.destructive} == {"MAL", "END"}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [(["ABT-01"], {"ABT-01"}), (["abt-0[12]"], {"ABT-01", "ABT-02"}), (["storm"], {"ABT-10"}), (["no such"], set())],
)
def test_checks_are_selected(patterns: list[str], expected: set[str]) -> None:
    assert {check.check_id for check in select(patterns)} == expected
