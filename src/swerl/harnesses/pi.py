"""pi, a small agent with four tools, offline in the sandbox; its model calls go to the gateway.

The CLI is a bundle from npm with its dependencies, mounted read-only, and runs on Node. The prompt
is sent by stdin. Its settings and state are in its own folder below HOME, so no configuration in an
image changes it. The log is its session file, one JSON object per line, and its stderr.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.changes import FileEdit
from swerl.core.chat import Json, Message, Role
from swerl.core.contracts import Endpoint, Exit, Sandbox
from swerl.core.sandbox import Mount
from swerl.core.task import Task
from swerl.harnesses import _bundles, _cli

DEFAULT_VERSION = "0.73.1"
_RETRIES = 2
"""Retries of a request: the default of OpenAI's client, which newer releases of pi disable."""

_LAST_OF_FIRST_NAME = (0, 73)
"""The last release under the old npm name; later ones need a newer Node, and `$` for variables."""
_LOCKS = Path(__file__).parent / "_locks"
"""The package trees of tested versions, as npm writes them with `npm install
--package-lock-only --omit-lockfile-registry-resolved`."""
_HOME = "/opt/swerl/agents/pi"
_NODE = "/opt/swerl/agents/node"
_KEY = "SWERL_PI_KEY"
_FOLDER = ".swerl-pi"
_OWN = f'"${{HOME:?no home folder}}/{_FOLDER}"'

_QUIET = {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}
"""Settings that stop the CLI from contacting anything but the gateway."""
_PLAIN = ("--no-extensions", "--no-skills", "--no-prompt-templates", "--no-themes")
"""Flags: load nothing from an image or a repository except AGENTS.md."""

_PREPARE = f"mkdir -p {_OWN}/sessions"
_START = (
    f"{_cli.NO_PROXY} export PI_CODING_AGENT_DIR={_OWN}; "
    'printf %s "$SWERL_PI_MODELS" >"$PI_CODING_AGENT_DIR/models.json" && '
    'printf %s "$SWERL_PI_SETTINGS" >"$PI_CODING_AGENT_DIR/settings.json" && '
    "unset SWERL_PI_MODELS SWERL_PI_SETTINGS && "
    f'exec {_NODE}/bin/node "$@" --session-dir "$PI_CODING_AGENT_DIR/sessions"'
)


class Options(BaseModel):
    """Settings of pi."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(DEFAULT_VERSION, pattern=r"^\d+\.\d+\.\d+$")
    """Release on npm. Package trees of tested releases are pinned."""


def build(options: Options) -> Pi:
    """Fetch the bundle and return the harness. Raises ImageError if the bundle is unavailable."""
    return Pi(options, fetch(options.version))


def fetch(version: str) -> tuple[Mount, ...]:
    """Return the mounts of this release; download missing files."""
    lock = _LOCKS / f"pi-{version}.json"
    tree = _bundles.fetch_tree(_package(version), version, lock=lock if lock.exists() else None)
    oldest = (20, 6) if _has_first_name(version) else (22, 19)
    return (Mount(tree, _HOME), Mount(_bundles.node(oldest), _NODE))


@dataclass(frozen=True, slots=True)
class Pi(_cli.BundledAgent[Options]):
    """Runs `pi --print` on a Task."""

    async def install(self, sandbox: Sandbox) -> None:
        """Create the CLI's folder for settings and sessions."""
        await _cli.prepare(sandbox, _PREPARE, "pi")

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Run the agent on the Task for at most `budget_s` seconds."""
        result = await sandbox.run(
            ["sh", "-c", _START, "sh", *self._arguments(endpoint)],
            cwd=task.workdir,
            env={
                **_QUIET,
                _KEY: endpoint.key,
                "SWERL_PI_MODELS": json.dumps(self._models(endpoint)),
                "SWERL_PI_SETTINGS": json.dumps(self._settings(budget_s)),
            },
            timeout_s=budget_s,
            stdin=task.prompt.encode(),
        )
        session = await _cli.gather(sandbox, f"{_FOLDER}/sessions")
        return Exit(
            code=result.exit_code,
            timed_out=result.timed_out,
            limit=_hit_limit(session),
            log=(session + result.stderr).decode("utf-8", "replace"),
        )

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that make each edit with one call, then summarise."""
        calls = [_edit_call(edit, workdir.rstrip("/")) for edit in edits]
        return [*calls, Message(Role.ASSISTANT, "Done.")]

    def _arguments(self, endpoint: Endpoint) -> Sequence[str]:
        cli = f"{_HOME}/node_modules/{_package(self.options.version)}/dist/cli.js"
        return [cli, "--print", "--provider", "swerl", "--model", endpoint.model, *_PLAIN]

    def _models(self, endpoint: Endpoint) -> Mapping[str, Json]:
        model: Json = {
            "id": endpoint.model,
            "contextWindow": _cli.ENDLESS_CONTEXT,
            "maxTokens": _cli.UNCAPPED_TOKENS,
        }
        provider: Json = {
            "baseUrl": f"{endpoint.url}/v1",
            "api": "openai-completions",
            # environment variable with the key
            "apiKey": _KEY if _has_first_name(self.options.version) else f"${_KEY}",
            "compat": {"supportsDeveloperRole": False, "supportsStore": False},
            "models": [model],
        }
        return {"providers": {"swerl": provider}}

    def _settings(self, budget_s: float) -> Mapping[str, Json]:
        return {
            # Without it pi compacts after its last reply, for a next prompt that never comes.
            "compaction": {"enabled": False},
            # A broken stream has been sampled: a retry samples twice.
            # Requests refused before a stream began are retried, as the provider's own
            # client does. A slow model must not look dead.
            "retry": {
                "enabled": False,
                "provider": {"timeoutMs": int(budget_s * 1000), "maxRetries": _RETRIES},
            },
        }


def _hit_limit(session: bytes) -> bool:
    """True if the last reply hit its token limit or the context was full."""
    for entry in _cli.said_last(session):
        message = entry.get("message")
        if isinstance(message, dict) and message.get("role") == "assistant":
            refused = "prompt is too long" in str(message.get("errorMessage", ""))
            return refused or message.get("stopReason") == "length"
    return False


def _edit_call(edit: FileEdit, workdir: str) -> Message:
    path = f"{workdir}/{edit.path}"
    if not edit.old:  # a new or empty file
        return _cli.call("write", path=path, content=edit.new)
    changes: list[Json] = [{"oldText": edit.old, "newText": edit.new}]
    return _cli.call("edit", path=path, edits=changes)


def _package(version: str) -> str:
    scope = "@mariozechner" if _has_first_name(version) else "@earendil-works"
    return f"{scope}/pi-coding-agent"


def _has_first_name(version: str) -> bool:
    major, minor, _ = version.split(".")
    return (int(major), int(minor)) <= _LAST_OF_FIRST_NAME
