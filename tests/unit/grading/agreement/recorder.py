"""Record logs of real test runs: fork one process a run, with the runner already imported.

Reads JSON lines `{"folder", "runner", "args", "log"}` from standard input and answers each with its
exit code, as a shell reports it. `runner` is pytest, unittest, django or sympy.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def main() -> None:
    """Record every requested run."""
    for line in sys.stdin:
        run = json.loads(line)
        child = os.fork()
        if not child:
            os.chdir(run["folder"])
            sys.path.insert(0, run["folder"])
            _redirect(run["log"])
            sys.exit(_RUNNERS[run["runner"]](run["args"]))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        print(code if code >= 0 else 128 - code, flush=True)  # noqa: T201  its answer


def _redirect(log: str) -> None:
    for stream in (0, 1, 2):
        path = os.devnull if stream == 0 else log
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, stream)
        os.close(opened)


def _pytest(args: Sequence[str]) -> int:
    return int(pytest.main(list(args)))


def _unittest(args: Sequence[str]) -> int:
    result = unittest.main(module=None, argv=["unittest", *args], exit=False).result
    return 0 if result.wasSuccessful() else 1


def _django(args: Sequence[str]) -> int:
    from django.core.management import execute_from_command_line

    os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
    execute_from_command_line(["manage.py", "test", *args])
    return 0


def _sympy(args: Sequence[str]) -> int:
    from sympy.testing.runtests import PyTestReporter, SymPyTests

    reporter = PyTestReporter(verbose=True, tb="short", colors="-C" not in args)
    tests = SymPyTests(reporter, (), False, 1)
    tests._root_dir = str(Path.cwd())
    tests._testfiles.extend(name for name in args if not name.startswith("-"))
    return 0 if tests.test() else 1


_RUNNERS: dict[str, Callable[[Sequence[str]], int]] = {
    "pytest": _pytest,
    "unittest": _unittest,
    "django": _django,
    "sympy": _sympy,
}

if __name__ == "__main__":
    main()
