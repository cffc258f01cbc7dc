"""The pure parts of the harness of make test-rdma: what it takes from apt, the image's name, the table at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vm.guest import TRACE
from tests.vm.host import find_mirror
from tests.vm.image import recipe, recipe_hash
from tests.vm.suites import DEVICES, SUITES
from tests.vm.summary import Outcome, read_junit, table

JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="no"/></testcase>
<testcase name="b"><error message="teardown"/></testcase>
<testcase name="c"><skipped type="pytest.skip" message="siw has no atomics"/></testcase>
<testcase name="d"><skipped type="pytest.skip" message="siw has no atomics"/></testcase>
</testsuite></testsuites>"""


def junit(tmp_path: Path, text: str, status: int, *, empty_is_fine: bool = False) -> Outcome:
    """Read a junit file of this text."""
    file = tmp_path / "junit.xml"
    file.write_text(text)
    outcome = Outcome("siw", "conformance")
    read_junit(outcome, file, status, empty_is_fine=empty_is_fine)
    return outcome


def test_junit_is_counted(tmp_path: Path) -> None:
    """Passed, failed, erred and skipped tests are told apart, and reasons are grouped."""
    outcome = junit(tmp_path, JUNIT, 1)
    assert (outcome.passed, outcome.failed, outcome.problem) == (1, 2, "")
    assert outcome.skipped == {"siw has no atomics": 2}
    assert outcome.bad


@pytest.mark.parametrize("status", [0, 5])
def test_no_test_is_a_failure(tmp_path: Path, status: int) -> None:
    """A suite that ran no test fails the run, unless tests were chosen by hand."""
    empty = "<testsuites><testsuite/></testsuites>"
    assert junit(tmp_path, empty, status).bad
    assert not junit(tmp_path, empty, status, empty_is_fine=True).bad


@pytest.mark.parametrize("status", [2, 124, 137])
def test_pytest_that_did_not_end_well_is_a_failure(tmp_path: Path, status: int) -> None:
    """A suite whose pytest was killed, or crashed, fails the run whatever its file says."""
    assert junit(tmp_path, '<testsuites><testcase name="a"/></testsuites>', status).bad


def test_status_without_a_failed_test_is_a_failure(tmp_path: Path) -> None:
    """An exit status of 1 fails the run though no test in the file failed."""
    assert junit(tmp_path, '<testsuites><testcase name="a"/></testsuites>', 1).bad


@pytest.mark.parametrize("text", ["", "<testsuites>"])
def test_cut_junit_is_a_failure(tmp_path: Path, text: str) -> None:
    """A file that isn't whole fails the run."""
    assert junit(tmp_path, text, 0).bad


def test_missing_junit_is_a_failure(tmp_path: Path) -> None:
    """A file that isn't there fails the run."""
    outcome = Outcome("soft", "conformance")
    read_junit(outcome, tmp_path / "none.xml", 0, empty_is_fine=True)
    assert outcome.bad


def test_total_counts_suites_that_failed_as_a_whole() -> None:
    """The last line adds up, in pytest's form; a suite that didn't run is one failure."""
    ran = Outcome("soft", "conformance", passed=3, failed=2)
    gone = Outcome("rxe", "conformance", problem="not run, as the guest ended")
    lines = table([ran, gone], ["BUG: here"], 1.25).splitlines()
    assert lines[-1] == "3 passed, 3 failed, 0 skipped in 1.2s"
    assert any("not run, as the guest ended" in line for line in lines)
    assert any("BUG: here" in line for line in lines)


def test_recipe_names_the_image() -> None:
    """The same recipe is the same image, and any change of it is another."""
    assert recipe_hash(recipe()) == recipe_hash(recipe())
    assert recipe_hash(recipe()) != recipe_hash(recipe() + " ")


def test_mirror_is_debians_own_archive() -> None:
    """Of apt's sources the one of Debian itself counts: neither its security archive nor another's."""
    targets = (
        "https://a.example/x Node Node\nhttps://b.example/s Debian Debian-Security\nhttps://c.example/d Debian Debian"
    )
    assert find_mirror(targets) == "https://c.example/d"
    assert find_mirror("https://a.example/ubuntu Ubuntu Ubuntu") is None


def test_suites_are_there_and_their_devices_known() -> None:
    """Each entry of the table names tests that exist, and devices that are defined."""
    for suite in SUITES:
        assert (Path(__file__).parents[2] / suite.path).exists(), suite.name
        assert set(suite.devices) <= set(DEVICES)
        assert set(suite.environment) <= set(suite.devices)


@pytest.mark.parametrize("line", ["[ 1.0] BUG: unable to handle page fault", "[ 1.0] WARNING: CPU: 0 PID: 1 at x"])
def test_kernel_faults_are_seen(line: str) -> None:
    """A line by which the kernel tells of a fault is taken for one."""
    assert TRACE.search(line)
