"""The built-in agent's tools, run in its Sandbox: bash, and an editor that replaces exact text.

A wrong call never raises: the error goes back to the model as text. Answers are short because they
fill the model's context. The bash tool runs one shell per call. A command arrives by standard
input, so its length does not matter; its folder and exported variables are kept in a file outside
the repository, which a killed command leaves unchanged.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard
from uuid import uuid4

from swerl.core.chat import Json
from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError, SandboxFileError
from swerl.core.sandbox import Exec

# Builtins where they can be: each further program costs a millisecond and a hundred page faults.
_COMMAND = """
if [ -f /dev/stdin ]; then IFS= read -r -d '' __command || :; else __command=$(cat); fi
"""
_SHELL = rf"""{_COMMAND}
__state=$1
set --
if [ -r "$__state" ]; then . "$__state" 2>/dev/null; fi
__list='{{ export -p; printf "cd -- %q\n" "$PWD"; }} 2>/dev/null >|"$__state.new" &&
  IFS= read -r -d "" __now <"$__state.new" || :'
eval "$__list"
__was=$__now
trap 'eval "$__list"; [ "$__now" = "$__was" ] || mv -f -- "$__state.new" "$__state"' EXIT
eval "$__command" </dev/null
"""


@dataclass(frozen=True, slots=True)
class Shell:
    """The bash tool of one run."""

    sandbox: Sandbox
    workdir: str
    timeout_s: float
    _state: str = field(default_factory=lambda: f"/tmp/.swerl-shell-{uuid4().hex}")

    async def run(self, command: str) -> str:
        """Run a command and return the text for the model. Raises only the Sandbox's errors."""
        result = await self.sandbox.run(
            ["bash", "-c", _SHELL, "bash", self._state],
            cwd=self.workdir,
            timeout_s=self.timeout_s,
            stdin=command.replace("\0", "").encode(),
        )
        lines = [result.text.rstrip("\n")] if result.text.strip("\n") else []
        if result.truncated:
            lines.append("(more output was dropped)")
        if result.timed_out:
            lines.append(f"timed out after {self.timeout_s:g} s")
        elif result.exit_code:
            lines.append(f"exit code {result.exit_code}")
        return "\n".join(lines) or "ok"


BASH = "bash"
EDITOR = "str_replace_editor"
SUBMIT = "submit"
_MAX_FILE_BYTES = 8 << 20
"""Largest file that the editor reads: a larger one would block the event loop."""
_MAX_CHARS = 10_000
"""Most characters of a tool's output."""
_LISTING_S = 10.0
_LISTING_LINES = 100
_TEXT = {"type": "string"}
_INTEGER = {"type": "integer"}

_BASH = (
    "Run a bash command, beginning in the repository. The folder and exported variables last from "
    "one call to the next."
)
_EDITOR = (
    "Look at and change files. view: show a file, or a range [first, last] of its lines, "
    "or list a folder. create: write a new file. str_replace: replace old_str, which must "
    "occur exactly once, by new_str; without new_str it is deleted. insert: put new_str after "
    "line insert_line. A path is relative to the repository."
)
_SUBMIT = "Hand in the work. Call it once, when the repository is as it should be."
_EDITOR_ARGUMENTS = {
    "command": {**_TEXT, "enum": ["view", "create", "str_replace", "insert"]},
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _INTEGER,
    "view_range": {"type": "array", "items": _INTEGER},
}


def definitions() -> list[dict[str, Any]]:
    """Return the tools in the format of Anthropic's Messages API."""
    return [
        _definition(BASH, _BASH, {"command": _TEXT}, ["command"]),
        _definition(EDITOR, _EDITOR, _EDITOR_ARGUMENTS, ["command", "path"]),
        _definition(SUBMIT, _SUBMIT, {}, []),
    ]


def _definition(
    name: str, description: str, properties: Mapping[str, Any], required: list[str]
) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return {"name": name, "description": description, "input_schema": schema}


class ToolError(Exception):
    """A call that failed; its text goes to the model."""


def answer(error: ToolError) -> str:
    return f"error: {error}"


def not_once(path: str, count: int) -> ToolError:
    """Return the error for an old_str that occurs `count` times in a file."""
    times = "does not occur" if count == 0 else f"occurs {count} times"
    return ToolError(f"old_str {times} in {path}; it must occur exactly once")


@dataclass(frozen=True, slots=True)
class Tools:
    sandbox: Sandbox
    shell: Shell
    workdir: str

    async def use(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Execute one call and return the text for the model. Raises only the Sandbox's errors."""
        try:
            _require_unicode(arguments)
            if name == BASH:
                text = await self._bash(_text(arguments, "command"))
            elif name == EDITOR:
                text = await self._edit(arguments)
            else:
                text = f"error: no tool {name!r}; the tools are {BASH}, {EDITOR} and {SUBMIT}"
        except ToolError as error:
            text = answer(error)
        return _shorten(text)

    async def _bash(self, command: str) -> str:
        if "\0" in command:
            raise ToolError("a command cannot hold a null byte")
        return await self.shell.run(command)

    async def _edit(self, arguments: Mapping[str, Json]) -> str:
        command = _text(arguments, "command")
        path = _text(arguments, "path")
        if not path or "\0" in path:
            raise ToolError("path must name a file")
        path = posixpath.normpath(posixpath.join(self.workdir, path))
        if command == "view":
            return await self._view(path, arguments)
        if command == "create":
            return await self._create(path, _text(arguments, "file_text"))
        if command == "str_replace":
            return await self._replace(path, arguments)
        if command == "insert":
            return await self._insert(path, arguments)
        raise ToolError(f"no command {command!r}; use view, create, str_replace or insert")

    async def _view(self, path: str, arguments: Mapping[str, Json]) -> str:
        text = await self._read(path)
        if text is None:
            return await self._list(path)
        text, _ = _with_plain_ends(text)
        lines = text.removesuffix("\n").split("\n") if text else []
        first, last = _range(arguments.get("view_range"), len(lines))
        return "\n".join(f"{n:6}\t{lines[n - 1]}" for n in range(first, last + 1))

    async def _list(self, path: str) -> str:
        # A path that begins with a dash is absolute by now, so `find` takes it for no option.
        argv = ["find", path, "-maxdepth", "2", "-not", "-path", f"{path}/.*"]
        listing = await self.sandbox.run(argv, timeout_s=_LISTING_S)
        if listing.exit_code:
            raise ToolError(_missing(path))
        lines = sorted(_output(listing).splitlines())
        more = [f"({len(lines) - _LISTING_LINES} more)"] if len(lines) > _LISTING_LINES else []
        return "\n".join(lines[:_LISTING_LINES] + more)

    async def _create(self, path: str, text: str) -> str:
        check = await self.sandbox.run(["test", "-d", path, "-o", "-s", path], timeout_s=_LISTING_S)
        if check.exit_code == 0:
            raise ToolError(f"{path} exists; change it with str_replace")
        return await self._write(path, text)

    async def _replace(self, path: str, arguments: Mapping[str, Json]) -> str:
        old = _text(arguments, "old_str")
        new = _text(arguments, "new_str", default="")
        text, end = _with_plain_ends(await self._existing(path))
        old, new = old.replace(end, "\n"), new.replace(end, "\n")
        count = text.count(old) if old else 0
        if count != 1:
            raise not_once(path, count)
        return await self._write(path, text.replace(old, new).replace("\n", end))

    async def _insert(self, path: str, arguments: Mapping[str, Json]) -> str:
        after = arguments.get("insert_line")
        if not _is_integer(after):
            raise ToolError("insert_line must be an integer")
        new = _text(arguments, "new_str")
        text, end = _with_plain_ends(await self._existing(path))
        lines = text.removesuffix("\n").split("\n") if text else []
        lines.insert(min(max(after, 0), len(lines)), new.replace(end, "\n").rstrip("\n"))
        return await self._write(path, ("\n".join(lines) + "\n").replace("\n", end))

    async def _existing(self, path: str) -> str:
        text = await self._read(path)
        if text is None:
            raise ToolError(_missing(path))
        return text

    async def _read(self, path: str) -> str | None:
        """Return the text of a file, or None if there is no such file."""
        try:
            data = await self.sandbox.read(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        except (SandboxError, OSError) as error:
            raise _refused("read", path, error) from error
        if len(data) > _MAX_FILE_BYTES:
            raise ToolError(f"{path} has {len(data):,} bytes, too many for this tool")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ToolError(f"{path} is not a text file") from None

    async def _write(self, path: str, text: str) -> str:
        try:
            await self.sandbox.write(path, text.encode())
        except (SandboxError, OSError) as error:
            raise _refused("write", path, error) from error
        return "ok"


def _with_plain_ends(text: str) -> tuple[str, str]:
    """Return a text with plain line ends, as models write them, and the line end of the file."""
    is_dos = 0 < text.count("\r\n") == text.count("\n")
    return (text.replace("\r\n", "\n"), "\r\n") if is_dos else (text, "\n")


def _refused(verb: str, path: str, error: SandboxError | OSError) -> Exception:
    """Return the error for the model, or the Sandbox's own if no path can cause it."""
    if isinstance(error, SandboxFileError):
        return ToolError(f"cannot {verb} {path}: {error.reason}")
    if isinstance(error, SandboxError):
        return error
    return ToolError(f"cannot {verb} {path}: {error.strerror or error}")


def _require_unicode(arguments: Mapping[str, Json]) -> None:
    for value in filter(lambda value: isinstance(value, str), arguments.values()):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise ToolError("half of a surrogate pair is no text") from None


def _text(arguments: Mapping[str, Json], name: str, *, default: str | None = None) -> str:
    value = arguments.get(name, default)
    if not isinstance(value, str):
        raise ToolError(f"{name} must be given, as a text")
    return value


def _range(value: Json, num_lines: int) -> tuple[int, int]:
    """Return the first and last line to show, counted from 1; -1 is the end."""
    if value is None:
        return 1, num_lines
    match value:
        case [first, last] if _is_integer(first) and _is_integer(last):
            return max(first, 1), num_lines if last == -1 else min(last, num_lines)
        case _:
            raise ToolError("view_range must be two integers")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _missing(path: str) -> str:
    return f"no file {path}"


def _output(result: Exec) -> str:
    return result.stdout.decode("utf-8", "replace")


def _shorten(text: str) -> str:
    """Cut the middle of a long output."""
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n({left_out} characters left out)\n{text[-half:]}"
