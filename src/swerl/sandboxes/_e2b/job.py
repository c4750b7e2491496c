"""One command in the sandbox: the text that `job.sh` reads, and what it answers."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from swerl.core.sandbox import Chunk

RUN = 'eval "$SWERL_JOB"'
"""What the provider's shell runs; the script comes in the environment, which no process shows."""
INLINE_BYTES = 60_000
"""Most bytes of a text in the environment: the kernel takes 128 KiB of one variable."""
_REPORT = re.compile(r"x (\d+) ([01]) (\d+) (\d+)")


def new_folder() -> str:
    """Return a path in the sandbox that nobody uses."""
    return f"/tmp/.swerl-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Job:
    """A command as its supervisor in the sandbox is told of it."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    user: str | None
    limit_s: float | None = None
    cap_bytes: int = 0
    """Most bytes kept of each stream; 0 keeps all."""
    live: bool = False
    """Whether it takes input, and its output is shown as it comes."""
    stdin: bytes = b""
    stdin_file: str = ""
    """File in the sandbox with its input, where that is large."""
    folder: str = field(default_factory=new_folder)

    def facts(self) -> str:
        """Return the settings of the command that stay the same from step to step."""
        limit = "" if self.limit_s is None else f"{max(self.limit_s, 0.001):.3f}"
        given = [f"{name}={value}" for name, value in self.env.items()]
        inline = "" if self.stdin_file else base64.b64encode(self.stdin).decode()
        return "\n".join(
            (
                f"d={self.folder} limit={limit} cap_kib={-(-self.cap_bytes // 1024)}",
                f"live={'1' if self.live else ''} cwd={shlex.quote(self.cwd)}",
                f"file={shlex.quote(self.stdin_file)} input={inline}",
                f"argv={_array(self.argv)} given={_array(given)}",
            )
        )

    def step(
        self,
        step: str,
        *,
        offsets: Sequence[int] = (0, 0),
        stale: Sequence[str] = (),
        number: int = 0,
        facts_file: str = "",
    ) -> str:
        """Return the text that takes a step; `facts_file` holds the facts where they are long."""
        facts = f". {facts_file}" if facts_file else self.facts()
        head = f"step={step} offsets=({offsets[0]} {offsets[1]}) number={number}"
        return f"{facts}\n{head} stale={_array(stale)}\n{_program()}"


@dataclass(frozen=True, slots=True)
class Report:
    """How a command ended, and how much it printed."""

    exit_code: int
    stopped: bool
    sizes: tuple[int, int]


class Shown:
    """Reads what a job shows, over as many streams as it takes."""

    def __init__(self, take: Callable[[Chunk], Awaitable[None]]) -> None:
        self._take = take
        self.launched = asyncio.Event()
        """Set once the command has been started, or refused."""
        self.begin()
        self.offsets = [0, 0]
        """Bytes read of standard output and of errors."""
        self.refusal = ""
        self.noise = ""
        """The last that came without being part of a job's story."""

    @property
    def complete(self) -> bool:
        """Whether the command has ended and all that it printed is here."""
        return self.report is not None and self.report.sizes == tuple(self.offsets)

    def begin(self) -> None:
        """Begin to read another stream."""
        self._partial = ["", ""]
        self._begun = [False, False]
        self.report: Report | None = None

    async def stdout(self, text: str) -> None:
        """Read a piece of the stream of standard output."""
        await self._read(0, text)

    async def stderr(self, text: str) -> None:
        """Read a piece of the stream of errors."""
        await self._read(1, text)

    async def _read(self, stream: int, text: str) -> None:
        *lines, self._partial[stream] = (self._partial[stream] + text).split("\n")
        for line in lines:
            if not self._begun[stream]:
                self._begun[stream] = line == "="
                self.noise = (self.noise + line)[-300:]
                if self._begun[0]:
                    self.launched.set()
            elif stream == 0 and line[:2] in ("x ", "! "):
                self._conclude(line)
            elif data := _decode(line):
                self.offsets[stream] += len(data)
                await self._take(Chunk(data, is_stderr=stream == 1))

    def _conclude(self, line: str) -> None:
        match = _REPORT.fullmatch(line)
        if match:
            code, stopped, out, err = map(int, match.groups())
            self.report = Report(code, bool(stopped), (out, err))
        else:
            self.refusal = line[2:]


def _decode(line: str) -> bytes:
    """Decode a line, or as much as came of one that was cut; what a shell complains of is none."""
    try:
        return base64.b64decode(line[: len(line) // 4 * 4], validate=True)
    except binascii.Error:
        return b""


def _array(words: Sequence[str]) -> str:
    return f"({' '.join(map(shlex.quote, words))})"


@cache
def _program() -> str:
    return files("swerl.sandboxes._e2b").joinpath("job.sh").read_text()
