"""The Claude Code CLI, offline in the sandbox; its model calls go to the gateway.

The CLI is a bundle from npm, mounted read-only. Up to 2.1.112 a release is JavaScript for Node;
later ones are one native program per platform and C library. The prompt is sent by stdin, so any
size and character works. `--output-format stream-json` writes the log: one JSON object per line,
the last of type `result`. The environment stops the CLI from calling anything but the gateway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from swerl.core.changes import FileEdit
from swerl.core.chat import Message, Role
from swerl.core.contracts import Endpoint, Exit, Sandbox
from swerl.core.errors import BrokenImageError, InputError
from swerl.core.sandbox import Exec, Mount
from swerl.core.task import Task
from swerl.harnesses import _bundles
from swerl.harnesses._cli import BundledAgent, call, exit_of, gather, prepare, said_last

DEFAULT_VERSION = "2.1.112"

_READ_LINES = 40
"""Lines of a scripted Read: enough to permit edits, and within every file size."""

_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    # An image may set a proxy, but the gateway is not behind one.
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), ""),
}
"""Settings that stop the CLI from contacting anything but the gateway."""
_WINDOW = 200_000
"""Context window for the CLI if it has to compact; old releases know no other."""
_SUMMARY = 20_000
"""Tokens that the CLI reserves for its summary."""
_MARGIN = 13_000
"""Further reserved tokens; the CLI compacts no later."""

_INSTALL = """
: "${HOME:?no home folder}" && mkdir -p "$HOME/.claude" &&
printf %s '{"hasCompletedOnboarding": true}' > "$HOME/.claude.json" &&
printf %s '{"skipDangerousModePermissionPrompt": true}' > "$HOME/.claude/settings.json"
"""

_LIMIT_REASONS = {"max_turns", "prompt_too_long", "blocking_limit", "rapid_refill_breaker"}
"""The CLI's terminal reasons for a turn or context limit."""


class Options(BaseModel):
    """Settings of Claude Code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(DEFAULT_VERSION, pattern=r"^\d+\.\d+\.\d+$")
    """Release on npm. 2.1.112 is the last JavaScript release and the smallest: 18 MB instead of 71
    to 174."""
    libc: Literal["glibc", "musl"] = "glibc"
    """C library of the images, for native releases: musl for Alpine, glibc for most others."""
    tools: tuple[str, ...] | None = None
    """Tools to offer, such as `("Bash", "Read", "Edit", "Write")`. None: the CLI's own set, with
    those that start sub-agents. Fewer tools make the first request several times shorter."""
    dispatch: Literal["free", "forced"] = "free"
    """`forced`: the lead agent only reads and delegates to sub-agents of type `worker`; only they
    edit and run. Their tokens are trained, too, as branches of the Episode."""
    compact_at: int | None = Field(None, ge=1, le=_WINDOW - _SUMMARY - _MARGIN)
    """History tokens at which the CLI replaces the history by a summary. None: the CLI's own limit
    above 160,000; smaller contexts then end the run instead."""
    bare: bool = False
    """Run the CLI's minimal mode (Bash, Edit and Read, a short system prompt), for models with a
    small context."""
    tool_timeout_s: float = Field(120.0, gt=0)
    """Time limit of one Bash call in seconds; the CLI's default."""

    @model_validator(mode="after")
    def _can_dispatch(self) -> Options:
        if self.dispatch == "forced" and (self.bare or self.tools):
            raise ValueError(
                "dispatch = 'forced' sets tools and agents itself: remove bare and tools"
            )
        if self.dispatch == "forced" and not is_kept_by(self.version):
            raise ValueError(
                f"version {self.version} cannot restrict its main thread; dispatch needs 2.1.143"
            )
        return self


def build(options: Options) -> ClaudeCode:
    """Fetch the bundle and return the harness.

    Raises ImageError if the bundle is unavailable, InputError if it does not support `compact_at`.
    """
    bundle = fetch(options.version, options.libc)
    if options.compact_at and not can_compact(options.version, bundle):
        raise InputError(
            f"Claude Code {options.version} does not support compact_at",
            hint="remove compact_at, or use version 2.1.112 or newer",
        )
    return ClaudeCode(options, bundle)


@dataclass(frozen=True, slots=True)
class ClaudeCode(BundledAgent[Options]):
    """Runs `claude -p` on a Task."""

    dialect: str = "anthropic"

    async def install(self, sandbox: Sandbox) -> None:
        """Check that the CLI runs, and configure the answers to its first-start questions.

        Raises BrokenImageError if the image lacks libraries, SandboxError without a home folder.
        """
        await _check(sandbox, self.options)
        await prepare(sandbox, _INSTALL, "Claude Code")

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Run the agent on the Task for at most `budget_s` seconds."""
        result = await sandbox.run(
            _argv(self.options),
            cwd=task.workdir,
            env=_environment(self.options, endpoint, budget_s),
            timeout_s=budget_s,
            stdin=_prompt(task.prompt),
        )
        records = await gather(sandbox, ".claude/projects")
        return exit_of(result, limit=_hit_limit(result), records=records)

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that Read each file once, Edit it hunk by hunk, then summarise."""
        return [*_edit_calls(edits, workdir.rstrip("/")), Message(Role.ASSISTANT, "Done.")]


async def _check(sandbox: Sandbox, options: Options) -> None:
    result = await sandbox.run(start_check(options.version), timeout_s=60)
    if result.exit_code == 0:
        return
    reason = result.text.strip()[-200:]
    message = f"Claude Code {options.version} cannot run in this image: {reason}"
    hint = "it needs libstdc++; native releases, such as version 2.1.143, do not"
    if is_native(options.version):
        other = "glibc" if options.libc == "musl" else "musl"
        hint = f'it is built for {options.libc}; for images of the other kind, libc = "{other}"'
    raise BrokenImageError(message, hint=hint)


def _argv(options: Options) -> list[str]:
    argv = program(options.version)
    argv += ["-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
    if options.tools is not None:
        argv += ["--tools", ",".join(options.tools)]
    if options.dispatch == "forced":
        argv += ["--agents", json.dumps(AGENTS), "--agent", LEAD]
    if options.bare:
        argv += ["--bare"]
    return argv


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
    """Return the variables that make every release compact at this many tokens."""
    if compact_at is None:
        return {}
    percent = 100 * compact_at / (_WINDOW - _SUMMARY)
    return {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(_WINDOW),
        # the same setting for intermediate releases such as 2.1.200
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(_WINDOW),
        COMPACT_AT: f"{percent:.4f}",
    }


def _prompt(text: str) -> bytes:
    """Return the prompt for stdin; a leading `/` would be a command of the CLI."""
    return ("\n" + text if text.lstrip().startswith("/") else text).encode()


def _hit_limit(result: Exec) -> bool:
    """True if the transcript's last line names a turn or context limit."""
    last = next(said_last(result.stdout), {})
    return last.get("terminal_reason") in _LIMIT_REASONS


def _edit_calls(edits: Sequence[FileEdit], workdir: str) -> Iterator[Message]:
    paths: set[str] = set()
    for edit in edits:
        path = f"{workdir}/{edit.path}"
        if path not in paths:
            paths.add(path)
            yield call("Read", file_path=path, limit=_READ_LINES)
        # The CLI shows every file with plain line ends and restores the file's own. An empty
        # old string creates a new file or fills an empty one.
        old, new = (text.replace("\r\n", "\n") for text in (edit.old, edit.new))
        yield call("Edit", file_path=path, old_string=old, new_string=new)


HOME = "/opt/swerl/agents/claude-code"
_NODE = "/opt/swerl/agents/node"
COMPACT_AT = "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"
"""Variable for the percentage of the window at which the CLI compacts; not in 2.0.14."""
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
"""Known tarballs; other versions are checked against npm's own hash."""


def is_native(version: str) -> bool:
    """True if a release is a native program, without Node."""
    return tuple(map(int, version.split("."))) > _LAST_JAVASCRIPT


def fetch(version: str, libc: str = "glibc") -> tuple[Mount, ...]:
    """Return the mounts of a release; download missing files.

    `libc` is the image's: `glibc` or `musl`. Raises InputError if there is no such release.
    """
    if is_native(version):
        hint = "use version 2.1.112, which needs only Node"
        processor = _bundles.processor(f"Claude Code {version}", hint=hint)
        package = f"{_PACKAGE}-linux-{processor}{'-musl' if libc == 'musl' else ''}"
        pin = _PINNED.get(f"{package}@{version}")
        return (Mount(_bundles.fetch(package, version, integrity=pin), HOME),)
    if libc == "musl":
        raise InputError(
            f"Claude Code {version} needs Node, which is not available for musl",
            hint="use a native release: version 2.1.143 or newer",
        )
    pin = _PINNED.get(f"{_PACKAGE}@{version}")
    bundle = _bundles.fetch(_PACKAGE, version, integrity=pin)
    return (Mount(bundle, HOME), Mount(_bundles.node(), _NODE))


def program(version: str) -> list[str]:
    """Return the command that starts a release in a sandbox."""
    return [f"{HOME}/claude"] if is_native(version) else [f"{_NODE}/bin/node", f"{HOME}/cli.js"]


def can_compact(version: str, bundle: Sequence[Mount]) -> bool:
    """True if a release supports `compact_at`; every native one does."""
    return is_native(version) or COMPACT_AT.encode() in (bundle[0].source / "cli.js").read_bytes()


def start_check(version: str) -> list[str]:
    """Return a quick command that succeeds if the release's program runs in the image."""
    return [program(version)[0], "--version"]


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
"""Value of the CLI's `--agents`."""
_FIRST = (2, 1, 143)
"""Oldest tested release that restricts its main thread to an agent's tools; 2.1.112 does not."""


def is_kept_by(version: str) -> bool:
    """True if a release restricts the lead agent to its tools."""
    return tuple(map(int, version.split("."))) >= _FIRST
