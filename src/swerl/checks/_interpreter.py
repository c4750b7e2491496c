"""Which interpreter a Task's tests run with, as far as its test command tells."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from swerl.core.task import Task

_ENTERING = ("source ", ". ", "conda activate", "export PATH=")
_PYTHON = re.compile(r"(?:^|[\s;&|(])((?:[\w.@+-]*/)*python[\d.]*)(?=[\s;]|$)", re.MULTILINE)
_PYTEST = re.compile(r"(?:^|[\s;&|(/])(py\.?test|tox|nosetests)(?=[\s;]|$)", re.MULTILINE)
_FIND = """
for name in python python3; do command -v $name >/dev/null && exec $name --version; done
echo "neither python nor python3 is on the path"; exit 127
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """How to ask an interpreter for its version, in the workdir."""

    name: str
    argv: tuple[str, ...]
    is_declared: bool
    """Whether the Task needs it."""
    env: Mapping[str, str] = field(default_factory=dict)


def interpreter_of(task: Task) -> Interpreter:
    """Return the interpreter in `metadata.interpreter`, else the one that the tests call.

    The lines of the test command that enter an environment are run first. Where the tests name
    none, any Python will do, and none is no failure.
    """
    declared = task.metadata.get("interpreter")
    command = task.grading.test_command
    entering = [line.strip() for line in command.splitlines() if line.strip().startswith(_ENTERING)]
    called = _PYTHON.search(command)
    if isinstance(declared, str) and declared:
        name, ask = declared, f"{shlex.quote(declared)} --version"
    elif called:
        name, ask = called[1], f"{called[1]} --version"
    else:
        name, ask = "python", _FIND
    is_declared = bool(declared or called or _PYTEST.search(command))
    shell = "bash" if entering else "sh"
    script = "\n".join([*entering, ask])
    return Interpreter(name, (shell, "-c", script), is_declared, dict(task.grading.env))
