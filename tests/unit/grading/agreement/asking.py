"""Run the swebench package on recorded logs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import referee
from .replay import Lists, Log


@dataclass(frozen=True)
class Theirs:
    """The package's result for a log and a case."""

    statuses: Mapping[str, str] | None
    resolved: bool
    passed: frozenset[str]


def ask(package: Path, logs: Sequence[Log], cases: Sequence[tuple[int, Lists]]) -> list[Theirs]:
    """Judge the cases by the package; `cases` hold the index of their log."""
    asked = {
        "logs": [{"path": str(log.path), "parser": log.parser} for log in logs],
        "cases": [
            {"log": at, "fail_to_pass": each.fail_to_pass, "pass_to_pass": each.pass_to_pass}
            for at, each in cases
        ],
    }
    command = [sys.executable, str(Path(referee.__file__)), str(package)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    verdicts = [each or {"resolved": False, "passed": []} for each in said["verdicts"]]
    return [
        Theirs(said["statuses"][at], verdict["resolved"], frozenset(verdict["passed"]))
        for (at, _), verdict in zip(cases, verdicts, strict=True)
    ]
