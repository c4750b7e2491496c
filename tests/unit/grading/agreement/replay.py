"""Recorded logs, and a sandbox that plays one back to the real grader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from swerl.core.contracts import Listener
from swerl.core.grade import Grade
from swerl.core.sandbox import Exec
from swerl.core.task import GradingSpec, Task
from swerl.grading.graders import swebench

_NONCE = re.compile(rb"'([0-9a-f]{32})'")


@dataclass(frozen=True)
class Log:
    """The output of one test run, and the file in which the package finds it."""

    name: str
    parser: str
    """The package's name of the parser."""
    text: str
    exit_code: int
    path: Path
    ended: bool = True
    """Whether the shell lived to print its end marker."""
    before: str = ""
    """What was printed before the tests."""

    def save(self) -> None:
        """Write the log in the format of the package's evaluation script."""
        lines = [self.before, "+ : '>>>>> Start Test Output'", self.text]
        if self.ended:
            lines += ["+ : '>>>>> End Test Output'", f">>>>> Test Exit Code: {self.exit_code}"]
        self.path.write_text("\n".join(lines))


@dataclass(frozen=True)
class Lists:
    """The tests that a case declares."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()


class ReplaySandbox:
    """A fake: answers the grader's test script with a recorded log, between its markers."""

    id = "replay"

    def __init__(self, log: Log) -> None:
        self._log = log

    async def run(self, argv: Sequence[str], *, stdin: bytes | None = None, **_: object) -> Exec:
        start, end = (match.decode() for match in _NONCE.findall(stdin or b""))
        code = self._log.exit_code
        out = f"\n{start}\n{self._log.text}" + (f"\n{end} {code}\n" if self._log.ended else "")
        return Exec(code if self._log.ended else 137, out.encode(), b"")

    async def read(self, path: str) -> bytes:
        raise FileNotFoundError(path)

    async def write(self, path: str, data: bytes) -> None:
        raise AssertionError("a replay writes nothing")

    async def expose(self, listener: Listener) -> str:
        raise AssertionError("graders expose nothing")


async def grade(log: Log, parser: str, lists: Lists) -> Grade:
    """Grade a recorded log with the real grader."""
    spec = GradingSpec(
        grader="swebench",
        fail_to_pass=lists.fail_to_pass,
        pass_to_pass=lists.pass_to_pass,
        test_command="make test",
        log_parser=parser,
    )
    task = Task(log.name, "acme/sums", "image", "/testbed", "Mend it.", spec)
    sandbox = ReplaySandbox(log)
    return await swebench.build().grade(task, "", lambda: nullcontext(sandbox))
