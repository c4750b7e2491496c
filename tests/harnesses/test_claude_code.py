"""Claude Code: what it is started with, and whole episodes of the real CLI through the gateway."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from swerl.chat import Message
from swerl.engines.scripted import ScriptedEngine
from swerl.errors import SwerlError
from swerl.families import tiny
from swerl.gateway.app import Gateway
from swerl.gateway.limits import SessionLimits
from swerl.harnesses import claude_code
from swerl.harnesses.claude_code import ClaudeCode, Options
from swerl.interfaces import Endpoint, Exit
from swerl.patch import FileEdit, edits
from swerl.sample import to_samples
from swerl.sandbox import Exec, Limits, Mount
from swerl.sandboxes import local
from swerl.task import GradingSpec, Task
from swerl.tree import Trajectory
from swerl.turn import Sampling

HARNESS = ClaudeCode(Options(), ())
PATCH = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
@@ -9,1 +9,1 @@
-x = 1
+x = 2
diff --git a/new.py b/new.py
--- /dev/null
+++ b/new.py
@@ -0,0 +1,1 @@
+y = 1
"""


class Recorder:
    """A sandbox that remembers what it was asked to run and answers with one prepared end."""

    id = "recorder"

    def __init__(self, stdout: bytes = b"", *, exit_code: int = 0, timed_out: bool = False) -> None:
        self.calls: list[dict[str, object]] = []
        self._exec = Exec(exit_code, stdout, b"", timed_out)

    async def run(self, argv: list[str], **keywords: object) -> Exec:
        self.calls.append({"argv": argv, **keywords})
        return self._exec


def _task(prompt: str = "Fix add.", image: str = "host") -> Task:
    spec = GradingSpec(grader="command", test_command="true")
    return Task("t-1", "r", image, "/repo", prompt, spec)


def _calls(messages: list[Message]) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, dict(call.arguments)) for m in messages for call in m.tool_calls]


def test_script_reads_each_file_once_then_makes_every_edit() -> None:
    calls = _calls(list(HARNESS.script(edits(PATCH), "/repo/")))
    assert [(name, arguments["file_path"]) for name, arguments in calls] == [
        ("Read", "/repo/calc.py"),
        ("Edit", "/repo/calc.py"),
        ("Edit", "/repo/calc.py"),
        ("Read", "/repo/new.py"),
        ("Edit", "/repo/new.py"),
    ]
    assert calls[1][1]["new_string"] == "def add(a, b):\n    return a + b\n"
    assert calls[4][1] == {"file_path": "/repo/new.py", "old_string": "", "new_string": "y = 1\n"}


def test_script_ends_with_text_alone_so_that_the_agent_stops() -> None:
    last = HARNESS.script([], "/repo")[-1]
    assert last.text
    assert not last.tool_calls


def test_script_shows_plain_line_ends_because_the_cli_does() -> None:
    _, (_, edit) = _calls(list(HARNESS.script([FileEdit("a", "x\r\n", "y\r\n")], "/repo")))
    assert (edit["old_string"], edit["new_string"]) == ("x\n", "y\n")


async def test_run_points_every_model_of_the_cli_at_the_gateway() -> None:
    sandbox = Recorder()
    endpoint = Endpoint("http://127.0.0.1:8080", "key-1", "policy")
    await HARNESS.run(sandbox, _task(), endpoint, 90.0)  # type: ignore[arg-type]
    (call,) = sandbox.calls
    env = call["env"]
    assert isinstance(env, dict)
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert env["ANTHROPIC_AUTH_TOKEN"] == "key-1"
    assert env["ANTHROPIC_MODEL"] == env["ANTHROPIC_SMALL_FAST_MODEL"] == "policy"
    assert (call["cwd"], call["timeout_s"], call["stdin"]) == ("/repo", 90.0, b"Fix add.")


async def test_prompt_that_begins_like_a_command_reaches_the_model() -> None:
    sandbox = Recorder()
    endpoint = Endpoint("http://127.0.0.1:8080", "k", "m")
    await HARNESS.run(sandbox, _task("/etc is wrong"), endpoint, 9.0)  # type: ignore[arg-type]
    assert sandbox.calls[0]["stdin"] == b"\n/etc is wrong"


@pytest.mark.parametrize(
    ("reason", "limit"),
    [("max_turns", True), ("prompt_too_long", True), ("completed", False), (None, False)],
)
async def test_limits_are_told_from_breakdowns(reason: str | None, limit: bool) -> None:
    lines = [{"type": "system"}, {"type": "result", "terminal_reason": reason}]
    stdout = "".join(json.dumps(line) + "\n" for line in lines).encode()
    endpoint = Endpoint("http://127.0.0.1:8080", "k", "m")
    done = await HARNESS.run(Recorder(stdout, exit_code=1), _task(), endpoint, 9.0)  # type: ignore[arg-type]
    assert (done.code, done.limit, done.log) == (1, limit, stdout.decode())


async def test_transcript_cut_short_by_a_kill_is_a_timeout() -> None:
    endpoint = Endpoint("http://127.0.0.1:8080", "k", "m")
    sandbox = Recorder(b'{"type": "assi', exit_code=124, timed_out=True)
    done = await HARNESS.run(sandbox, _task(), endpoint, 9.0)  # type: ignore[arg-type]
    assert done.timed_out
    assert not done.limit


def test_native_releases_mount_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def fetch(package: str, version: str, *, integrity: str | None = None) -> Path:
        fetched.append((package, version, bool(integrity)))
        return Path("/cache")

    monkeypatch.setattr(claude_code._bundles, "fetch", fetch)
    monkeypatch.setattr(claude_code._bundles, "node", lambda: Path("/node"))
    monkeypatch.setattr(claude_code.platform, "machine", lambda: "x86_64")
    native = claude_code.fetch("2.1.143")
    javascript = claude_code.fetch("2.1.112")
    assert native == (Mount(Path("/cache"), "/opt/swerl/agents/claude-code"),)
    assert javascript[1] == Mount(Path("/node"), "/opt/swerl/agents/node")
    assert fetched == [
        ("@anthropic-ai/claude-code-linux-x64", "2.1.143", False),
        ("@anthropic-ai/claude-code", "2.1.112", True),
    ]


@pytest.fixture(scope="module")
def harness() -> ClaudeCode:
    """The real CLI in its default release; skips where it cannot be had."""
    try:
        return claude_code.build(Options())
    except SwerlError as error:
        pytest.skip(f"no Claude Code bundle: {error}")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n" + "\n" * 6 + "x = 1\n")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    return folder


@dataclass(frozen=True, slots=True)
class Worked:
    """What one run of the CLI left."""

    exit: Exit
    files: Mapping[str, str]
    trajectory: Trajectory


async def _work(
    harness: ClaudeCode, task: Task, read: Sequence[str], *, limits: SessionLimits
) -> Worked:
    family = tiny.build(None)
    backend = local.build(local.Options())
    engine = ScriptedEngine(family, lambda _: harness.script(edits(PATCH), task.workdir))
    opened = backend.open(task.image, Limits(), workdir=task.workdir, mounts=harness.mounts())
    async with Gateway(engine=engine, family=family) as gateway, opened as sandbox:
        session = gateway.open("s", sampling=Sampling(max_new_tokens=4096), limits=limits)
        await harness.install(sandbox)
        url = await sandbox.expose(session)
        done = await harness.run(sandbox, task, session.endpoint(url), 60.0)
        files = {path: (await sandbox.read(f"/repo/{path}")).decode() for path in read}
        return Worked(done, files, await session.close())


ROOMY = SessionLimits(max_context_tokens=2**20)


@pytest.mark.agents
async def test_cli_makes_the_gold_edit_and_every_sampled_token_is_trained(
    harness: ClaudeCode, repository: Path
) -> None:
    task = _task(image=f"dir:{repository}")
    worked = await _work(harness, task, ["calc.py", "new.py"], limits=ROOMY)
    assert worked.exit.code == 0, worked.exit.log
    assert worked.files["calc.py"].startswith("def add(a, b):\n    return a + b\n")
    assert worked.files["calc.py"].endswith("x = 2\n")
    assert worked.files["new.py"] == "y = 1\n"
    samples = to_samples(worked.trajectory, episode="e", task=task.id)
    assert len(worked.trajectory.turns) == 6
    assert len(samples) == 1
    assert samples[0].num_trained_tokens == worked.trajectory.num_sampled_tokens > 0
    assert not worked.trajectory.dropped


@pytest.mark.agents
async def test_clis_own_turn_limit_keeps_the_work_so_far(
    harness: ClaudeCode, repository: Path
) -> None:
    limited = ClaudeCode(Options(max_turns=2), harness.bundle)
    task = _task(image=f"dir:{repository}")
    worked = await _work(limited, task, ["calc.py"], limits=ROOMY)
    assert worked.exit.limit
    assert len(worked.trajectory.turns) == 2
    assert "a + b" in worked.files["calc.py"]
    assert worked.files["calc.py"].endswith("x = 1\n")


@pytest.mark.agents
async def test_full_context_is_a_limit_and_not_a_breakdown(
    harness: ClaudeCode, repository: Path
) -> None:
    task = _task(image=f"dir:{repository}")
    worked = await _work(harness, task, [], limits=SessionLimits(max_context_tokens=1000))
    assert worked.exit.limit, worked.exit.log
    assert not worked.trajectory.turns


@pytest.mark.agents
async def test_budget_ends_the_cli_and_all_its_processes(
    harness: ClaudeCode, repository: Path
) -> None:
    backend = local.build(local.Options())
    async with backend.open(
        f"dir:{repository}", Limits(), workdir="/repo", mounts=harness.mounts()
    ) as sandbox:
        await harness.install(sandbox)
        endpoint = Endpoint("http://127.0.0.1:9", "k", "m")
        done = await harness.run(sandbox, _task(), endpoint, 0.2)
        left = await sandbox.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
    assert done.timed_out
    assert "claude-code" not in left.stdout.decode()
