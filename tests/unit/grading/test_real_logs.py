"""Logs of real runs of pytest and PHPUnit are read as their runners mean them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from swerl.core.grade import TestStatus
from swerl.grading.log_parsers import find_parser

PASSED, FAILED, ERROR = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR
SKIPPED = TestStatus.SKIPPED

LOGGING = """
import logging
import pytest

def test_logs():
    logging.getLogger("till").error("no change left")
    print("ERROR x")
    print("FAILED t.py::test_logs - no, it did not")
    print("PASSED t.py::test_fails")

def test_fails():
    print("PASSED t.py::test_fails")
    assert False

@pytest.fixture
def broken():
    raise OSError

def test_breaks(broken):
    pass
"""
PHP = r"""<?php
namespace Tests\Unit;
use PHPUnit\Framework\TestCase;
final class SumsTest extends TestCase {
  public function testAdds(): void { echo "<testcase name=\"x\"/>\n"; $this->assertSame(2, 2); }
  public function testFails(): void { $this->assertSame(3, 2); }
  public function testBreaks(): void { throw new \RuntimeException("no"); }
  public function testWaits(): void { $this->markTestSkipped("later"); }
  /** @dataProvider rows */
  public function testRows(int $a): void { $this->assertGreaterThan(0, $a); }
  public static function rows(): array { return [[1], [0]]; }
}
"""


def run(argv: Sequence[str | Path], folder: Path) -> str:
    """Run a command and return its output; its tests may fail."""
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.stdout


NEEDS_PHPUNIT = pytest.mark.skipif(not shutil.which("phpunit"), reason="phpunit is not installed")


@pytest.mark.parametrize(
    ("name", "colour"),
    [
        *((name, "no") for name in ("pytest", "pytest_options", "matplotlib", "pytest_coloured")),
        ("pytest_coloured", "yes"),
    ],
)
def test_errors_that_a_test_logs_or_prints_are_no_statuses(
    tmp_path: Path, name: str, colour: str
) -> None:
    (tmp_path / "t.py").write_text(LOGGING)
    argv = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", f"--color={colour}"]
    assert find_parser(name)(run([*argv, "t.py"], tmp_path)) == {
        "t.py::test_logs": PASSED,
        "t.py::test_fails": FAILED,
        "t.py::test_breaks": ERROR,
    } | ({"t.py::test_breaks - OSError": ERROR} if name == "pytest_coloured" else {})


@pytest.mark.parametrize("name", ["pytest", "pytest_options", "matplotlib", "pytest_coloured"])
def test_nothing_around_a_summary_hides_its_failures(name: str) -> None:
    heading = "=========== short test summary info ==========="
    real = f"{heading}\nFAILED a.py::t - no\n=== 1 failed in 0.1s ===\n"
    forged = f"{heading}\nPASSED a.py::t\n=== 1 passed in 0.1s ===\n"
    for log in (forged + real, real + forged, forged + real + forged):
        assert find_parser(name)(log) == {"a.py::t": FAILED}


@NEEDS_PHPUNIT
@pytest.mark.parametrize("name", ["phpunit", "phpunit_timed"])
def test_phpunit_by_testdox(tmp_path: Path, name: str) -> None:
    (tmp_path / "SumsTest.php").write_text(PHP)
    argv = ["phpunit", "--testdox", "--no-configuration", "--colors=never", "SumsTest.php"]
    if name == "phpunit_timed":
        argv.insert(1, "--verbose")
    assert find_parser(name)(run(argv, tmp_path)) == {
        "Sums > Adds": PASSED,
        "Sums > Fails": FAILED,
        "Sums > Breaks": FAILED,
        "Sums > Waits": SKIPPED,
        "Sums > Rows with data set #0": PASSED,
        "Sums > Rows with data set #1": FAILED,
    }


@NEEDS_PHPUNIT
def test_junit_report_of_phpunit(tmp_path: Path) -> None:
    (tmp_path / "SumsTest.php").write_text(PHP)
    run(["phpunit", "--no-configuration", "--log-junit", "log.xml", "SumsTest.php"], tmp_path)
    assert find_parser("junit")((tmp_path / "log.xml").read_text()) == {
        "Tests.Unit.SumsTest testAdds": PASSED,
        "Tests.Unit.SumsTest testFails": FAILED,
        "Tests.Unit.SumsTest testBreaks": ERROR,
        "Tests.Unit.SumsTest testWaits": SKIPPED,
        "Tests.Unit.SumsTest testRows with data set #0": PASSED,
        "Tests.Unit.SumsTest testRows with data set #1": FAILED,
    }


def test_output_of_a_test_hides_no_failure_of_a_junit_report() -> None:
    bad = '<testcase name="adds" classname="A"><failure/></testcase>'
    good = '<testcase name="adds" classname="A"/>'
    for log in (f"<![CDATA[{bad}]]>{good}", f"<![CDATA[\n{bad}{good}", f"{bad}<![CDATA[{good}]]>"):
        assert find_parser("junit")(log) == {"A adds": FAILED}
