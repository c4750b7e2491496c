"""Judge a test log inside a Harbor task's own image, with any Python from 3.7 on.

    python judge.py SPEC LOG

Says 1 where every declared test passed, and 0 otherwise. A test that is not reported failed. An id
with an open bracket stands for every test that it begins.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL) +(\S+)")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
GOOD = {"PASSED", "XFAIL"}


def main(spec: str, log: str) -> int:
    """Return the reward."""
    declared = json.loads(Path(spec).read_text(encoding="utf-8"))
    statuses_by_test = statuses(Path(log).read_text(encoding="utf-8", errors="replace"))
    for column, accepted in (("fail_to_pass", GOOD), ("pass_to_pass", GOOD | {"SKIPPED"})):
        for name in declared[column]:
            reported = status(name, statuses_by_test)
            if not reported or not reported <= accepted:
                return 0
    return 1


def statuses(log: str) -> dict[str, str]:
    """Return the status of each test of pytest's summary; the last line about one counts."""
    matches = (LINE.match(COLOUR.sub("", line)) for line in log.split("\n"))
    return {match.group(2): match.group(1) for match in matches if match}


def status(name: str, statuses_by_test: dict[str, str]) -> set[str]:
    """Return every status that was reported for a declared test."""
    if name in statuses_by_test:
        return {statuses_by_test[name]}
    if name.count("[") > name.count("]"):
        return {reported for test, reported in statuses_by_test.items() if test.startswith(name)}
    return set()


if __name__ == "__main__":
    sys.stdout.write(f"{main(*sys.argv[1:])}\n")
