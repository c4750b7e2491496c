"""Qwen Code, offline in the sandbox; its model calls go to the gateway.

The CLI is a bundle from npm that needs only Node, mounted read-only. The prompt is sent by stdin.
`stream-json` writes the log: one JSON object per line. Its settings and state are in its own folder
below HOME, so no configuration in an image changes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.changes import FileEdit
from swerl.core.chat import Json, Message
from swerl.core.contracts import Endpoint, Exit, Sandbox
from swerl.core.sandbox import Mount
from swerl.core.task import Task
from swerl.harnesses import _bundles, _cli

DEFAULT_VERSION = "0.24.4"

_PACKAGE = "@qwen-code/qwen-code"
_PINNED = {
    "0.24.4": "sha512-"
    "pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg==",
    "0.15.10": "sha512-"
    "A1rAUg7TTO62yuwogzEstMWLVxQ4n4JO26k9t6s93Ed14svp7W+7WEAAZhUMmxPf/q9xQQW7LwX48cuQcgKDBQ==",
}
"""Known tarballs; other versions are checked against npm's own hash."""
_LEFT_OUT = r"package/(web-shell|examples|export-transcript-document|vendor/ripgrep/\w+-(?!linux))"
"""Files for browsers, people or other platforms; not part of the bundle."""
_OLDEST_NODE = (22,)
_HOME = "/opt/swerl/agents/qwen-code"
_NODE = "/opt/swerl/agents/node"
_FOLDER = ".swerl-qwen"
_OWN = f'"${{HOME:?no home folder}}/{_FOLDER}"'
_QUIET = {"QWEN_CODE_NO_RELAUNCH": "1", "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"}
"""One process instead of two, and no warning in every log."""

_PREPARE = f"mkdir -p {_OWN}"
_START = (
    f"{_cli.NO_PROXY} export QWEN_HOME={_OWN}; "
    'printf %s "$SWERL_QWEN_SETTINGS" >"$QWEN_HOME/settings.json" && unset SWERL_QWEN_SETTINGS && '
    # releases before 0.15 ignore QWEN_HOME; all of them read the system settings
    'export QWEN_CODE_SYSTEM_SETTINGS_PATH="$QWEN_HOME/settings.json" && '
    f'exec {_NODE}/bin/node {_HOME}/cli.js "$@"'
)
_FILES = _cli.FileTools(
    read="read_file",
    edit="edit",
    write="write_file",
    path="file_path",
    old="old_string",
    new="new_string",
)


class Options(BaseModel):
    """Settings of Qwen Code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(DEFAULT_VERSION, pattern=r"^\d+\.\d+\.\d+$")
    """Release on npm."""


def build(options: Options) -> QwenCode:
    """Fetch the bundle and return the harness. Raises ImageError if the bundle is unavailable."""
    return QwenCode(options, fetch(options.version))


def fetch(version: str) -> tuple[Mount, ...]:
    """Return the mounts of this release; download missing files."""
    bundle = _bundles.fetch(
        _PACKAGE,
        version,
        integrity=_PINNED.get(version),
        keep=rf"(?!{_LEFT_OUT}).*",
        programs=r".*/rg",
    )
    return (Mount(bundle, _HOME), Mount(_bundles.node(_OLDEST_NODE), _NODE))


@dataclass(frozen=True, slots=True)
class QwenCode(_cli.BundledAgent[Options]):
    """Runs `qwen` on a Task."""

    async def install(self, sandbox: Sandbox) -> None:
        """Create the CLI's settings folder."""
        await _cli.prepare(sandbox, _PREPARE, "Qwen Code")

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Run the agent on the Task for at most `budget_s` seconds."""
        result = await sandbox.run(
            ["sh", "-c", _START, "sh", *self._arguments()],
            cwd=task.workdir,
            env={
                **_QUIET,
                "OPENAI_API_KEY": endpoint.key,
                "OPENAI_BASE_URL": f"{endpoint.url}/v1",
                "OPENAI_MODEL": endpoint.model,
                "SWERL_QWEN_SETTINGS": json.dumps(self._settings(budget_s)),
            },
            timeout_s=budget_s,
            stdin=_prompt(task.prompt),
        )
        records = await _cli.gather(sandbox, f"{_FOLDER}/projects")
        return _cli.exit_of(result, limit=_hit_limit(result.stdout), records=records)

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that read each file once, edit it hunk by hunk, then summarise."""
        return _FILES.script(edits, workdir)

    def _arguments(self) -> Sequence[str]:
        return ["--auth-type", "openai", "--yolo", "--output-format", "stream-json"]

    def _settings(self, budget_s: float) -> Mapping[str, Json]:
        generation: Json = {
            "contextWindowSize": _cli.ENDLESS_CONTEXT,
            # Without it the CLI repeats a truncated reply with a higher limit.
            "samplingParams": {"max_tokens": _cli.UNCAPPED_TOKENS},
            # A slow model must not look dead: a repeated request samples twice.
            "timeout": int(budget_s * 1000),
            "streamIdleTimeoutMs": 0,
        }
        return {
            # stop the CLI from contacting anything but the gateway
            "general": {
                "enableAutoUpdate": False,
                "gitCoAuthor": {"commit": False, "pr": False},
                "preventSystemSleep": False,
            },
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            # features with extra model requests
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "experimental": {"emitToolUseSummaries": False},
            "ui": {"enableFollowupSuggestions": False},
            "model": {"skipNextSpeakerCheck": True, "generationConfig": generation},
            # features that rewrite the history
            "context": {"clearContextOnIdle": _NEVER},
            "disableAllHooks": True,
        }


_NEVER: Json = {"toolResultsThresholdMinutes": -1, "toolResultsTotalCharsThreshold": -1}


def _prompt(text: str) -> bytes:
    """Return the prompt for stdin; a leading `/` would be a command of the CLI."""
    return ("\n" + text if text.lstrip().startswith("/") else text).encode()


def _hit_limit(log: bytes) -> bool:
    """True if the transcript ends because of a full context, refused or predicted."""
    for event in _cli.said_last(log):
        if event.get("type") == "result":
            error = json.dumps(event.get("error", ""))
            return "prompt is too long" in error or "Context is too large" in error
    return False
