"""The report of a run: results and what the engine said of itself, as text, JSON and JUnit XML.

Owns the formats. Knows no engine and no terminal.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import msgspec

from .outcomes import CheckResult, Outcome

if TYPE_CHECKING:
    from .engine_link import EngineLink

__all__ = ["Report"]

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no place for, escaped or not."""


@dataclass
class Report:
    """What a run has shown. ``engine`` says in words what was checked, ``facts`` what the engine said of itself."""

    engine: str
    facts: dict[str, str] = field(default_factory=dict)
    results: list[CheckResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing failed. Known deviations and skipped checks are no failures."""
        return not self.of(Outcome.FAILED)

    def of(self, outcome: Outcome) -> list[CheckResult]:
        """The results with this outcome, in the order of the checks."""
        return [result for result in self.results if result.outcome is outcome]

    def summary(self) -> str:
        """One line: how many checks had which outcome."""
        counts = Counter(result.outcome for result in self.results)
        parts = [f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome]]
        seconds = sum(result.seconds for result in self.results)
        return f"{len(self.results)} checks: {', '.join(parts) or 'none'} ({seconds:.1f} s)"

    def raise_for_failures(self) -> None:
        """For use in a test.

        Raises:
            AssertionError: a check failed; all that did are named.
        """
        failed = self.of(Outcome.FAILED)
        if failed:
            lines = [f"  {result.check_id} {result.title}: {result.detail}" for result in failed]
            raise AssertionError("\n".join([f"{self.engine}: {self.summary()}", *lines]))

    def learn(self, link: EngineLink) -> None:
        """Keep what the engine said of itself when it registered."""
        registration = link.registration
        if registration is not None:
            self.facts = {name: str(value) for name, value in registration.received.items()}
        self.facts["spoken to as"] = link.dialect.releases

    def to_json(self) -> bytes:
        """One JSON object: engine, facts, summary, ok, results."""
        results = [{**asdict(result), "outcome": result.outcome.value} for result in self.results]
        content = {
            "engine": self.engine,
            "ok": self.ok,
            "summary": self.summary(),
            "facts": self.facts,
            "results": results,
        }
        return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"

    def to_junit(self) -> bytes:
        """JUnit XML: a suite for each family of checks. A known deviation counts as skipped, with its reason."""
        root = ET.Element("testsuites", name="anyengine check")
        families: dict[str, list[CheckResult]] = {}
        for result in self.results:
            families.setdefault(result.check_id.partition("-")[0], []).append(result)
        for family, results in families.items():
            suite = ET.SubElement(root, "testsuite", {"name": family, **_counts(results)})
            properties = ET.SubElement(suite, "properties")
            for name, value in {"engine": self.engine, **self.facts}.items():
                ET.SubElement(properties, "property", name=_clean(name), value=_clean(value))
            for result in results:
                _add_case(suite, family, result)
        root.attrib.update(_counts(self.results))
        text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
        return text + b"\n"


def _counts(results: list[CheckResult]) -> dict[str, str]:
    counts = Counter(result.outcome for result in results)
    return {
        "tests": str(len(results)),
        "failures": str(counts[Outcome.FAILED]),
        "errors": "0",
        "skipped": str(counts[Outcome.SKIPPED] + counts[Outcome.DEVIATES]),
        "time": f"{sum(result.seconds for result in results):.3f}",
    }


def _add_case(suite: ET.Element, family: str, result: CheckResult) -> None:
    case = ET.SubElement(
        suite,
        "testcase",
        classname=f"conformance.{family}",
        name=_clean(f"{result.check_id} {result.title}"),
        time=f"{result.seconds:.3f}",
    )
    properties = ET.SubElement(case, "properties")
    for name, value in (("source", result.source), ("outcome", result.outcome.value)):
        ET.SubElement(properties, "property", name=name, value=_clean(value))
    detail = _clean(result.detail)
    if result.outcome is Outcome.FAILED:
        ET.SubElement(case, "failure", message=detail.partition("\n")[0]).text = detail
    elif result.outcome is Outcome.DEVIATES:
        ET.SubElement(case, "skipped", message=f"known deviation: {detail}")
    elif result.outcome is Outcome.SKIPPED:
        ET.SubElement(case, "skipped", message=detail)


def _clean(text: str) -> str:
    """``text`` with what XML cannot carry spelled out."""
    return _NOT_XML.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
