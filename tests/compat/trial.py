"""Trials: an agent in its own sandbox plays a case with a family, and the result is counted."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from swerl.core import plugins
from swerl.core.chat import Json
from swerl.core.contracts import Exit, Family, Harness, SandboxBackend
from swerl.core.errors import (
    GatewayError,
    ImageError,
    InputError,
    Refusal,
    SandboxError,
    SwerlError,
)
from swerl.core.jobs import run_jobs
from swerl.core.sample import to_samples
from swerl.core.sandbox import Limits
from swerl.core.task import GradingSpec, Task
from swerl.core.turn import Sampling, Trajectory
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.replay import Replay, recorded_turns
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from tests.compat.cases import Agent, Case, End
from tests.compat.model import PROMPT, RecordingFamily, ScriptedModel
from tests.compat.watch import WatchedSandbox, proxy_to

NONE = "\u2013"
"""A dash: the text of empty cells in tables."""
WITHOUT_MODEL = "tiny"
"""The family that needs no model folder."""
BUDGET_S = 180.0
"""Seconds for the agent: the slowest needs 25 for a script, more on a busy machine."""
_WORKDIR = "/repo"
_MOST_REPLY_TOKENS = 4096
_LIMITS = Limits(memory_mib=4096, num_processes=512, num_cpus=2.0, lifetime_s=2 * BUDGET_S)
_LOG_CHARS = 2000
_ALL_TRAINED = 0.999
_REPOSITORY = {"README.md": "# A repository to look around in\n", "notes.txt": "one\ntwo\n"}


class TrialOutcome(StrEnum):
    DONE = "done"
    LIMIT = "limit"
    GAVE_UP = "gave up"
    FAILED = "failed"
    """The agent or swerl did not do what the case requires."""
    CANNOT = NONE
    """The agent lacks the ability, or this machine lacks a part."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The counts of one trial; docs/measurements/agent-compat.md defines each."""

    turns: int
    branches: int
    samples: int
    trained: float
    """Share of the sampled tokens that enter a Sample's loss, 0 to 1."""
    packed: float
    """Tokens of all Samples over the last Turn's whole context."""
    extra: int
    """Requests beyond those that the script requires."""
    outside: tuple[str, ...] | None
    """Names looked up and addresses dialled outside; None if the agent is not watched."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens that no Turn holds, by reason."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """HTTP requests by method and path."""


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """The counts of a trial that was played again from its record."""

    turns: int
    """Recorded Turns."""
    replayed: int
    """Turns whose request was the recorded one."""
    differences: Mapping[str, int]
    """Rule -> messages that differ as it allows."""
    problem: str
    """The first other difference; empty if there is none."""
    seconds: float
    seconds_before: float
    """Those of the first play."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    agent: str
    case: str
    family: str
    outcome: TrialOutcome
    reason: str = ""
    seconds: float = 0.0
    figures: Figures | None = None
    log: str = ""
    """The end of the agent's transcript, if it failed."""
    replay: ReplayFigures | None = None

    def to_json(self) -> dict[str, Json]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Trial:
    """One cell of the report's table."""

    agent: Agent
    case: Case
    family: str


@dataclass(frozen=True, slots=True)
class TrialResults:
    """All trials, in their order."""

    rows: tuple[TrialResult, ...]
    seconds: float

    @property
    def failed(self) -> list[TrialResult]:
        return [row for row in self.rows if row.outcome is TrialOutcome.FAILED]


def plan(
    agents: Sequence[Agent], cases: Sequence[Case], families: Sequence[str], *, full: bool = False
) -> tuple[Trial, ...]:
    """Pair every agent and case with the first family, and one agent with each further family.

    With `full`, every agent meets each further family, too. Raises InputError on an empty list.
    """
    if not agents or not cases or not families:
        raise InputError(
            "there is nothing to try", hint="name an agent, a case and a family at least"
        )
    first, *others = families
    pairs = [(agent, first) for agent in agents]
    pairs += [(agent, name) for name in others for agent in (agents if full else agents[:1])]
    return tuple(Trial(agent, case, name) for agent, name in pairs for case in cases)


async def run_all(
    trials: Sequence[Trial],
    backend: SandboxBackend,
    *,
    models: Path | None = None,
    jobs: int = 1,
    replay: bool = False,
    on_done: Callable[[TrialResult], None] = lambda _: None,
) -> TrialResults:
    """Run trials, `jobs` at once; results keep their order.

    `models` is a folder with a model folder (tokenizer and chat template) named for each family.
    With `replay` each trial is played again from its record.
    """
    started = time.monotonic()
    families: dict[str, Family] = {}

    async def run_one(trial: Trial) -> TrialResult:
        try:
            if trial.family not in families:  # loaded once: a tokenizer takes a second
                families[trial.family] = _load_family(trial.family, models)
        except SwerlError as error:
            reason = f"the family cannot be loaded: {error}"
            return _result(trial, TrialOutcome.CANNOT, reason)
        return await run(trial, families[trial.family], backend, replay=replay)

    rows = await run_jobs(trials, run_one, limit=jobs, on_done=on_done)
    return TrialResults(tuple(rows), time.monotonic() - started)


def _load_family(name: str, models: Path | None) -> Family:
    folder = None if name == WITHOUT_MODEL or models is None else models / name
    if name != WITHOUT_MODEL and (folder is None or not folder.is_dir()):
        raise InputError(
            f"no model folder for the family {name}", hint="give a folder of them with --models"
        )
    return plugins.family(name, folder)


def _result(trial: Trial, outcome: TrialOutcome, reason: str = "") -> TrialResult:
    return TrialResult(trial.agent.name, trial.case.name, trial.family, outcome, reason)


async def run(
    trial: Trial, family: Family, backend: SandboxBackend, *, replay: bool = False
) -> TrialResult:
    """Let the agent play the case. Every error becomes a result with its reason.

    With `replay` a second agent gets the replies of the first, in a sandbox of its own.
    """
    needs = trial.case.needs
    if not trial.agent.can(needs):
        return _result(trial, TrialOutcome.CANNOT, f"it has no {needs} that settings can cause")
    try:
        harness = await asyncio.to_thread(trial.agent.build, trial.case)
    except ImageError as error:
        return _result(trial, TrialOutcome.CANNOT, f"not fetched: {error}")
    except InputError as error:
        # a release that refuses the settings of an ability does not have it
        outcome = TrialOutcome.CANNOT if needs else TrialOutcome.FAILED
        return _result(trial, outcome, str(error))
    started = time.monotonic()
    recording = RecordingFamily(family)
    again = None
    try:
        with _repository() as folder:
            played = await _play(harness, trial.case, recording, backend, folder)
            seconds = time.monotonic() - started
            if replay:
                again = await _play_again(harness, trial.case, recording, backend, folder, played)
    except SwerlError as error:
        return _result(trial, TrialOutcome.FAILED, f"{type(error).__name__}: {error}")
    return replace(_judge(trial, played), seconds=seconds, replay=again)


@dataclass(frozen=True, slots=True)
class _Played:
    exit: Exit
    model: ScriptedModel
    limit: bool
    """True if the context limit refused a request or cut a reply."""
    figures: Figures
    turns: Sequence[TurnRecord]
    seconds: float


async def _play_again(
    harness: Harness,
    case: Case,
    recording: RecordingFamily,
    backend: SandboxBackend,
    folder: Path,
    first: _Played,
) -> ReplayFigures:
    """Play a case from the record of its first play, every Turn of it."""
    recorded = recorded_turns(first.turns)
    replay = Replay(recorded, num_turns=len(recorded))
    started = time.monotonic()
    await _play(harness, case, recording, backend, folder, replay)
    return ReplayFigures(
        turns=len(recorded),
        replayed=replay.num_played,
        differences=dict(replay.differences),
        problem=replay.problem,
        seconds=time.monotonic() - started,
        seconds_before=first.seconds,
    )


async def _play(
    harness: Harness,
    case: Case,
    recording: RecordingFamily,
    backend: SandboxBackend,
    folder: Path,
    replay: Replay | None = None,
) -> _Played:
    started = time.monotonic()
    turns: list[TurnRecord] = []
    refused: list[Exception] = []
    *_, last = harness.script((), _WORKDIR)
    model = ScriptedModel(case, recording, closing=last.tool_calls)
    spec = GradingSpec(grader="command", test_command="true")
    task = Task("compat", "compat", f"dir:{folder}", _WORKDIR, PROMPT, spec)
    opened = backend.open(task.image, _LIMITS, workdir=_WORKDIR, mounts=harness.mounts())
    async with (
        Gateway(
            engine=model, family=recording, on_refused=lambda _, error: refused.append(error)
        ) as gateway,
        _session(gateway, case, turns.append, replay) as session,
        proxy_to(session) as proxy,
        opened as sandbox,
    ):
        watched = WatchedSandbox(sandbox)
        await watched.prepare()
        await harness.install(watched)
        url = await watched.expose(proxy) if harness.inside else await proxy.listen()
        done = await harness.run(watched, task, session.endpoint(url), BUDGET_S)
        outside = await watched.attempts() if harness.inside else None
        trajectory = await session.close()
        figures = count(trajectory, proxy.requests, num_needed=model.num_needed, outside=outside)
        limit = done.limit or any(
            isinstance(error, GatewayError) and error.refusal is Refusal.CONTEXT
            for error in refused
        )
        return _Played(done, model, limit, figures, turns, time.monotonic() - started)


@asynccontextmanager
async def _session(
    gateway: Gateway, case: Case, on_turn: Callable[[TurnRecord], None], replay: Replay | None
) -> AsyncIterator[Session]:
    session = gateway.open(
        "compat",
        sampling=Sampling(max_new_tokens=_MOST_REPLY_TOKENS),
        limits=SessionLimits(max_context_tokens=case.max_context_tokens),
        on_turn=on_turn,
        replay=replay,
    )
    try:
        yield session
    finally:
        await session.close()


@contextmanager
def _repository() -> Iterator[Path]:
    """Make a small repository with one commit. Raises SandboxError if git is missing."""
    folder = Path(tempfile.mkdtemp(prefix="swerl-compat-"))
    try:
        folder.chmod(0o755)
        for name, text in _REPOSITORY.items():
            (folder / name).write_text(text)
        author = ("-c", "user.name=compat", "-c", "user.email=compat@localhost")
        for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "base")):
            subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)
        yield folder
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(
            f"cannot make a repository for a trial: {error}", hint="install git"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def count(
    trajectory: Trajectory,
    requests: Mapping[str, int],
    *,
    num_needed: int,
    outside: tuple[str, ...] | None,
) -> Figures:
    """Count the Turns, Samples, tokens and requests of a trial."""
    samples = to_samples(trajectory, episode="compat", task="compat")
    num_sampled = trajectory.num_sampled_tokens + sum(trajectory.dropped.values())
    packed = 1.0
    if trajectory.turns:
        path = trajectory.path(trajectory.turns[-1])
        context = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in path)
        packed = sum(len(sample.ids) for sample in samples) / context
    return Figures(
        turns=len(trajectory.turns),
        branches=sum(1 for _ in trajectory.leaves()),
        samples=len(samples),
        trained=sum(s.num_trained_tokens for s in samples) / num_sampled if num_sampled else 1.0,
        packed=packed,
        extra=sum(requests.values()) - num_needed,
        outside=outside,
        dropped=dict(trajectory.dropped),
        requests=dict(requests),
    )


def _judge(trial: Trial, played: _Played) -> TrialResult:
    """Return how the trial ended; FAILED if the case does not allow that end."""
    if played.model.lacks:
        found = _result(trial, TrialOutcome.CANNOT, played.model.lacks)
        return replace(found, figures=played.figures)
    if played.model.finished and played.exit.code == 0:
        outcome = TrialOutcome.DONE
    else:
        outcome = TrialOutcome.LIMIT if played.limit else TrialOutcome.GAVE_UP
    reason, log = _problem(trial.case, played), ""
    if not reason and outcome not in {TrialOutcome(end) for end in trial.case.ends}:
        reason = f"it ended as `{outcome}`, exit code {played.exit.code}"
    if reason:
        outcome, log = TrialOutcome.FAILED, played.exit.log[-_LOG_CHARS:]
    return replace(_result(trial, outcome, reason), figures=played.figures, log=log)


def _problem(case: Case, played: _Played) -> str:
    figures = played.figures
    if played.exit.timed_out:
        return f"it was not done within {BUDGET_S:g} s"
    if not figures.turns:
        return f"it received no reply, exit code {played.exit.code}"
    answered = {position.conversation for position in played.model.answered}
    if unused := sorted(case.moves.keys() - answered - {"main", "after"}):
        return f"these sub-agents made no request: {', '.join(unused)}"
    if End.LIMIT in case.ends and not played.limit:
        return "the context limit was never reached"
    if figures.trained < _ALL_TRAINED:
        return f"only {figures.trained:.1%} of the sampled tokens are trained"
    return ""
