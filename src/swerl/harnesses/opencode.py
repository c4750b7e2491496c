"""opencode, offline in the sandbox, its model calls going to the gateway.

The CLI comes as a bundle from npm, one native program mounted read-only. The prompt goes in by
stdin. `--format json` makes the log: one JSON object a line. Its configuration is given in the
environment, and what it keeps goes to a folder of its own below HOME, so no configuration of an
image or a repository changes it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.chat import Json, Message
from swerl.core.contracts import Endpoint, Exit, Sandbox
from swerl.core.errors import InputError
from swerl.core.patch import FileEdit
from swerl.core.sandbox import Mount
from swerl.core.task import Task
from swerl.harnesses import _bundles, _cli

DEFAULT_VERSION = "1.18.33"

_PACKAGES = {
    "x86_64": "opencode-linux-x64-baseline",  # runs on processors without AVX2 too
    "amd64": "opencode-linux-x64-baseline",
    "aarch64": "opencode-linux-arm64",
    "arm64": "opencode-linux-arm64",
}
_PINNED = {
    "opencode-linux-x64-baseline@1.18.33": "sha512-"
    "1KQGBiiDDeL/VHHbHkOvvFo8Jr97WT5+C1tear+p7IcDTnXgVHXqIjU4O4jM4mHQzykTP2i884FCnW5LDa+zCA==",
}
"""Known tarballs; other versions are checked against what npm states."""
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
"""What keeps the CLI from contacting anybody but the gateway."""
_OWN_RULES = {
    "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
    "OPENCODE_DISABLE_EXTERNAL_SKILLS": "1",
    "OPENCODE_DISABLE_CLAUDE_CODE": "1",
}
"""What keeps files of an image or a repository from configuring the CLI."""

_INSTALLED = '{"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}'
"""A lock file. The CLI installs this package from npm beside its configuration where none says that
it is there; nothing here uses it."""
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
    context_window: int | None = Field(None, ge=1)
    """Tokens of the model's context, by which the CLI compacts; without it, it never does, and a
    full context ends the run."""
    extra_args: tuple[str, ...] = ()
    """More arguments for `opencode run`, as they are."""


def build(options: Options) -> OpenCode:
    """Return the harness, its bundle fetched. Raises ImageError where it cannot be had."""
    return OpenCode(options, fetch(options.version))


def fetch(version: str) -> tuple[Mount, ...]:
    """Return the mounts of this release, downloading what is not in the cache yet."""
    machine = platform.machine().lower()
    if machine not in _PACKAGES:
        raise InputError(
            f"opencode has no release for {machine}", hint="use another agent on this machine"
        )
    package = _PACKAGES[machine]
    pin = _PINNED.get(f"{package}@{version}")
    return (Mount(_bundles.fetch(package, version, integrity=pin), _HOME),)


@dataclass(frozen=True, slots=True)
class OpenCode:
    """Runs `opencode run` on a Task."""

    options: Options
    bundle: tuple[Mount, ...]
    dialect: str = "openai-chat"
    inside: bool = True

    def mounts(self) -> Sequence[Mount]:
        """Return the CLI."""
        return self.bundle

    async def install(self, sandbox: Sandbox) -> None:
        """Make the folder in which the CLI keeps its sessions."""
        await _cli.prepare(sandbox, _PREPARE, "opencode")

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Work on the Task until done or until `budget_s` seconds are over."""
        done = await sandbox.run(
            ["sh", "-c", _START, "sh", *self._arguments()],
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
        return Exit(
            code=done.exit_code,
            timed_out=done.timed_out,
            limit=_hit_limit(done.stdout),
            log=done.text,
        )

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that read each file once, edit it hunk by hunk, and sum up."""
        return _FILES.script(edits, workdir)

    def _arguments(self) -> Sequence[str]:
        # With a title given, the model is not asked for one.
        return ["--title", "task", *self.options.extra_args]

    def _config(self, endpoint: Endpoint, workdir: str) -> Mapping[str, Json]:
        model = f"swerl/{endpoint.model}"
        return {
            "model": model,
            "small_model": model,
            "enabled_providers": ["swerl"],
            "provider": {"swerl": self._provider(endpoint)},
            # The repository's words, as every agent reads them; its opencode.json is not read.
            "instructions": [f"{workdir.rstrip('/')}/AGENTS.md"],
            "permission": {"*": "allow"},
            # releases that ask the model for a title all the same
            "agent": {"title": {"disable": True}},
            "compaction": self._compaction(),
            "autoupdate": False,
            "share": "disabled",
            # what would start other programs, or copy the repository
            "snapshot": False,
            "lsp": False,
            "formatter": False,
        }

    def _compaction(self) -> Json:
        window = self.options.context_window
        if window is None:
            return {"auto": False, "prune": False}
        return {"auto": True, "prune": False, "reserved": min(20_000, window // 4)}

    def _provider(self, endpoint: Endpoint) -> Json:
        window = self.options.context_window or _cli.UNCAPPED_TOKENS
        limit: Json = {"context": window, "input": window, "output": _cli.UNCAPPED_TOKENS}
        options: Json = {
            "baseURL": f"{endpoint.url}/v1",
            "apiKey": f"{{env:{_KEY}}}",
            # A slow model must not look dead.
            "timeout": False,
            "headerTimeout": False,
            "chunkTimeout": _ENDLESS_MS,  # not every release takes a false here
        }
        model: Json = {"name": endpoint.model, "tool_call": True, "limit": limit}
        return {
            "npm": "@ai-sdk/openai-compatible",
            "name": "swerl",
            "options": options,
            "models": {endpoint.model: model},
        }


def _hit_limit(log: bytes) -> bool:
    """Say whether the last reply was cut at its token limit or refused for a full context."""
    for event in _cli.said_last(log):
        if event.get("type") == "error":
            return "prompt is too long" in json.dumps(event)
        part = event.get("part")
        if event.get("type") == "step_finish" and isinstance(part, dict):
            return part.get("reason") == "length"
    return False
