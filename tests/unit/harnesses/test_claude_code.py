"""Claude Code: what it is started with, and what its end means. Its runs are in files of their own.

Releases of before and after the native ones differ in how they are fetched and started.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from swerl.core.changes import edits
from swerl.core.chat import Message
from swerl.core.errors import BrokenImageError, InputError
from swerl.core.sandbox import Mount
from swerl.harnesses import claude_code
from swerl.harnesses.claude_code import ClaudeCode, Options

from .helpers import PATCH, Recorder, ended, started

HARNESS = ClaudeCode(Options(), ())


def _calls(messages: list[Message]) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, dict(call.arguments)) for m in messages for call in m.tool_calls]


def test_script_reads_each_file_once_then_makes_every_edit() -> None:
    calls = _calls(list(HARNESS.script(edits(PATCH), "/repo/")))
    assert [(name, arguments["file_path"]) for name, arguments in calls] == [
        ("Read", "/repo/calc.py"),
        ("Edit", "/repo/calc.py"),
        ("Edit", "/repo/calc.py"),
        ("Read", "/repo/it's new.py"),
        ("Edit", "/repo/it's new.py"),
    ]
    assert calls[1][1]["new_string"] == "def add(a, b):\n    return a + b\n"
    new = {"file_path": "/repo/it's new.py", "old_string": "", "new_string": "y = '1'\n"}
    assert calls[4][1] == new


async def test_run_points_every_model_of_the_cli_at_the_gateway() -> None:
    call = await started(HARNESS)
    env = call["env"]
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert env["ANTHROPIC_AUTH_TOKEN"] == "key-1"
    assert env["ANTHROPIC_MODEL"] == env["ANTHROPIC_SMALL_FAST_MODEL"] == "policy"
    assert (call["cwd"], call["timeout_s"], call["stdin"]) == ("/repo", 90.0, b"Fix add.")


@pytest.mark.parametrize(
    ("reason", "limit"),
    [("max_turns", True), ("prompt_too_long", True), ("completed", False), (None, False)],
)
async def test_limits_are_told_from_breakdowns(reason: str | None, limit: bool) -> None:
    result = {"type": "result", "terminal_reason": reason}
    done = await ended(HARNESS, {"type": "system"}, result, exit_code=1)
    assert (done.code, done.limit) == (1, limit)
    assert done.log.endswith(json.dumps(result) + "\n")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """What is fetched from here on: package, version, and whether its bytes are known."""
    asked = []

    def fetch(package: str, version: str, *, integrity: str | None = None) -> Path:
        asked.append((package, version, bool(integrity)))
        return Path("/cache")

    monkeypatch.setattr(claude_code._bundles, "fetch", fetch)
    monkeypatch.setattr(claude_code._bundles, "node", lambda: Path("/node"))
    monkeypatch.setattr(claude_code._bundles.platform, "machine", lambda: "x86_64")
    return asked


@pytest.mark.parametrize("version", ["2.1.143", "2.1.330"])
def test_native_releases_mount_one_program(
    fetched: list[tuple[str, str, bool]], version: str
) -> None:
    mounts = claude_code.fetch(version)
    assert mounts == (Mount(Path("/cache"), "/opt/swerl/agents/claude-code"),)
    assert fetched == [("@anthropic-ai/claude-code-linux-x64", version, True)]


def test_the_javascript_release_mounts_node_too(fetched: list[tuple[str, str, bool]]) -> None:
    mounts = claude_code.build(Options()).mounts()
    assert mounts[1] == Mount(Path("/node"), "/opt/swerl/agents/node")
    assert fetched == [("@anthropic-ai/claude-code", "2.1.112", True)]


def test_images_with_musl_get_a_program_of_their_own(fetched: list[tuple[str, str, bool]]) -> None:
    claude_code.build(Options(version="2.1.143", libc="musl"))
    assert fetched[0][0] == "@anthropic-ai/claude-code-linux-x64-musl"
    with pytest.raises(InputError, match=r"2\.1\.112 needs Node") as caught:
        claude_code.build(Options(libc="musl"))
    assert "native" in caught.value.hint


@pytest.mark.parametrize(
    ("version", "libc", "hint"),
    [
        ("2.1.112", "glibc", "native"),
        ("2.1.143", "glibc", '"musl"'),
        ("2.1.143", "musl", '"glibc"'),
    ],
)
async def test_an_image_that_cannot_run_it_is_told_at_once(
    version: str, libc: str, hint: str
) -> None:
    options = Options.model_validate({"version": version, "libc": libc})
    sandbox = Recorder(b"No such file or directory", exit_code=127)
    with pytest.raises(BrokenImageError, match="cannot run in this image: No such") as caught:
        await ClaudeCode(options, ()).install(sandbox)  # type: ignore[arg-type]
    assert hint in caught.value.hint


async def test_it_compacts_at_a_share_of_the_window_that_it_is_told() -> None:
    env = (await started(ClaudeCode(Options(compact_at=45_000), ())))["env"]
    assert float(env["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"]) == 25
    assert env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "200000"


def test_a_summary_later_than_the_cli_can_make_it_is_refused() -> None:
    with pytest.raises(ValidationError, match="167000"):
        Options(compact_at=170_000)


@pytest.mark.parametrize(
    ("cli", "can"), [("x.CLAUDE_AUTOCOMPACT_PCT_OVERRIDE", True), ("x", False)]
)
def test_a_release_that_cannot_be_told_where_to_compact_refuses_it(
    cli: str, can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cli.js").write_text(cli)
    monkeypatch.setattr(claude_code, "fetch", lambda *_: (Mount(tmp_path, "/agent"),))
    claude_code.build(Options(version="2.0.14"))
    if can:
        claude_code.build(Options(version="2.0.14", compact_at=45_000))
        return
    with pytest.raises(InputError, match=r"2\.0\.14 does not support compact_at"):
        claude_code.build(Options(version="2.0.14", compact_at=45_000))
