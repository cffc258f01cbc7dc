"""What came of the suites: from pytest's junit files to the table at the end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET


@dataclass
class Outcome:
    """One suite on one device."""

    device: str
    suite: str
    passed: int = 0
    failed: int = 0
    #: How many were skipped, by reason.
    skipped: Counter[str] = field(default_factory=Counter)
    #: Why it counts as failed, whatever its tests say.
    problem: str = ""

    @property
    def name(self) -> str:
        """What its files are named."""
        return f"{self.device}-{self.suite}"

    @property
    def bad(self) -> bool:
        """Whether it fails the run."""
        return bool(self.failed or self.problem)


def read_junit(outcome: Outcome, file: Path, status: int, *, empty_is_fine: bool) -> None:
    """Fill in an outcome from the file that pytest wrote, and pytest's exit status."""
    if status == 124:
        outcome.problem = "it was killed at its time limit"
    elif status not in {0, 1, 5}:
        outcome.problem = f"pytest ended with status {status}"
    try:
        cases = list(ET.parse(file).iter("testcase"))
    except (OSError, ET.ParseError) as error:
        outcome.problem = outcome.problem or f"no junit file to be read: {error}"
        return
    for case in cases:
        skip = case.find("skipped")
        # A test that failed, and failed again in its teardown, is one test.
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
        elif skip is not None:
            outcome.skipped[re.sub(r"^Skipped: ", "", skip.get("message", "no reason"))] += 1
        else:
            outcome.passed += 1
    if not cases and not empty_is_fine:
        outcome.problem = outcome.problem or "it ran no test"
    if status == 1 and not outcome.failed:
        outcome.problem = outcome.problem or "pytest ended with status 1, though no test failed"


def table(outcomes: Sequence[Outcome], traces: Sequence[str], seconds: float) -> str:
    """Lay out the table; its last line is in the form of pytest's."""
    lines = [f"{'device':8}{'suite':14}{'passed':>8}{'failed':>8}{'skipped':>9}"]
    for outcome in outcomes:
        skipped = outcome.skipped.total()
        lines.append(f"{outcome.device:8}{outcome.suite:14}{outcome.passed:8}{outcome.failed:8}{skipped:9}")
        if outcome.problem:
            lines.append(f"{'':8}FAILED: {outcome.problem}")
        lines += [f"{'':8}skipped {count}: {reason}" for reason, count in outcome.skipped.most_common()]
    if traces:
        lines += ["the kernel of the guest told of a fault:", *(f"{'':8}{line}" for line in traces)]
    passed = sum(outcome.passed for outcome in outcomes)
    # A suite that failed as a whole is at least one failure.
    failed = sum(outcome.failed or outcome.bad for outcome in outcomes)
    skipped = sum(outcome.skipped.total() for outcome in outcomes)
    lines.append(f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.1f}s")
    return "\n".join(lines)
