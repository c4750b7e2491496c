"""What the tests of agents share: a task, a patch that solves it, and a whole run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from swerl.core import plugins
from swerl.core.changes import edits
from swerl.core.chat import Message, Role
from swerl.core.contracts import Endpoint, Engine, Exit, Harness, Sandbox
from swerl.core.errors import SwerlError
from swerl.core.sample import Sample, to_samples
from swerl.core.sandbox import Exec, Limits, Mount
from swerl.core.task import GradingSpec, Task
from swerl.core.turn import Sampling, Trajectory
from swerl.engines.families import tiny
from swerl.engines.scripted import ScriptedEngine
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.sandboxes import local

WORKDIR = "/repo"
ENDPOINT = Endpoint("http://127.0.0.1:8080", "key-1", "policy")
TASK = Task("t-1", "r", "host", WORKDIR, "Fix add.", GradingSpec("command", test_command="true"))
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
diff --git a/it's new.py b/it's new.py
--- /dev/null
+++ b/it's new.py
@@ -0,0 +1,1 @@
+y = '1'
"""
"""Two hunks in one file, and a new file whose name a shell would split."""
SOLVED = "def add(a, b):\n    return a + b\n\n\n\n\n\n\nx = 2\n"
REPOSITORY = """
printf 'def add(a, b):\\n    return a - b\\n\\n\\n\\n\\n\\n\\nx = 1\\n' >calc.py
git init -q . && git add . && git -c user.name=t -c user.email=t@localhost commit -qm base
"""
"""Shell script that makes the repository which PATCH changes, in the folder where it runs."""
_DIFF = "git add -A && git -c core.quotePath=false diff --cached"

ROOMY = SessionLimits(max_context_tokens=2**20)
LIMITS = Limits(memory_mib=2048, num_processes=256, disk_mib=2048)

Place = Callable[[Gateway, Sequence[Mount]], AbstractAsyncContextManager[Sandbox]]
"""Opens a sandbox from which that gateway is to be reached."""


def task(prompt: str) -> Task:
    """Return the task with another prompt."""
    return replace(TASK, prompt=prompt)


def built(name: str, **options: Any) -> Harness:
    """Return an agent; skips the test where its bundle cannot be had."""
    module = plugins.load("harnesses", name)
    try:
        harness: Harness = module.build(module.Options(**options))
    except SwerlError as error:
        pytest.skip(f"no bundle of {name}: {error}")
    return harness


def locally(_: Gateway, mounts: Sequence[Mount]) -> AbstractAsyncContextManager[Sandbox]:
    """Open a local sandbox of this machine's own files. A Place."""
    return local.build(local.Options()).open("host", LIMITS, workdir=WORKDIR, mounts=mounts)


class Recorder:
    """A sandbox that remembers what it was asked to run and answers with one prepared end."""

    id = "recorder"

    def __init__(self, stdout: bytes = b"", *, exit_code: int = 0, timed_out: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self._exec = Exec(exit_code, stdout, b"", timed_out)

    async def run(self, argv: list[str], **keywords: object) -> Exec:
        self.calls.append({"argv": argv, **keywords})
        return self._exec


async def started(harness: Harness, prompt: str = TASK.prompt) -> dict[str, Any]:
    """Return the call that starts an agent in its sandbox."""
    sandbox = Recorder()
    await harness.run(sandbox, task(prompt), ENDPOINT, 90.0)  # type: ignore[arg-type]
    return sandbox.calls[0]


async def ended(harness: Harness, *lines: Mapping[str, Any], exit_code: int = 0) -> Exit:
    """Return the end of an agent that prints these lines of JSON."""
    stdout = "".join(json.dumps(line) + "\n" for line in lines).encode()
    sandbox = Recorder(stdout, exit_code=exit_code)
    return await harness.run(sandbox, TASK, ENDPOINT, 9.0)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Worked:
    """What one run of an agent left."""

    exit: Exit
    calc: str
    """The file that PATCH changes."""
    diff: str
    """What git sees of the agent's work, new files included."""
    after: str
    """What the script `after` printed in the sandbox once the agent had ended."""
    trajectory: Trajectory
    told: tuple[TurnRecord, ...]
    """Every Turn with its words."""
    failure: Exception | None = None
    """What broke the engine's last call."""
    limit: str = ""
    """The session's limit that the agent ran into."""

    @property
    def samples(self) -> list[Sample]:
        """What the trainer would get."""
        return to_samples(self.trajectory, episode="e", task=TASK.id)

    @property
    def results(self) -> list[str]:
        """Every tool result that the model read, in order."""
        heard = (message for record in self.told for message in record.new_messages)
        return [message.text for message in heard if message.role is Role.TOOL]

    def assert_solved(self) -> None:
        """Check that the agent ended by itself and fixed the function."""
        assert self.exit.code == 0, self.exit.log[-2000:]
        assert not self.exit.limit
        assert not self.limit
        self.assert_fixed()

    def assert_fixed(self) -> None:
        assert self.calc.startswith("def add(a, b):\n    return a + b\n")

    def assert_trained_whole(self, *, num_samples: int = 1) -> None:
        """Check that every sampled token is trained, once, and nothing was dropped."""
        samples = self.samples
        assert len(samples) == num_samples, self.exit.log
        trained = sum(sample.num_trained_tokens for sample in samples)
        assert trained == self.trajectory.num_sampled_tokens > 0
        assert not self.trajectory.dropped


async def work(
    harness: Harness,
    *,
    task: Task = TASK,
    script: Sequence[Message] | None = None,
    model: Engine | None = None,
    place: Place = locally,
    limits: SessionLimits = ROOMY,
    max_new_tokens: int = 4096,
    budget_s: float = 120.0,
    engine: type[ScriptedEngine] = ScriptedEngine,
    before: str = "",
    after: str = "",
) -> Worked:
    """Let an agent work in a sandbox, its model following `script`, or making PATCH's edits.

    `before` and `after` are shell scripts. `model` answers in place of a script, in the tokens of
    the family `tiny`.
    """
    said = harness.script(edits(PATCH), task.workdir) if script is None else script
    family = tiny.build(None)
    model = model or engine(family, lambda _: said)
    told: list[TurnRecord] = []
    async with (
        Gateway(engine=model, family=family) as gateway,
        place(gateway, harness.mounts()) as sandbox,
    ):
        await shell(sandbox, REPOSITORY + before)
        session = gateway.open(
            "s",
            sampling=Sampling(max_new_tokens=max_new_tokens),
            limits=limits,
            on_turn=told.append,
        )
        await harness.install(sandbox)
        url = await sandbox.expose(session) if harness.inside else session.url
        done = await harness.run(sandbox, task, session.endpoint(url), budget_s)
        return Worked(
            exit=done,
            after=await shell(sandbox, after) if after else "",
            calc=(await sandbox.read(f"{task.workdir}/calc.py")).decode(),
            diff=await shell(sandbox, _DIFF),
            trajectory=await session.close(),
            told=tuple(told),
            failure=session.failure,
            limit=session.limit,
        )


async def shell(sandbox: Sandbox, script: str) -> str:
    """Run a shell script that must succeed in the workdir and return what it prints."""
    done = await sandbox.run(["sh", "-c", script], timeout_s=60)
    assert done.exit_code == 0, done
    return done.stdout.decode()
