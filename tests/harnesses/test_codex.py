"""Codex: what it is started with, and whole episodes of the real CLI through the gateway."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from swerl.engines.scripted import ScriptedEngine
from swerl.errors import SwerlError
from swerl.families import tiny
from swerl.gateway.app import Gateway
from swerl.gateway.limits import SessionLimits
from swerl.harnesses import codex
from swerl.harnesses.codex import Codex, Options
from swerl.interfaces import Endpoint, Exit
from swerl.patch import FileEdit, edits
from swerl.sample import to_samples
from swerl.sandbox import Exec, Limits
from swerl.sandboxes import local
from swerl.task import GradingSpec, Task
from swerl.tree import Trajectory
from swerl.turn import Sampling

ENDPOINT = Endpoint("http://127.0.0.1:8080", "key-1", "policy")
ROOMY = SessionLimits(max_context_tokens=2**20)
PATCH = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
diff --git a/it's new.py b/it's new.py
--- /dev/null
+++ b/it's new.py
@@ -0,0 +1,1 @@
+y = '1'
"""


class Recorder:
    """A sandbox that remembers what it was asked to run and answers with one prepared end."""

    id = "recorder"

    def __init__(self, stdout: bytes = b"", *, exit_code: int = 0) -> None:
        self.calls: list[dict[str, object]] = []
        self._exec = Exec(exit_code, stdout, b"")

    async def run(self, argv: list[str], **keywords: object) -> Exec:
        self.calls.append({"argv": argv, **keywords})
        return self._exec


def _task(prompt: str = "Fix add.", image: str = "host") -> Task:
    spec = GradingSpec(grader="command", test_command="true")
    return Task("t-1", "r", image, "/repo", prompt, spec)


async def test_run_points_the_cli_at_the_gateway_and_keeps_the_key_off_its_command_line() -> None:
    sandbox = Recorder()
    await Codex(Options(), ()).run(sandbox, _task("-q what"), ENDPOINT, 90.0)  # type: ignore[arg-type]
    call, _ = sandbox.calls
    argv = call["argv"]
    assert isinstance(argv, list)
    assert 'model_providers.swerl.base_url="http://127.0.0.1:8080/v1"' in argv
    assert 'model="policy"' in argv
    assert not [word for word in argv if "key-1" in word]
    assert call["env"] == {"SWERL_CODEX_KEY": "key-1"}
    assert (call["cwd"], call["timeout_s"], call["stdin"]) == ("/repo", 90.0, b"-q what")


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("Incomplete response returned, reason: max_output_tokens", True),
        ("Codex ran out of room in the model's context window.", True),
        ("stream disconnected", False),
    ],
)
async def test_limits_are_told_from_breakdowns(said: str, limit: bool) -> None:
    lines = [{"type": "turn.started"}, {"type": "turn.failed", "error": {"message": said}}]
    stdout = "".join(json.dumps(line) + "\n" for line in lines).encode()
    sandbox = Recorder(stdout, exit_code=1)
    done = await Codex(Options(), ()).run(sandbox, _task(), ENDPOINT, 9.0)  # type: ignore[arg-type]
    assert (done.code, done.limit) == (1, limit)


@pytest.mark.parametrize(("version", "chat"), [("0.94.0", True), ("0.169.0", False)])
def test_the_release_decides_the_dialect_and_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, chat: bool
) -> None:
    for program in ("codex", "rg"):
        (tmp_path / "vendor" / "triple" / program).mkdir(parents=True)
        (tmp_path / "vendor" / "triple" / program / program).touch()
    asked = []

    def fetch(_: str, release: str, *, integrity: str | None, keep: str) -> Path:
        asked.append((release, bool(integrity)))
        return tmp_path

    monkeypatch.setattr(codex._bundles, "fetch", fetch)
    monkeypatch.setattr(codex.platform, "machine", lambda: "x86_64")
    harness = codex.build(Options(version=version))
    assert harness.dialect == ("openai-chat" if chat else "openai-responses")
    assert asked == [(version if chat else "0.169.0-linux-x64", True)]


@pytest.mark.parametrize("old", ["a.b\n", "x'\"$HOME\\`", ""])
def test_scripted_edits_keep_every_character(tmp_path: Path, old: str) -> None:
    new = "é \\1 $& 'quoted'\r\n"
    (tmp_path / "f").write_text(f"1{old}2{old}" if old else "", newline="")
    expected = f"1{new}2{old}" if old else new
    message, _ = Codex(Options(), ()).script([FileEdit("f", old, new)], str(tmp_path))
    command = str(message.tool_calls[0].arguments["cmd"])
    for without_python in (False, True):
        (tmp_path / "f").write_text(f"1{old}2{old}" if old else "", newline="")
        shell = command.replace("command -v python3", "false") if without_python else command
        subprocess.run(["sh", "-c", shell], check=True)
        assert (tmp_path / "f").read_bytes().decode() == expected


@pytest.fixture(scope="module", params=[codex.DEFAULT_VERSION, "0.94.0"])
def harness(request: pytest.FixtureRequest) -> Codex:
    """The real CLI, the newest tested and the last that speaks chat; skips where it is not."""
    try:
        return codex.build(Options(version=request.param))
    except SwerlError as error:
        pytest.skip(f"no Codex bundle: {error}")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    return folder


async def _work(
    harness: Codex, task: Task, *, limits: SessionLimits, max_new_tokens: int = 4096
) -> tuple[Exit, Trajectory, str]:
    """Let the CLI work; return its end, the Trajectory and the work tree's diff."""
    family = tiny.build(None)
    engine = ScriptedEngine(family, lambda _: harness.script(edits(PATCH), task.workdir))
    opened = local.build(local.Options()).open(
        task.image, Limits(), workdir=task.workdir, mounts=harness.mounts()
    )
    async with Gateway(engine=engine, family=family) as gateway, opened as sandbox:
        sampling = Sampling(max_new_tokens=max_new_tokens)
        session = gateway.open("s", sampling=sampling, limits=limits)
        await harness.install(sandbox)
        url = await sandbox.expose(session)
        done = await harness.run(sandbox, task, session.endpoint(url), 60.0)
        diff = await sandbox.run(["sh", "-c", "git add -A && git diff --cached"])
        return done, await session.close(), diff.stdout.decode()


@pytest.mark.agents
async def test_cli_makes_the_gold_edit_and_every_sampled_token_is_trained(
    harness: Codex, repository: Path
) -> None:
    task = _task(image=f"dir:{repository}")
    done, trajectory, diff = await _work(harness, task, limits=ROOMY)
    assert done.code == 0, done.log
    assert "+    return a + b\n" in diff
    assert "+y = '1'\n" in diff
    samples = to_samples(trajectory, episode="e", task=task.id)
    assert len(trajectory.turns) == 3, done.log
    assert len(samples) == 1
    assert samples[0].num_trained_tokens == trajectory.num_sampled_tokens > 0
    assert not trajectory.dropped


@pytest.mark.agents
async def test_gateways_turn_limit_ends_the_cli(harness: Codex, repository: Path) -> None:
    limits = SessionLimits(max_context_tokens=2**20, max_turns=1)
    done, trajectory, diff = await _work(harness, _task(image=f"dir:{repository}"), limits=limits)
    assert done.code != 0
    assert not done.timed_out
    assert len(trajectory.turns) == 1
    assert "+    return a + b\n" in diff


@pytest.mark.agents
async def test_full_context_ends_the_cli_at_once(harness: Codex, repository: Path) -> None:
    limits = SessionLimits(max_context_tokens=20)
    done, trajectory, _ = await _work(harness, _task(image=f"dir:{repository}"), limits=limits)
    assert not done.timed_out
    assert done.code != 0
    assert not trajectory.turns


@pytest.mark.agents
async def test_a_reply_cut_short_is_sampled_once_and_ends_the_cli(
    harness: Codex, repository: Path
) -> None:
    task = _task(image=f"dir:{repository}")
    done, trajectory, _ = await _work(harness, task, limits=ROOMY, max_new_tokens=5)
    assert not done.timed_out
    assert len(trajectory.turns) == 1, done.log
