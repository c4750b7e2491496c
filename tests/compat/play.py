"""Let an agent play a case in its own sandbox, and count the tokens that it leaves."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swerl.core.contracts import Exit, Family, Harness, SandboxBackend
from swerl.core.errors import GatewayError, Refusal
from swerl.core.sample import to_samples
from swerl.core.sandbox import Limits
from swerl.core.task import GradingSpec, Task
from swerl.core.turn import Sampling, Trajectory
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from tests.compat.cases import Case, End
from tests.compat.model import PROMPT, RecordingFamily, ScriptedModel

BUDGET_S = 180.0
"""Seconds for the agent: the slowest needs 25 for a script, more on a busy machine."""
_WORKDIR = "/repo"
_SAMPLING = Sampling(max_new_tokens=4096)
_LIMITS = Limits(memory_mib=4096, num_processes=512, num_cpus=2.0, lifetime_s=2 * BUDGET_S)


@dataclass(frozen=True, slots=True)
class Played:
    exit: Exit
    model: ScriptedModel
    is_limited: bool
    """True if the context limit refused a request or cut a reply."""
    trajectory: Trajectory

    @property
    def end(self) -> End:
        if self.model.finished and self.exit.code == 0:
            return End.DONE
        return End.LIMIT if self.is_limited else End.GAVE_UP

    @property
    def num_branches(self) -> int:
        return sum(1 for _ in self.trajectory.leaves())

    @property
    def trained_share(self) -> float:
        """Share of the sampled tokens that enter a Sample's loss, 0 to 1."""
        samples = to_samples(self.trajectory, episode="compat", task="compat")
        sampled = self.trajectory.num_sampled_tokens + sum(self.trajectory.dropped.values())
        return sum(sample.num_trained_tokens for sample in samples) / sampled if sampled else 1.0


async def play(harness: Harness, case: Case, family: Family, backend: SandboxBackend) -> Played:
    """Play a case. Raises SwerlError."""
    recording = RecordingFamily(family)
    *_, last = harness.script((), _WORKDIR)
    model = ScriptedModel(case, recording, closing=last.tool_calls)
    refused: list[Exception] = []
    with _repository() as folder:
        spec = GradingSpec("command", test_command="true")
        task = Task("compat", "compat", f"dir:{folder}", _WORKDIR, PROMPT, spec)
        async with (
            Gateway(
                engine=model,
                family=recording,
                on_refused=lambda _, error: refused.append(error),
            ) as gateway,
            backend.open(task.image, _LIMITS, workdir=_WORKDIR, mounts=harness.mounts()) as sandbox,
        ):
            session = gateway.open(
                "compat",
                sampling=_SAMPLING,
                limits=SessionLimits(max_context_tokens=case.max_context_tokens),
            )
            await harness.install(sandbox)
            url = await sandbox.expose(session) if harness.inside else session.url
            done = await harness.run(sandbox, task, session.endpoint(url), BUDGET_S)
            trajectory = await session.close()
    is_limited = done.limit or any(
        isinstance(error, GatewayError) and error.refusal is Refusal.CONTEXT for error in refused
    )
    return Played(done, model, is_limited, trajectory)


@contextmanager
def _repository() -> Iterator[Path]:
    """Make a small repository with one commit."""
    folder = Path(tempfile.mkdtemp(prefix="swerl-compat-"))
    try:
        folder.chmod(0o755)
        (folder / "README.md").write_text("# A repository to look around in\n")
        (folder / "notes.txt").write_text("one\ntwo\n")
        author = ("-c", "user.name=compat", "-c", "user.email=compat@localhost")
        for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "base")):
            subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
