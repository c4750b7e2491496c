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
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from swerl.core.chat import Json, Message, Role, ToolCall
from swerl.core.contracts import Endpoint, Exit, Sandbox
from swerl.core.errors import BrokenImageError, InputError
from swerl.core.patch import FileEdit
from swerl.core.sandbox import Exec, Mount
from swerl.core.task import Task
from swerl.harnesses import _bundles
from swerl.harnesses import _cli as _records
from swerl.harnesses._cli import prepare, said_last

DEFAULT_VERSION = "2.1.112"

_READ_LINES = 40
"""Lines that a scripted Read asks for: enough to allow edits, and within every file size."""

_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    # An image may name a proxy, and the gateway is not behind one.
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), ""),
}
"""What keeps the CLI from contacting anybody but the gateway."""
_WINDOW = 200_000
"""Context window that the CLI is told where it shall compact; old releases know no other."""
_SUMMARY = 20_000
"""Tokens of it that the CLI keeps free for its summary."""
_MARGIN = 13_000
"""Tokens that it keeps free besides; it compacts no later."""
_AGENT_TOOLS = ("Agent", "Task", "Workflow", "SendMessage", "ListAgents")
"""Tools that start sub-agents or deal with them, by their names in every release."""

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
    """Release on npm. 2.1.112 is the last in plain JavaScript and the smallest: 18 MB, not 71 to
    174."""
    libc: Literal["glibc", "musl"] = "glibc"
    """C library of the images, for native releases: Alpine has musl, most others have glibc."""
    max_turns: int | None = Field(None, ge=1)
    """Most model replies, enforced by the CLI; none leaves it to the gateway's own limit."""
    tools: tuple[str, ...] | None = None
    """Tools to offer, such as `("Bash", "Read", "Edit", "Write")`; none is the CLI's own choice.
    Fewer tools make the first request several times shorter."""
    sub_agents: bool = True
    """Whether the model may start agents of its own, as the CLI lets it by default."""
    dispatch: Literal["free", "forced"] = "free"
    """`forced`: the lead can only look and hand work to sub-agents of the type `worker`; they alone
    edit and run. What they sample is trained too, as branches of the Episode."""
    compact_at: int | None = Field(None, ge=1, le=_WINDOW - _SUMMARY - _MARGIN)
    """Tokens of history at which the CLI puts a summary in its place; none is its own choice,
    which is past 160,000, so that smaller contexts end instead."""
    bare: bool = False
    """Whether to run the CLI's minimal mode (Bash, Edit and Read, a short system prompt), for
    models with little context."""
    tool_timeout_s: float = Field(120.0, gt=0)
    """Most seconds of one Bash call; the CLI's own default."""
    extra_args: tuple[str, ...] = ()
    """More arguments for the CLI, as they are."""

    @model_validator(mode="after")
    def _can_dispatch(self) -> Options:
        if self.dispatch == "forced" and (self.bare or not self.sub_agents or self.tools):
            raise ValueError(
                "dispatch = 'forced' brings tools and agents of its own: leave out bare, tools "
                "and sub_agents"
            )
        if self.dispatch == "forced" and not is_kept_by(self.version):
            raise ValueError(
                f"{self.version} gives its main thread every tool; dispatch needs 2.1.143"
            )
        return self


def build(options: Options) -> ClaudeCode:
    """Return the harness, its bundle fetched.

    Raises ImageError where it cannot be had, InputError where it takes no `compact_at`.
    """
    bundle = fetch(options.version, options.libc)
    if options.compact_at and not can_compact(options.version, bundle):
        raise InputError(
            f"Claude Code {options.version} cannot be told where to compact",
            hint="leave out compact_at, or use version 2.1.112 or newer",
        )
    return ClaudeCode(options, bundle)


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
        """See that the CLI can run, and answer its first-start questions in a configuration.

        Raises BrokenImageError where the image lacks the libraries, SandboxError without a home.
        """
        await _check(sandbox, self.options)
        await prepare(sandbox, _INSTALL, "Claude Code")

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
            code=done.exit_code,
            timed_out=done.timed_out,
            limit=_hit_limit(done),
            log=done.text,
            records=await _records.gather(sandbox, ".claude/projects"),
        )

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that Read each file once, Edit it hunk by hunk, and sum up."""
        return [*_edit_calls(edits, workdir.rstrip("/")), Message(Role.ASSISTANT, "Done.")]


async def _check(sandbox: Sandbox, options: Options) -> None:
    done = await sandbox.run(start_check(options.version), timeout_s=60)
    if done.exit_code == 0:
        return
    message = f"Claude Code {options.version} cannot run in this image: {done.text.strip()[-200:]}"
    hint = "it needs libstdc++; native releases, such as version 2.1.143, do not"
    if is_native(options.version):
        other = "glibc" if options.libc == "musl" else "musl"
        hint = f'it is built for {options.libc}; for images of the other kind, libc = "{other}"'
    raise BrokenImageError(message, hint=hint)


def _argv(options: Options) -> list[str]:
    argv = program(options.version)
    argv += ["-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
    if options.max_turns is not None:
        argv += ["--max-turns", str(options.max_turns)]
    if options.tools is not None:
        argv += ["--tools", ",".join(options.tools)]
    if options.dispatch == "forced":
        argv += ["--agents", json.dumps(AGENTS), "--agent", LEAD]
    if not options.sub_agents:
        argv += ["--disallowedTools", ",".join(_AGENT_TOOLS)]
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
        **_compaction(options.compact_at),
    }


def _compaction(compact_at: int | None) -> Mapping[str, str]:
    """Return what makes every release compact at this many tokens: a share of its window."""
    if compact_at is None:
        return {}
    percent = 100 * compact_at / (_WINDOW - _SUMMARY)
    return {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(_WINDOW),
        # the same once more for those in between, 2.1.200 among them
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(_WINDOW),
        COMPACT_AT: f"{percent:.4f}",
    }


def _prompt(text: str) -> bytes:
    """Return the prompt as stdin; a first `/` would be taken for a command of the CLI."""
    return ("\n" + text if text.lstrip().startswith("/") else text).encode()


def _hit_limit(done: Exec) -> bool:
    """Say whether the transcript's last line names a turn or context limit."""
    last = next(said_last(done.stdout), {})
    return last.get("terminal_reason") in _LIMIT_REASONS


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


HOME = "/opt/swerl/agents/claude-code"
_NODE = "/opt/swerl/agents/node"
COMPACT_AT = "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"
"""Variable with the percentage of the window at which the CLI compacts; 2.0.14 knows none."""
_LAST_JAVASCRIPT = (2, 1, 112)
_PACKAGE = "@anthropic-ai/claude-code"
_PINNED = {
    f"{_PACKAGE}@2.1.112": "sha512-"
    "9FUgJ0EOvILyhIqxFKNVliebiUjL68dwpEW3eGSSe0vkVDJ1c5qMDNWc22gW3zkD7zRAqtfQPSGv0t4vMM2DPA==",
    f"{_PACKAGE}-linux-x64@2.1.143": "sha512-"
    "gnlVMesO1nHh8DDyZpbmBIkIUN3rdap5SVxccZ8GRey1ZG25BByyy9I0MA0trmPRtB1/6vRW7yM4Er2JjzdUHQ==",
    f"{_PACKAGE}-linux-x64@2.1.330": "sha512-"
    "9Gn+V7DtJ8M1nztP9CeDVl9g3RtrepI7rOFTyPRRnZe8D6zebIHKmC7OvBauucuAP0X0k85SDN/LPVZyjsGezQ==",
}
"""Known tarballs; other versions are checked against what npm states."""
_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


def is_native(version: str) -> bool:
    """Say whether a release needs no Node."""
    return tuple(map(int, version.split("."))) > _LAST_JAVASCRIPT


def fetch(version: str, libc: str = "glibc") -> tuple[Mount, ...]:
    """Return the mounts of a release, downloading what is not in the cache yet.

    `libc` is that of the image: `glibc` or `musl`. Raises InputError where there is none.
    """
    if is_native(version):
        package = f"{_PACKAGE}-linux-{_machine()}{'-musl' if libc == 'musl' else ''}"
        pin = _PINNED.get(f"{package}@{version}")
        return (Mount(_bundles.fetch(package, version, integrity=pin), HOME),)
    if libc == "musl":
        raise InputError(
            f"Claude Code {version} runs on Node, which is not had for musl",
            hint="use a native release: version 2.1.143 or newer",
        )
    pin = _PINNED.get(f"{_PACKAGE}@{version}")
    bundle = _bundles.fetch(_PACKAGE, version, integrity=pin)
    return (Mount(bundle, HOME), Mount(_bundles.node(), _NODE))


def program(version: str) -> list[str]:
    """Return the command that starts a release in a sandbox."""
    return [f"{HOME}/claude"] if is_native(version) else [f"{_NODE}/bin/node", f"{HOME}/cli.js"]


def can_compact(version: str, bundle: Sequence[Mount]) -> bool:
    """Say whether a release can be told where to compact; every native one can."""
    return is_native(version) or COMPACT_AT.encode() in (bundle[0].source / "cli.js").read_bytes()


def start_check(version: str) -> list[str]:
    """Return a quick command that works exactly where the release's program can run."""
    return [program(version)[0], "--version"]


def _machine() -> str:
    machine = platform.machine().lower()
    if machine not in _MACHINES:
        raise InputError(
            f"Claude Code has no native release for {machine}",
            hint="use version 2.1.112, which needs only Node",
        )
    return _MACHINES[machine]


LEAD = "lead"
WORKER = "worker"
_LOOKING = ["Read", "Grep", "Glob"]
_DELEGATING = ["Agent", "Task", "SendMessage"]
"""By their names in every release."""

AGENTS: dict[str, Any] = {
    LEAD: {
        "description": "Leads the work and hands it out.",
        "prompt": (
            "You lead the repair of a repository. You can read it, but not change it or run "
            f"anything: hand every such piece of work to a sub-agent of the type `{WORKER}` by the "
            "Agent tool. Tell it all that it needs, as it knows nothing of your conversation: the "
            "problem, the files, what to change and how to check it. Wait for its report before "
            "you go on. When the problem is solved and checked, say so in a sentence and stop."
        ),
        "tools": [*_LOOKING, *_DELEGATING],
    },
    WORKER: {
        "description": "Changes files and runs commands. Use it for every piece of work.",
        "prompt": (
            "You work on one part of the repair of a repository, as you are told. Look, edit and "
            "run what checks it. Then report in a few sentences what you changed, what you ran and "
            "what came out."
        ),
        "tools": [*_LOOKING, "Bash", "Edit", "Write"],
    },
}
"""What the CLI takes as `--agents`."""
_FIRST = (2, 1, 143)
"""Oldest release that is known to hold its main thread to an agent's tools; 2.1.112 does not."""


def is_kept_by(version: str) -> bool:
    """Return whether a release holds the lead to its tools."""
    return tuple(map(int, version.split("."))) >= _FIRST
