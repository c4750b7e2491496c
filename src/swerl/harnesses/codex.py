"""The Codex CLI, offline in the sandbox; its model calls go to the gateway.

The CLI is a bundle from npm, a static program mounted read-only. The prompt is sent by stdin.
`--json` writes the log: one JSON object per line. All settings are on the command line, so no home
folder of an image changes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from swerl.core.changes import FileEdit
from swerl.core.chat import Message, Role
from swerl.core.contracts import Endpoint, Exit, Sandbox
from swerl.core.errors import ImageError
from swerl.core.sandbox import Mount
from swerl.core.task import Task
from swerl.harnesses import _bundles
from swerl.harnesses._cli import (
    NO_PROXY,
    BundledAgent,
    call,
    edit_command,
    exit_of,
    gather,
    prepare,
    said_last,
)

DEFAULT_VERSION = "0.169.0"

_PACKAGE = "@openai/codex"
_PINNED = {
    f"{_PACKAGE}@0.169.0-linux-x64": "sha512-"
    "o05NyAOCDygSPRo1yinzxvkRSdmsZyBD9E7mbpmjRanSfM8lypqWtQgEo4XfNkwhuCR2aFu8mlGOsQGFXVbVww==",
}
"""Known tarballs; other versions are checked against npm's own hash."""
_OLDEST = (0, 99)
"""First release with one npm package per platform."""
_TRIPLES = {"x64": "x86_64", "arm64": "aarch64"}
"""The compiler's name of each processor."""
_HOME = "/opt/swerl/agents/codex"
_KEY = "SWERL_CODEX_KEY"

_QUIET = {
    "analytics.enabled": "false",
    "check_for_update_on_startup": "false",
    "web_search": '"disabled"',
}
"""Settings that stop the CLI from contacting anything but the gateway."""
_UNUSED = ("apps", "plugins", "goals", "remote_models")
"""Features that need the vendor's servers or a person. With the last one, old releases wait 5 s for
a vendor address at every start."""
_SUB_AGENTS = ("multi_agent", "collab")
"""Features for sub-agents, by their names in all releases; off, as they triple the tools' text."""
_RETRIES = 7
"""Retries of a refused request: every second if the engine is away; after other failures with
doubling pauses, 25 s in total."""

_LIMIT_WORDS = ("max_output_tokens", "context window", "context_length_exceeded")
"""The CLI's messages for a reply or context at its limit."""

_START = f'{NO_PROXY}PATH="$PATH:{_HOME}/path" exec {_HOME}/bin/codex "$@"'
_PREPARE = 'mkdir -p "${HOME:?no home folder}/.codex"'


class Options(BaseModel):
    """Settings of Codex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(DEFAULT_VERSION, pattern=r"^\d+\.\d+\.\d+$")
    """Release on npm, 0.99.0 or newer."""
    compact_at: int | None = Field(None, ge=1)
    """History tokens at which the CLI replaces the history by a summary. None: the CLI's own guess
    for the model."""

    @field_validator("version")
    @classmethod
    def _is_split(cls, version: str) -> str:
        major, minor, _ = version.split(".")
        if (int(major), int(minor)) < _OLDEST:
            raise ValueError(f"Codex {version} is too old; use 0.99.0 or newer")
        return version


def build(options: Options) -> Codex:
    """Fetch the bundle and return the harness. Raises ImageError if the bundle is unavailable."""
    return Codex(options, fetch(options.version))


def fetch(version: str) -> tuple[Mount, ...]:
    """Return the mounts of this release; download missing files."""
    processor = _bundles.processor("Codex")
    release = f"{version}-linux-{processor}"
    # left out: other platforms, and helpers for voice and for its own sandbox
    native = f"{_TRIPLES[processor]}-unknown-linux-musl"
    keep = rf"package/(package\.json|vendor/{native}/.*/(codex|rg))"
    pin = _PINNED.get(f"{_PACKAGE}@{release}")
    bundle = _bundles.fetch(_PACKAGE, release, integrity=pin, keep=keep)
    return (
        Mount(_folder_of(bundle, "codex"), f"{_HOME}/bin"),
        Mount(_folder_of(bundle, "rg"), f"{_HOME}/path"),
    )


@dataclass(frozen=True, slots=True)
class Codex(BundledAgent[Options]):
    """Runs `codex exec` on a Task."""

    dialect: str = "openai-responses"

    async def install(self, sandbox: Sandbox) -> None:
        """Create the CLI's session folder."""
        await prepare(sandbox, _PREPARE, "Codex")

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Run the agent on the Task for at most `budget_s` seconds."""
        result = await sandbox.run(
            ["sh", "-c", _START, "sh", *self._arguments(endpoint, budget_s)],
            cwd=task.workdir,
            env={_KEY: endpoint.key},
            timeout_s=budget_s,
            stdin=task.prompt.encode(),
        )
        records = await gather(sandbox, ".codex/sessions")
        return exit_of(result, limit=_hit_limit(result.stdout), records=records)

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that make each edit with one shell command, then summarise."""
        commands = [edit_command(edit, workdir.rstrip("/")) for edit in edits]
        calls = [call("exec_command", cmd=command) for command in commands]
        return [*calls, Message(Role.ASSISTANT, "Done.")]

    def _arguments(self, endpoint: Endpoint, budget_s: float) -> Iterator[str]:
        yield from ("exec", "--json", "--skip-git-repo-check")
        yield "--dangerously-bypass-approvals-and-sandbox"
        for key, value in {**_QUIET, **self._settings(endpoint, budget_s)}.items():
            yield from ("-c", f"{key}={value}")
        for feature in (*_UNUSED, *_SUB_AGENTS):
            yield from ("-c", f"features.{feature}=false")
        yield "-"  # the prompt comes by stdin

    def _settings(self, endpoint: Endpoint, budget_s: float) -> Mapping[str, str]:
        provider = {
            "name": "swerl",
            "base_url": f"{endpoint.url}/v1",
            "env_key": _KEY,
            "wire_api": "responses",
        }
        settings = {"model": endpoint.model, "model_provider": "swerl"}
        settings |= {f"model_providers.swerl.{key}": value for key, value in provider.items()}
        quoted = {key: json.dumps(value) for key, value in settings.items()}
        # A broken stream has been sampled: a retry samples twice. And a slow model must not
        # look dead.
        quoted["model_providers.swerl.stream_max_retries"] = "0"
        quoted["model_providers.swerl.request_max_retries"] = str(_RETRIES)
        quoted["model_providers.swerl.stream_idle_timeout_ms"] = str(int(budget_s * 1000))
        if self.options.compact_at:
            quoted["model_auto_compact_token_limit"] = str(self.options.compact_at)
        return quoted


def _hit_limit(log: bytes) -> bool:
    """True if the run ended because a reply or the context was at its limit."""
    for event in said_last(log):
        if event.get("type") == "turn.failed":
            said = json.dumps(event.get("error"))
            return any(word in said for word in _LIMIT_WORDS)
    return False


def _folder_of(bundle: Path, program: str) -> Path:
    path = next(bundle.glob(f"vendor/*/*/{program}"), None)
    if path is None:
        raise ImageError(f"the Codex bundle {bundle} has no {program}", hint="use another version")
    return path.parent
