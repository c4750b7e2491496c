"""What agents that are programs inside the sandbox share."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swerl.core.chat import Json, Message, Role, ToolCall
from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError
from swerl.core.patch import FileEdit

NO_PROXY = "unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; "
"""Shell command: an image may name a proxy, and the gateway is not behind one."""
ENDLESS_CONTEXT = 10_000_000
"""Tokens of a context that no run fills, for a CLI that is not to mind it."""
UNCAPPED_TOKENS = 131_072
"""Most tokens of a reply that a CLI is told to ask for; the session's own sampling decides."""


async def prepare(sandbox: Sandbox, script: str, agent: str) -> None:
    """Run the shell script that makes an agent's home folder. Raises SandboxError."""
    done = await sandbox.run(["sh", "-c", script], timeout_s=60)
    if done.exit_code:
        raise SandboxError(
            f"cannot prepare {agent}'s home folder: {done.text.strip()[-200:]}",
            hint="the sandbox's user needs a writable HOME",
        )


@dataclass(frozen=True, slots=True)
class FileTools:
    """How an agent names its tools for files, and what they take."""

    read: str
    edit: str
    write: str
    path: str
    old: str
    new: str

    def script(self, edits: Sequence[FileEdit], workdir: str) -> list[Message]:
        """Return replies that read each file once, edit it hunk by hunk, and sum up."""
        replies: list[Message] = []
        seen: set[str] = set()
        for edit in edits:
            path = {self.path: f"{workdir.rstrip('/')}/{edit.path}"}
            if not edit.old:  # a new file, or an empty one
                replies.append(call(self.write, **path, content=edit.new))
                continue
            if edit.path not in seen:
                replies.append(call(self.read, **path))
            seen.add(edit.path)
            replies.append(call(self.edit, **path, **{self.old: edit.old, self.new: edit.new}))
        return [*replies, Message(Role.ASSISTANT, "Done.")]


def call(name: str, **arguments: Json) -> Message:
    """Return a reply that calls one tool."""
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("", name, arguments),))


def said_last(lines: bytes) -> Iterator[dict[str, Json]]:
    """Yield the JSON objects of a transcript that has one a line, the last first."""
    for line in reversed(lines.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


MAX_BYTES = 4 * 2**20
"""Most that is kept; the files of a session of a hundred turns are about one."""
_TIMEOUT_S = 30.0

# The agent may have put anything there: what is no plain file is left alone.
_GATHER = 'find "$HOME/$1" -type f -name "*.jsonl" -exec cat {} + 2>/dev/null | head -c "$2"'


async def gather(sandbox: Sandbox, folder: str) -> bytes:
    """Return the JSON lines of all files below a folder of the user's home, one after the other.

    Works for an agent that was killed, too. Empty where there is no such folder.
    """
    words = ["sh", "-c", _GATHER, "sh", folder, str(MAX_BYTES)]
    done = await sandbox.run(words, cwd="/", timeout_s=_TIMEOUT_S)
    return done.stdout


_PYTHON = (
    "import sys; path, old, new = sys.argv[1:]; text = open(path, newline='').read(); "
    "open(path, 'w', newline='').write(text.replace(old, new, 1))"
)
_PERL = (
    "my ($path, $old, $new) = @ARGV; local $/; open(F, '<', $path); my $text = <F>; "
    "$text =~ s/\\Q$old\\E/$new/; open(F, '>', $path); print F $text"
)


def edit_command(edit: FileEdit, workdir: str) -> str:
    """Return one command that makes this edit, with the Python or the Perl of the image."""
    path = shlex.quote(f"{workdir}/{edit.path}")
    if not edit.old:  # a new file, or an empty one
        return f'mkdir -p "$(dirname {path})" && printf %s {shlex.quote(edit.new)} > {path}'
    values = f"{path} {shlex.quote(edit.old)} {shlex.quote(edit.new)}"
    python = f"python3 -c {shlex.quote(_PYTHON)} {values}"
    perl = f"perl -e {shlex.quote(_PERL)} -- {values}"
    return f"if command -v python3 >/dev/null; then {python}; else {perl}; fi"
