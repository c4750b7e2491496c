"""The Claude Code CLI, offline in the sandbox, its model calls going to the gateway.

The CLI comes as a bundle from npm, mounted read-only. The prompt goes in by stdin, so its size and
its characters do not matter. `--output-format stream-json` makes the log: one JSON object a line,
the last of type `result`. The environment keeps the CLI from calling anything but the gateway.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from swerl.chat import Json, Message, Role, ToolCall
from swerl.errors import InputError, SandboxError
from swerl.harnesses import _bundles
from swerl.interfaces import Endpoint, Exit, Sandbox
from swerl.patch import FileEdit
from swerl.sandbox import Exec, Mount
from swerl.task import Task

DEFAULT_VERSION = "2.1.112"

_PACKAGE = "@anthropic-ai/claude-code"
_LAST_JAVASCRIPT = (2, 1, 112)
"""Later releases are native programs in a package per platform."""
_PINNED = {
    f"{_PACKAGE}@2.1.112": "sha512-"
    "9FUgJ0EOvILyhIqxFKNVliebiUjL68dwpEW3eGSSe0vkVDJ1c5qMDNWc22gW3zkD7zRAqtfQPSGv0t4vMM2DPA==",
}
"""Known tarballs; other versions are checked against what npm states."""
_HOME = "/opt/swerl/agents/claude-code"
_NODE = "/opt/swerl/agents/node"
_READ_LINES = 40
"""Lines that a scripted Read asks for: enough to allow edits, and within every file size."""

_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
}
"""What keeps the CLI from contacting anybody but the gateway."""

_INSTALL = """
: "${HOME:?no home folder}" && mkdir -p "$HOME/.claude" &&
printf %s '{"hasCompletedOnboarding": true}' > "$HOME/.claude.json" &&
printf %s '{"skipDangerousModePermissionPrompt": true}' > "$HOME/.claude/settings.json"
"""

_LIMIT_REASONS = {"max_turns", "prompt_too_long", "blocking_limit", "rapid_refill_breaker"}
"""Terminal reasons of the CLI that mean a turn or context limit, not a breakdown."""


class Options(BaseModel):
    """Settings of Claude Code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(DEFAULT_VERSION, pattern=r"^\d+\.\d+\.\d+$")
    """Release on npm. 2.1.112 is the last in plain JavaScript and the smallest: 18 MB, not 71."""
    max_turns: int | None = Field(None, ge=1)
    """Most model replies, enforced by the CLI; none leaves it to the gateway's own limit."""
    tools: tuple[str, ...] | None = None
    """Tools to offer, such as `("Bash", "Read", "Edit", "Write")`; none is the CLI's own choice.
    Fewer tools make the first request several times shorter."""
    bare: bool = False
    """Whether to run the CLI's minimal mode (Bash, Edit and Read, a short system prompt), for
    models with little context."""
    tool_timeout_s: float = Field(120.0, gt=0)
    """Most seconds of one Bash call; the CLI's own default."""
    extra_args: tuple[str, ...] = ()
    """More arguments for the CLI, as they are."""


def build(options: Options) -> ClaudeCode:
    """Return the harness, its bundle fetched. Raises ImageError where it cannot be had."""
    return ClaudeCode(options, fetch(options.version))


def fetch(version: str) -> tuple[Mount, ...]:
    """Return the mounts of this release, downloading what is not in the cache yet."""
    if _is_native(version):
        package = f"{_PACKAGE}-linux-{_machine()}"
        return (Mount(_bundles.fetch(package, version), _HOME),)
    pin = _PINNED.get(f"{_PACKAGE}@{version}")
    bundle = _bundles.fetch(_PACKAGE, version, integrity=pin)
    return (Mount(bundle, _HOME), Mount(_bundles.node(), _NODE))


@dataclass(frozen=True, slots=True)
class ClaudeCode:
    """Runs `claude -p` on a Task."""

    options: Options
    bundle: tuple[Mount, ...]
    dialect: str = "anthropic"
    inside: bool = True

    def mounts(self) -> Sequence[Mount]:
        """Return the CLI, and Node where the release needs it."""
        return self.bundle

    async def install(self, sandbox: Sandbox) -> None:
        """Write the user configuration that answers the CLI's first-start questions."""
        done = await sandbox.run(["sh", "-c", _INSTALL], timeout_s=60)
        if done.exit_code:
            message = f"cannot prepare Claude Code's home folder: {done.text.strip()[-200:]}"
            raise SandboxError(message, hint="the sandbox's user needs a writable HOME")

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Work on the Task until done or until `budget_s` seconds are over."""
        done = await sandbox.run(
            _argv(self.options),
            cwd=task.workdir,
            env=_environment(self.options, endpoint, budget_s),
            timeout_s=budget_s,
            stdin=_prompt(task.prompt),
        )
        return Exit(
            code=done.exit_code, timed_out=done.timed_out, limit=_hit_limit(done), log=done.text
        )

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that Read each file once, Edit it hunk by hunk, and sum up."""
        return [*_edit_calls(edits, workdir.rstrip("/")), Message(Role.ASSISTANT, "Done.")]


def _argv(options: Options) -> list[str]:
    native = [f"{_HOME}/claude"]
    argv = native if _is_native(options.version) else [f"{_NODE}/bin/node", f"{_HOME}/cli.js"]
    argv += ["-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
    if options.max_turns is not None:
        argv += ["--max-turns", str(options.max_turns)]
    if options.tools is not None:
        argv += ["--tools", ",".join(options.tools)]
    if options.bare:
        argv += ["--bare"]
    return [*argv, *options.extra_args]


def _environment(options: Options, endpoint: Endpoint, budget_s: float) -> Mapping[str, str]:
    tool_ms = str(int(options.tool_timeout_s * 1000))
    return {
        **_QUIET,
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "ANTHROPIC_MODEL": endpoint.model,
        "ANTHROPIC_SMALL_FAST_MODEL": endpoint.model,
        # A slow model must not look dead to the CLI: a repeated request would sample twice.
        "API_TIMEOUT_MS": str(int(budget_s * 1000)),
        "BASH_DEFAULT_TIMEOUT_MS": tool_ms,
        "BASH_MAX_TIMEOUT_MS": tool_ms,
        # Without it the CLI refuses to skip permission questions as root.
        "IS_SANDBOX": "1",
    }


def _prompt(text: str) -> bytes:
    """Return the prompt as stdin; a first `/` would be taken for a command of the CLI."""
    return ("\n" + text if text.lstrip().startswith("/") else text).encode()


def _hit_limit(done: Exec) -> bool:
    """Say whether the transcript's last line names a turn or context limit."""
    last = done.stdout.rstrip().rpartition(b"\n")[2]
    try:
        result = json.loads(last)
    except ValueError:
        return False
    return isinstance(result, dict) and result.get("terminal_reason") in _LIMIT_REASONS


def _edit_calls(edits: Sequence[FileEdit], workdir: str) -> Iterator[Message]:
    seen: set[str] = set()
    for edit in edits:
        path = f"{workdir}/{edit.path}"
        if path not in seen:
            seen.add(path)
            yield _call("Read", {"file_path": path, "limit": _READ_LINES})
        # The CLI shows every file with plain line ends and puts the file's own back. An empty
        # old string makes a new file or fills an empty one.
        old, new = (text.replace("\r\n", "\n") for text in (edit.old, edit.new))
        yield _call("Edit", {"file_path": path, "old_string": old, "new_string": new})


def _call(name: str, arguments: Mapping[str, Json]) -> Message:
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("", name, arguments),))


def _is_native(version: str) -> bool:
    return tuple(map(int, version.split("."))) > _LAST_JAVASCRIPT


def _machine() -> str:
    names = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
    machine = platform.machine().lower()
    if machine not in names:
        message = f"Claude Code has no native release for {machine}"
        raise InputError(message, hint=f"use version {DEFAULT_VERSION}, which needs only Node")
    return names[machine]
