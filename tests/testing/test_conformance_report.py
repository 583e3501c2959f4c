"""Reports: JUnit XML that parsers take whatever an engine said, JSON, the summary, the table of deviations."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from anyengine.testing.conformance import CheckResult, Outcome, Report, deviations_of, registered
from anyengine.testing.conformance.deviations import DEVIATIONS, known_deviation

ODD = 'a < b & "c" ]]> \x00\x08\x1b[31m \ud800 \ufffe 中文 \N{GRINNING FACE}\nsecond line'


def report() -> Report:
    found = Report(f"engine {ODD}", {f"key {ODD}": ODD})
    for number, outcome in enumerate(Outcome):
        found.results.append(CheckResult(f"ENC-{number:02}", f"title {ODD}", "protocol.md §6", outcome, ODD, 0.25))
    found.results.append(CheckResult("END-01", "the end", "protocol.md §13", Outcome.PASSED))
    return found


def test_junit_is_xml_whatever_an_engine_said() -> None:
    root = ET.fromstring(report().to_junit())
    assert root.tag == "testsuites"
    assert root.attrib == {
        "name": "anyengine check", "tests": "5", "failures": "1", "errors": "0", "skipped": "2", "time": "1.000",
    }  # fmt: skip
    assert [suite.attrib["name"] for suite in root] == ["ENC", "END"]
    cases = {case.attrib["name"][:6]: case for case in root.iter("testcase")}
    assert set(cases) == {"ENC-00", "ENC-01", "ENC-02", "ENC-03", "END-01"}
    assert {name: [child.tag for child in case] for name, case in cases.items()} == {
        "ENC-00": ["properties"],
        "ENC-01": ["properties", "failure"],
        "ENC-02": ["properties", "skipped"],
        "ENC-03": ["properties", "skipped"],
        "END-01": ["properties"],
    }
    failure = cases["ENC-01"].find("failure")
    assert failure is not None and failure.text is not None
    assert 'a < b & "c" ]]> \\x00\\x08\\x1b[31m \\xd800' in failure.text
    assert "\N{GRINNING FACE}\nsecond line" in failure.text
    deviation = cases["ENC-02"].find("skipped")
    assert deviation is not None and deviation.attrib["message"].startswith("known deviation: ")
    properties = {item.attrib["name"]: item.attrib["value"] for item in cases["ENC-02"].iter("property")}
    assert properties == {"source": "protocol.md §6", "outcome": "deviates"}


def test_json_and_summary() -> None:
    found = report()
    found.engine, found.facts = "an engine", {"vllm_version": "0.32.0"}
    found.results = [result for result in found.results if result.check_id != "ENC-01"]
    content = json.loads(Report("an engine", found.facts, found.results[-1:]).to_json())
    assert content == {
        "engine": "an engine",
        "ok": True,
        "summary": "1 checks: 1 passed (0.0 s)",
        "facts": {"vllm_version": "0.32.0"},
        "results": [
            {
                "check_id": "END-01", "title": "the end", "source": "protocol.md §13", "outcome": "passed",
                "detail": "", "seconds": 0.0,
            }
        ],
    }  # fmt: skip
    assert report().summary() == "5 checks: 2 passed, 1 failed, 1 deviates, 1 skipped (1.0 s)"


def test_a_failure_is_an_assertion_for_pytest() -> None:
    with pytest.raises(AssertionError, match="ENC-01"):
        report().raise_for_failures()
    assert not report().ok


def test_deviations_are_of_checks_that_exist_and_hold_for_their_failure_alone() -> None:
    assert {deviation.check_id for deviation in DEVIATIONS} <= {check.check_id for check in registered()}
    assert all(deviation.reason for deviation in DEVIATIONS)
    release = (0, 32, 0)
    assert set(deviations_of(release)) <= set(DEVIATIONS)
    assert known_deviation("MAL-04", release, "deaf: it lives, and has closed its input sockets") is not None
    assert known_deviation("MAL-04", release, "dead: it sent ENGINE_CORE_DEAD to clients [0, 1]") is None
    assert known_deviation("REQ-01", release, "deaf") is None
    assert deviations_of((0, 11, 0)) == []
