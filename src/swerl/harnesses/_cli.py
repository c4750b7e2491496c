"""Helpers of agents that run as programs inside the sandbox."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swerl.core.changes import FileEdit
from swerl.core.chat import Json, Message, Role, ToolCall
from swerl.core.contracts import Exit, Sandbox
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Exec, Mount

OptionsT = TypeVar("OptionsT")

NO_PROXY = "unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; "
"""Shell command: an image may set a proxy, but the gateway is not behind one."""
ENDLESS_CONTEXT = 10_000_000
"""A context size in tokens that no run fills, for a CLI that must not compact."""
UNCAPPED_TOKENS = 131_072
"""Maximum reply tokens that a CLI requests; the session's own limit decides."""


@dataclass(frozen=True, slots=True)
class BundledAgent(Generic[OptionsT]):
    """An agent whose program and its files are mounted into the sandbox, and run there."""

    options: OptionsT
    bundle: tuple[Mount, ...]
    dialect: str = "openai-chat"
    inside: bool = True

    def mounts(self) -> Sequence[Mount]:
        """Return the program and what it needs."""
        return self.bundle


async def prepare(sandbox: Sandbox, script: str, agent: str) -> None:
    """Run the shell script that creates an agent's home folder. Raises SandboxError."""
    result = await sandbox.run(["sh", "-c", script], timeout_s=60)
    if result.exit_code:
        raise SandboxError(
            f"cannot prepare {agent}'s home folder: {result.text.strip()[-200:]}",
            hint="the sandbox's user needs a writable HOME",
        )


def exit_of(result: Exec, *, limit: bool, records: bytes = b"") -> Exit:
    """Return how an agent's command ended; `limit`: a turn limit stopped it."""
    return Exit(result.exit_code, result.timed_out, limit, result.text, records)


@dataclass(frozen=True, slots=True)
class FileTools:
    """Names and arguments of an agent's file tools."""

    read: str
    edit: str
    write: str
    path: str
    old: str
    new: str

    def script(self, edits: Sequence[FileEdit], workdir: str) -> list[Message]:
        """Return replies that read each file once, edit it hunk by hunk, then summarise."""
        replies: list[Message] = []
        paths_read: set[str] = set()
        for edit in edits:
            path = {self.path: f"{workdir.rstrip('/')}/{edit.path}"}
            if not edit.old:  # a new or empty file
                replies.append(call(self.write, **path, content=edit.new))
                continue
            if edit.path not in paths_read:
                replies.append(call(self.read, **path))
            paths_read.add(edit.path)
            replies.append(call(self.edit, **path, **{self.old: edit.old, self.new: edit.new}))
        return [*replies, Message(Role.ASSISTANT, "Done.")]


def call(name: str, **arguments: Json) -> Message:
    """Return a reply that calls one tool."""
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("", name, arguments),))


def said_last(lines: bytes) -> Iterator[dict[str, Json]]:
    """Yield the JSON objects of a transcript with one per line, last first."""
    for line in reversed(lines.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


MAX_BYTES = 4 * 2**20
"""Maximum size of the records; a session of a hundred turns has about 1 MiB."""
_TIMEOUT_S = 30.0

# The agent controls these files: read only regular ones.
_GATHER = 'find "$HOME/$1" -type f -name "*.jsonl" -exec cat {} + 2>/dev/null | head -c "$2"'


async def gather(sandbox: Sandbox, folder: str) -> bytes:
    """Return the JSON lines of all files below a folder of the user's home.

    Works for a killed agent, too. Empty if there is no such folder.
    """
    words = ["sh", "-c", _GATHER, "sh", folder, str(MAX_BYTES)]
    result = await sandbox.run(words, cwd="/", timeout_s=_TIMEOUT_S)
    return result.stdout


_PYTHON = (
    "import sys; path, old, new = sys.argv[1:]; text = open(path, newline='').read(); "
    "open(path, 'w', newline='').write(text.replace(old, new, 1))"
)
_PERL = (
    "my ($path, $old, $new) = @ARGV; local $/; open(F, '<', $path); my $text = <F>; "
    "$text =~ s/\\Q$old\\E/$new/; open(F, '>', $path); print F $text"
)


def edit_command(edit: FileEdit, workdir: str) -> str:
    """Return one shell command that makes this edit, with the image's Python or Perl."""
    path = shlex.quote(f"{workdir}/{edit.path}")
    if not edit.old:  # a new or empty file
        return f'mkdir -p "$(dirname {path})" && printf %s {shlex.quote(edit.new)} > {path}'
    values = f"{path} {shlex.quote(edit.old)} {shlex.quote(edit.new)}"
    python = f"python3 -c {shlex.quote(_PYTHON)} {values}"
    perl = f"perl -e {shlex.quote(_PERL)} -- {values}"
    return f"if command -v python3 >/dev/null; then {python}; else {perl}; fi"
