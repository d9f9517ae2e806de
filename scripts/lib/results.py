"""Reads what the test programs report: JUnit XML, as googletest, ctest and pytest write it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Outcome:
    """What a stage did. `passed` counts single tests, `failed` names them, `skipped` gives (name, reason).

    `made` says what came of a stage that does not test: "41 programs".
    """

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    made: str = ""
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def read_junit(path: Path, strip: str = "", between: str = "::") -> dict[str, Outcome]:
    """A JUnit file: test name -> an Outcome of that single test.

    `strip` is taken off the front of class names, `between` stands between class and test.
    """
    tests: dict[str, Outcome] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = case.get("name", "?")
        group = (case.get("classname") or "").removeprefix(strip)
        full = name if not group or group == name else f"{group}{between}{name}"
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if bad is not None or case.get("status") == "fail":
            tests[full] = Outcome(failed=[full])
        elif skip is not None or case.get("status") in ("disabled", "notrun"):
            reason = skip.get("message", "") if skip is not None else "disabled"
            tests[full] = Outcome(skipped=[(full, _last_line(reason))])
        else:
            tests[full] = Outcome(passed=1)
    return tests


def read_googletest(path: Path) -> Outcome:
    """One file written by a googletest program through GTEST_OUTPUT=xml: (its JSON does not say why a test was skipped)."""
    outcome = Outcome()
    for test in read_junit(path, between=".").values():
        outcome.add(test)
    return outcome


def merge_ctest(junit: Path, details: Path) -> Outcome:
    """ctest's own verdicts, with each googletest program replaced by its single tests.

    `details` is the folder where the programs left their own reports. A program that crashed or timed out left none (or
    one without the failure): then ctest's verdict on the program counts as one failed test.
    """
    outcome = Outcome()
    reports = {path.stem: read_googletest(path) for path in sorted(details.glob("*.xml"))}
    for name, verdict in read_junit(junit).items():
        report = reports.get(name)
        if report is None or (verdict.failed and not report.failed):
            outcome.add(verdict)
        else:
            outcome.add(report)
    return outcome
