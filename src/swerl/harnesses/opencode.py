"""opencode, offline in the sandbox; its model calls go to the gateway.

The CLI is a bundle from npm, one native program mounted read-only. The prompt is sent by stdin.
`--format json` writes the log: one JSON object per line. Its configuration is in the environment,
and its state is in its own folder below HOME, so no configuration in an image or a repository
changes it.
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

DEFAULT_VERSION = "1.18.33"

_PACKAGES = {
    "x64": "opencode-linux-x64-baseline",  # runs on processors without AVX2, too
    "arm64": "opencode-linux-arm64",
}
_PINNED = {
    "opencode-linux-x64-baseline@1.18.33": "sha512-"
    "1KQGBiiDDeL/VHHbHkOvvFo8Jr97WT5+C1tear+p7IcDTnXgVHXqIjU4O4jM4mHQzykTP2i884FCnW5LDa+zCA==",
}
"""Known tarballs; other versions are checked against npm's own hash."""
_HOME = "/opt/swerl/agents/opencode"
_ENDLESS_MS = 24 * 3600 * 1000
_KEY = "SWERL_OPENCODE_KEY"
_OWN = '"${HOME:?no home folder}/.swerl-opencode"'

_QUIET = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_EMBEDDED_WEB_UI": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}
"""Settings that stop the CLI from contacting anything but the gateway."""
_OWN_RULES = {
    "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
    "OPENCODE_DISABLE_EXTERNAL_SKILLS": "1",
    "OPENCODE_DISABLE_CLAUDE_CODE": "1",
}
"""Settings against configuration files in an image or a repository."""

_INSTALLED = '{"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}'
"""A lock file. Without it the CLI installs this package from npm beside its configuration; nothing
here uses the package."""
_PREPARE = (
    f"mkdir -p {_OWN}/opencode/node_modules && "
    f"echo '{_INSTALLED}' >{_OWN}/opencode/package-lock.json"
)
_START = (
    f"{_cli.NO_PROXY} own={_OWN}; export XDG_CONFIG_HOME=$own XDG_DATA_HOME=$own/data "
    "XDG_STATE_HOME=$own/state XDG_CACHE_HOME=$own/cache && "
    f'exec {_HOME}/bin/opencode run --format json "$@"'
)
_FILES = _cli.FileTools(
    read="read", edit="edit", write="write", path="filePath", old="oldString", new="newString"
)


class Options(BaseModel):
    """Settings of opencode."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(DEFAULT_VERSION, pattern=r"^\d+\.\d+\.\d+$")
    """Release on npm."""


def build(options: Options) -> OpenCode:
    """Fetch the bundle and return the harness. Raises ImageError if the bundle is unavailable."""
    return OpenCode(options, fetch(options.version))


def fetch(version: str) -> tuple[Mount, ...]:
    """Return the mounts of this release; download missing files."""
    package = _PACKAGES[_bundles.processor("opencode")]
    pin = _PINNED.get(f"{package}@{version}")
    return (Mount(_bundles.fetch(package, version, integrity=pin), _HOME),)


@dataclass(frozen=True, slots=True)
class OpenCode(_cli.BundledAgent[Options]):
    """Runs `opencode run` on a Task."""

    async def install(self, sandbox: Sandbox) -> None:
        """Create the CLI's session folder."""
        await _cli.prepare(sandbox, _PREPARE, "opencode")

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Run the agent on the Task for at most `budget_s` seconds."""
        result = await sandbox.run(
            # A given title prevents a request for one.
            ["sh", "-c", _START, "sh", "--title", "task"],
            cwd=task.workdir,
            env={
                **_QUIET,
                **_OWN_RULES,
                _KEY: endpoint.key,
                "OPENCODE_CONFIG_CONTENT": json.dumps(self._config(endpoint, task.workdir)),
                "OPENCODE_EXPERIMENTAL_OUTPUT_TOKEN_MAX": str(_cli.UNCAPPED_TOKENS),
            },
            timeout_s=budget_s,
            stdin=task.prompt.encode(),
        )
        return _cli.exit_of(result, limit=_hit_limit(result.stdout))

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that read each file once, edit it hunk by hunk, then summarise."""
        return _FILES.script(edits, workdir)

    def _config(self, endpoint: Endpoint, workdir: str) -> Mapping[str, Json]:
        model = f"swerl/{endpoint.model}"
        return {
            "model": model,
            "small_model": model,
            "enabled_providers": ["swerl"],
            "provider": {"swerl": self._provider(endpoint)},
            # Every agent reads this file of the repository; its opencode.json is not read.
            "instructions": [f"{workdir.rstrip('/')}/AGENTS.md"],
            "permission": {"*": "allow"},
            # releases that request a title in any case
            "agent": {"title": {"disable": True}},
            "compaction": {"auto": False, "prune": False},
            "autoupdate": False,
            "share": "disabled",
            # features that start other programs or copy the repository
            "snapshot": False,
            "lsp": False,
            "formatter": False,
        }

    def _provider(self, endpoint: Endpoint) -> Json:
        limit: Json = dict.fromkeys(("context", "input", "output"), _cli.UNCAPPED_TOKENS)
        options: Json = {
            "baseURL": f"{endpoint.url}/v1",
            "apiKey": f"{{env:{_KEY}}}",
            # A slow model must not look dead.
            "timeout": False,
            "headerTimeout": False,
            "chunkTimeout": _ENDLESS_MS,  # not every release accepts false here
        }
        model: Json = {"name": endpoint.model, "tool_call": True, "limit": limit}
        return {
            "npm": "@ai-sdk/openai-compatible",
            "name": "swerl",
            "options": options,
            "models": {endpoint.model: model},
        }


def _hit_limit(log: bytes) -> bool:
    """True if the last reply hit its token limit or the context was full."""
    for event in _cli.said_last(log):
        if event.get("type") == "error":
            return "prompt is too long" in json.dumps(event)
        part = event.get("part")
        if event.get("type") == "step_finish" and isinstance(part, dict):
            return part.get("reason") == "length"
    return False
