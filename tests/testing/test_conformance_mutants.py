"""Every check can fail: an engine core with one fault fails the checks that look at it, and no others of their family.

One engine serves all faults of its traffic; each fault of a start or an end has an engine of its own.
"""

from __future__ import annotations

import anyio
import pytest
from engines import mutant

from anyengine.testing.conformance import Outcome, Report, run, select
from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.running import examine
from anyengine.testing.conformance.starting import open_engine
from anyengine.testing.conformance.traffic import Evidence

TRAFFIC = {
    "": "",
    "short message": "ENC-01",
    "short output": "ENC-02",
    "undecodable message": "ENC-03",
    "wrong engine index": "ENC-04",
    "surplus frame": "ENC-05",
    "wants all positions": "ENC-06",
    "wants no further positions": "ENC-08",
    "wants known keys": "ENC-09",
    "wants floats": "ENC-10",
    "wants narrow forms": "ENC-11",
    "max_tokens is 5 by default": "ENC-12",
    "written defaults differ": "ENC-13",
    "wants no further frames": "ENC-14",
    "tokens of the hour": "REQ-01 REQ-02 REQ-12",
    "tokens of the batch": "REQ-02",
    "no prompt of one token": "REQ-03 REQ-04",
    "always the same tokens": "REQ-04",
    "ids cut short": "REQ-06",
    "ids only once": "REQ-07",
    "outputs to client 0": "REQ-08",
    "no trace headers": "REQ-09",
    "aborts nothing at once": "REQ-10",
    "stops at a stop string": "REQ-12",
    "no answer without parameters": "REQ-13",
    "no answer without max_tokens": "REQ-14 REQ-15",
    "an error ends all": "REQ-15",
    "structure ignored": "REQ-16",
    "one token too many": "STP-01 STP-07 STP-08",
    "no eos": "STP-02 STP-05",
    "stop reason with length": "STP-01 STP-03",
    "no stop ids": "STP-04 STP-06",
    "no stop reason": "STP-04 STP-06 STP-09",
    "stop token left out": "STP-02 STP-04 STP-05 STP-06",
    "no min_tokens": "STP-07 STP-08",
    "seeds add up": "SMP-01 SMP-02",
    "no seed": "SMP-03",
    "no top_k": "SMP-05",
    "no logit_bias": "SMP-06 SMP-07",
    "no allowed_token_ids": "SMP-08",
    "no bad words": "SMP-09",
    "stray output": "OUT-01",
    "output after finish": "OUT-02",
    "output without news": "OUT-03",
    "only at the end": "OUT-03",
    "time goes back": "OUT-04",
    "finish reason 9": "OUT-05",
    "statistics with a reply": "OUT-06",
    "too many running": "OUT-07",
    "no last statistics": "OUT-07",
    "negative usage": "OUT-08",
    "prefill statistics of a longer prompt": "OUT-09",
    "prefill statistics again": "OUT-09",
    "events out of order": "OUT-10",
    "weights without a name": "OUT-12",
    "transfer data": "OUT-13",
    "aborts are answered": "ABT-01 ABT-02 ABT-03 ABT-06 | ABT-08 ABT-10",
    "aborts end the batch": "ABT-01 ABT-02 ABT-03 ABT-09 | ABT-06 ABT-07 ABT-08 ABT-10",
    "aborts of unknown ids are for all": "ABT-03",
    "never reset": "ABT-10",
    "no tasks": "UTL-01",
    "sleeping is 0": "UTL-02 UTL-15",
    "paused is nil": "UTL-03 UTL-16",
    "reset says yes": "UTL-05",
    "weights are a number": "UTL-07 UTL-13",
    "unknown is fine": "UTL-14 UTL-23",
    "arguments are cut": "UTL-15",
    "a bad pause pauses": "UTL-16",
    "call ids of 32 bits": "UTL-18",
    "replies to client 0": "UTL-20",
    "never paused": "PAU-01",
    "pause does nothing": "PAU-01 PAU-02 PAU-03 PAU-04 PAU-05 | PAU-06",
    "wait is keep": "PAU-03",
    "keep is wait": "PAU-07",
    "a pause refuses": "PAU-05 | PAU-06",
    "waiting is not aborted": "PAU-06",
    "resume fails when not paused": "PAU-08",
}
"""What is wrong with the engine, and the checks that say so; behind the bar those that may, as things happen."""


def failed(report: Report) -> str:
    return " ".join(result.check_id for result in report.of(Outcome.FAILED))


async def judge(link: EngineLink, fault: str, expected: str) -> str:
    """What fails in the families of ``expected`` (in all of them, if nothing should) while the engine has ``fault``."""
    families = [f"{check_id.partition('-')[0]}-*" for check_id in expected.split() if check_id != "|"]
    await link.call("mutate", fault)
    link.evidence = Evidence(link.rank)
    report = await examine(link, [check for check in select(families) if not check.handshake])
    await link.call("mutate", "")
    await link.settle()
    return failed(report)


@pytest.mark.feature("P06")
def test_each_fault_fails_its_checks() -> None:
    """On one loop: what is tested is what checks conclude."""
    wrong: dict[str, str] = {}

    async def main() -> None:
        async with open_engine(mutant(), patience_s=1.0) as link:
            for fault, expected in TRAFFIC.items():
                found = await judge(link, fault, expected)
                must, _, may = expected.partition("|")
                if not set(must.split()) <= set(found.split()) <= {*must.split(), *may.split()}:
                    wrong[fault] = found

    anyio.run(main, backend="asyncio")
    assert not wrong


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", ""),
        ("exit", "HS-01"),
        ("no ready", "HS-01"),
        ("wrong identity", "HS-02 HS-03"),
        ("hello without headless", "HS-04 HS-05"),
        ("not local", "HS-05"),
        ("early ready", "HS-04 HS-06 | HS-07"),
        ("surplus handshake", "HS-07"),
        ("registers twice", "HS-08"),
        ("misses keys", "HS-10"),
        ("max_model_len 0", "HS-11"),
        ("torch.float32", "HS-11"),
        ("wrong rank", "HS-12"),
    ],
)
def test_each_fault_of_the_start(fault: str, expected: str) -> None:
    async def main() -> Report:
        return await run(mutant(fault), only=["HS-*"], startup_timeout_s=1.5 if fault == "no ready" else 30)

    must, _, may = expected.partition("|")
    found = failed(anyio.run(main, backend="trio")).split()
    assert set(must.split()) <= set(found) <= {*must.split(), *may.split()}


@pytest.mark.parametrize(
    ("fault", "only", "expected"),
    [
        ("", "END-*", ""),
        ("exit code 3", "END-0[12]", "END-01 END-02"),
        ("last word", "END-0[12]", "END-01 END-02"),
        ("no last outputs", "END-0[12]", "END-02"),
        ("leaves a child", "END-0[34]", "END-03 END-04"),
        ("ignores the end of its host", "END-05", "END-05"),
    ],
)
def test_each_fault_of_the_end(fault: str, only: str, expected: str) -> None:
    async def main() -> Report:
        return await run(mutant(fault), only=[only], destructive=True, patience_s=2.0)

    assert failed(anyio.run(main, backend="asyncio")) == expected


@pytest.mark.parametrize(
    ("fault", "check_id", "words"),
    [
        ("deaf", "MAL-04", "deaf: it lives, and has closed its input sockets"),
        ("dead", "MAL-04", "dead: it sent ENGINE_CORE_DEAD to clients [0, 1]"),
        ("mute", "MAL-11", "mute: it lives, and has closed its output sockets"),
    ],
)
def test_it_tells_deaf_from_mute_from_dead(fault: str, check_id: str, words: str) -> None:
    """And, as far as vLLM's engine cores are known to do the same, calls it a deviation."""

    async def main(vllm_deviations: bool) -> Report:
        return await run(
            mutant(fault), only=[check_id], destructive=True, vllm_deviations=vllm_deviations, patience_s=5.0
        )

    (result,) = anyio.run(main, False, backend="trio").results
    assert (result.check_id, result.outcome) == (check_id, Outcome.FAILED)
    assert words in result.detail
    (result,) = anyio.run(main, True, backend="asyncio").results
    assert result.outcome is (Outcome.FAILED if fault == "dead" else Outcome.DEVIATES)
