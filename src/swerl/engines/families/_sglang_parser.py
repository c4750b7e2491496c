"""SGLang's parsers of tool calls and reasoning, in a process of their own.

Importing them takes some ten seconds and much memory, and SGLang often lives in an environment of
its own; a reply goes there and back in about a millisecond.
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

from swerl.core.chat import Json
from swerl.core.contracts import ParserChoice
from swerl.core.errors import EngineError, InputError
from swerl.core.secrets import child_environment
from swerl.engines.families._calls import ReadCalls, is_sendable

SERVER = Path(__file__).with_name("_sglang_parse_server.py")
SCHEME = "sglang"
INSTALL = "set model.parser_python to an interpreter that has it; docs/guides/engines.md says how"


class SglangParser:
    """Reads replies as SGLang does."""

    def __init__(self, choice: ParserChoice) -> None:
        """Start the process. Raises InputError on a name that SGLang does not know."""
        scheme, _, names = choice.name.partition(":")
        if scheme != SCHEME or not names:
            raise InputError(
                f"model.parser = {choice.name!r} names no parser",
                hint="write builtin, sglang:CALLS or sglang:CALLS+REASONING",
            )
        calls, _, reasoning = names.partition("+")
        self.reads_thinking = bool(reasoning)
        self._python = choice.python or Path(sys.executable)
        command = [str(self._python), str(SERVER), calls, *([reasoning] if reasoning else [])]
        self._process = _start(command)
        weakref.finalize(self, _end, self._process)
        first = self._receive()
        if problem := first.get("error"):
            missing = "No module named 'sglang'" in problem
            raise InputError(
                f"{self._python} has no SGLang" if missing else str(problem),
                hint=INSTALL if missing else "see docs/design/families.md",
            )

    def read(self, text: str, *, thinking_opened: bool) -> tuple[str, ReadCalls]:
        """Return the thinking, empty where it is not read here, and the calls."""
        self._send({"text": text, "thinking_opened": thinking_opened})
        found = self._receive()
        calls = tuple((name, args) for name, args in found["calls"] if is_sendable({name: args}))
        malformed = found["malformed"] + len(found["calls"]) - len(calls)
        said = found["text"] if calls or not malformed else found["whole"]
        return found["thinking"] or "", ReadCalls(said, calls, malformed)

    def _send(self, value: dict[str, Json]) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise _gone(self._process) from error

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise _gone(self._process)
        answer: dict[str, Any] = json.loads(line)
        return answer


def _start(command: list[str]) -> subprocess.Popen[str]:
    """Start the process; it ends with its input, so also when its parent is killed."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=child_environment(),
        )
    except OSError as error:
        raise InputError(f"{command[0]} cannot be run: {error.strerror}", hint=INSTALL) from error


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _gone(process: subprocess.Popen[str]) -> EngineError:
    message = f"SGLang's parsers ended with exit code {process.poll()}"
    return EngineError(message, hint=f"try it by hand: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
