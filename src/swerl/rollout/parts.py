"""The parts that all Episodes of a run share, among them the Provisioner of Sandboxes."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

from swerl.core.changes import Changes, FileMap
from swerl.core.contracts import (
    Harness,
    Reward,
    Sandbox,
    SandboxBackend,
    SnapshotBackend,
    SnapshotSandbox,
)
from swerl.core.errors import ImageError, SandboxError, SandboxFileError, SandboxLostError
from swerl.core.events import Emit, PhaseEnded, PhaseStarted
from swerl.core.experts import ExpertSpool
from swerl.core.sandbox import Limits, Mount
from swerl.core.task import Task
from swerl.core.turn import seed_of
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.server import Gateway
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.tasks.hide_future import SCRIPT, Stage, hide_future, to_remove
from swerl.tasks.set_up import set_up
from swerl.tasks.worktree import TreeListing, is_older, list_start, read_clean

_GIT_S = 60.0
_Kept: TypeAlias = tuple[SandboxBackend, str] | None
"""A snapshot: the backend that has it, one for each machine of a pool, and its name."""
_NUM_KEPT, _KEPT_BYTES = 1000, 64 * 2**10
"""Sets of clean files that are kept in memory, and the most bytes of one."""
_UNKEPT = r"""
find /tmp /dev/shm -name '.swerl-*' -prune -o ! -type d -printf '%p %s %T@\n'
num=0
for each in /proc/[0-9]*/status; do
  while read -r key state _; do
    if [ "$key" = State: ]; then
      [ "$state" = Z ] || num=$((num + 1))
      break
    fi
  done 2>/dev/null <"$each"
done
echo "$num processes"
"""
"""Print what no snapshot keeps: temporary files, and the number of processes that live."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that all Episodes of a run share."""

    gateway: Gateway
    provisioner: Provisioner
    harness: Harness
    reward: Reward
    rollout: RolloutSection
    budgets: BudgetsSection
    seed: int
    emit: Emit
    on_turn: Callable[[TurnRecord], None] | None = None
    """Called with the full text of every Turn, which events leave out; for transcripts."""
    spool: ExpertSpool | None = None
    """Storage for recorded experts until an Episode is written."""
    agent: str = ""
    """Name of the agent behind `harness`."""
    mix: tuple[MixedAgent, ...] = ()
    """All agents of a run with several; a Group has one of them."""

    def of(self, agent: MixedAgent) -> Parts:
        """Return the parts with this agent alone."""
        return replace(self, harness=agent.harness, agent=agent.name, mix=())

    def drawn(self, group: str) -> Parts:
        """Return the parts with the agent of a Group, drawn by share.

        The draw depends on the run's seed and the Group's name alone, so a resumed run repeats it.
        """
        if not self.mix:
            return self
        ends = list(accumulate(agent.share for agent in self.mix))
        point = seed_of(self.seed, f"agent/{group}") / 2**31 * ends[-1]
        return self.of(self.mix[bisect_right(ends, point)])


@dataclass(frozen=True, slots=True)
class MixedAgent:
    """One of several agents of a run."""

    name: str
    harness: Harness
    share: float
    """Its share of the training Groups; 0 if it is held out."""


class Provisioner:
    """Opens Sandboxes. An Episode holds one at a time, so `concurrency` slots bound them.

    The preparation of a sandbox depends on the image and the Task alone. So the first sandbox of a
    Task is kept as a snapshot after it, and later ones open the snapshot, if the backend can take
    snapshots and this one holds all that the preparation did.
    """

    def __init__(self, backend: SandboxBackend, limits: Limits, *, concurrency: int) -> None:
        self._backend = backend
        self._limits = limits
        self._builds: dict[_Kept, asyncio.Future[bool]] = {}
        """Snapshot -> whether it was kept, once the build has ended."""
        self._opened: dict[str, tuple[_Kept, float]] = {}
        """Id of an open sandbox -> its snapshot, and the Unix time before it was opened."""
        self._starts: dict[tuple[_Kept, frozenset[str]], TreeListing] = {}
        self._clean: dict[tuple[_Kept | str, ...], FileMap] = {}
        """(snapshot, *paths) -> those files in it, if they are small."""
        self._mounted: dict[Mount, str] = {}
        """Mount -> its fingerprint: a remote sandbox has a copy, which its snapshot holds, too."""
        self.slot = asyncio.Semaphore(concurrency)
        """An Episode holds a slot from start to end; waiting for it counts against no budget."""

    @asynccontextmanager
    async def for_agent(self, task: Task, harness: Harness, clock: Clock) -> AsyncIterator[Sandbox]:
        """Open a Sandbox without the repository's future commits, and install the harness.

        The clock records the phase `hide_future`. Raises BrokenImageError on a broken repository.
        """
        async with self._open(task, Stage.AGENT, harness.mounts(), clock) as sandbox:
            with _before_the_agent():
                await harness.install(sandbox)
            yield sandbox

    @asynccontextmanager
    async def for_grading(self, task: Task) -> AsyncIterator[Sandbox]:
        """Open a clean Sandbox of the Task's image that no agent has used.

        It reveals no more than an agent's, since the code under test may read all of it.
        """
        async with self._open(task, Stage.GRADING) as sandbox:
            yield sandbox

    async def list_start(
        self, sandbox: Sandbox, task: Task, *, kept: Collection[str]
    ) -> TreeListing:
        """List the work tree before an agent starts; all sandboxes of a snapshot have one list.

        If the harness has written into the work tree, each sandbox has its own.
        """
        snapshot, since_s = self._opened.get(sandbox.id, (None, 0.0))
        key = snapshot, frozenset(kept)
        if known := self._starts.get(key):
            return replace(known, since_s=int(time.time()))
        found = await list_start(sandbox, task.workdir, kept=kept)
        if snapshot and is_older(found, since_s):
            self._starts[key] = found
        return found

    async def compare(self, sandbox: Sandbox, task: Task, changes: Changes) -> Changes | None:
        """Compare Changes with a clean work tree; all sandboxes of a snapshot have the same files.

        Returns None if its files are too large to read.
        """
        snapshot, _ = self._opened.get(sandbox.id, (None, 0.0))
        key = snapshot, *changes.files
        if snapshot and key in self._clean:
            return changes.against(self._clean[key])
        before = await read_clean(sandbox, task.workdir, list(changes.files))
        if before is None:
            return None
        if sum(len(file.data) for file in before.values() if file) <= _KEPT_BYTES:
            if len(self._clean) >= _NUM_KEPT:
                self._clean.clear()
            self._clean[key] = before
        return changes.against(before)

    async def prepare(self, task: Task, harness: Harness) -> int:
        """Make the snapshots of a Task ahead; return how many of the two exist then."""
        found = []
        for stage, mounts in ((Stage.AGENT, harness.mounts()), (Stage.GRADING, ())):
            async with self._open(task, stage, mounts):
                name = await self._name(self._backend, task, stage, mounts)
            if name and isinstance(self._backend, SnapshotBackend):
                found.append(await self._backend.find_snapshot(name))
        return sum(map(bool, found))

    @asynccontextmanager
    async def _open(
        self, task: Task, stage: Stage, mounts: Sequence[Mount] = (), clock: Clock | None = None
    ) -> AsyncIterator[Sandbox]:
        async with AsyncExitStack() as stack:
            backend = self._backend
            name = await self._name(backend, task, stage, mounts)
            key = (backend, name) if name else None
            snapshot, building = await self._await_build(key)
            if building:
                stack.callback(self._end_build, key, building)

            async def opened(image: str) -> Sandbox:
                inside = backend.open(image, self._limits, workdir=task.workdir, mounts=mounts)
                return await stack.enter_async_context(inside)

            since_s = time.time()
            try:
                sandbox = await opened(snapshot or task.image)
            except ImageError:
                if not snapshot:
                    raise
                snapshot = ""  # it was collected just now
                sandbox = await opened(task.image)
            if snapshot:
                self._opened[sandbox.id] = key, since_s
                stack.callback(self._opened.pop, sandbox.id, None)
            with _before_the_agent(), clock.phase("hide_future") if clock else nullcontext():
                if snapshot:
                    await _refresh_index(sandbox, task)
                else:
                    kept = await self._prepare(sandbox, task, stage, name if building else "")
                    if building:
                        building.set_result(kept)
            yield sandbox

    def _end_build(self, key: _Kept, building: asyncio.Future[bool]) -> None:
        """Make others try again if a build was cancelled, or its sandbox failed."""
        if not building.done():
            del self._builds[key]
            building.set_result(False)

    async def _prepare(self, sandbox: Sandbox, task: Task, stage: Stage, name: str) -> bool:
        """Prepare a sandbox and keep it as snapshot `name`; return True if that holds all."""
        writes = bool(name and (task.setup or task.files))
        unkept = await _unkept(sandbox) if writes else b""
        await set_up(sandbox, task)
        hidden = await hide_future(sandbox, task, stage=stage)
        if not (name and isinstance(sandbox, SnapshotSandbox) and sandbox.snapshot_root):
            return False
        root = sandbox.snapshot_root.rstrip("/")
        paths = [*task.files, *(path.removeprefix("changes of ") for path in hidden.removed)]
        if root and (task.setup or not all(path.startswith(f"{root}/") for path in paths)):
            return False
        if writes and await _unkept(sandbox) != unkept:
            return False
        try:
            await sandbox.snapshot(name)
        except SandboxLostError:
            raise
        except SandboxError:
            return False  # each sandbox is then prepared by itself
        return True

    async def _name(
        self, backend: SandboxBackend, task: Task, stage: Stage, mounts: Sequence[Mount]
    ) -> str:
        """Return a digest of all that decides about a snapshot; empty if part is unknown."""
        if not isinstance(backend, SnapshotBackend):
            return ""
        if not (identity := await backend.identify(task.image)):
            return ""
        for mount in mounts:
            if mount not in self._mounted:
                self._mounted[mount] = await asyncio.to_thread(mount.fingerprint)
        spec = task.grading
        parts = [
            *(_code_version(), identity, stage),
            [(mount.target, self._mounted[mount]) for mount in mounts],
            *(task.workdir, task.base_commit, task.setup, dict(task.files), task.gold_patch),
            *(dict(spec.test_files), dict(spec.files), spec.test_patch, to_remove(task)),
            *(spec.test_setup, spec.test_command, spec.report_command, spec.report_path),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    async def _await_build(self, key: _Kept) -> tuple[str, asyncio.Future[bool] | None]:
        """Return the snapshot's reference if there is one, else the future of a build to make.

        Neither: there is none and there will be none. Callers during a build wait for its end.
        """
        if not key or not isinstance(key[0], SnapshotBackend):
            return "", None
        build = self._builds.get(key)
        if build and not await asyncio.shield(build):
            return "", None
        if found := await key[0].find_snapshot(key[1]):
            return found, None
        if self._builds.get(key) is not build:
            return "", None  # another caller has begun to build it again
        self._builds[key] = asyncio.get_running_loop().create_future()
        return "", self._builds[key]


async def _unkept(sandbox: Sandbox) -> bytes:
    """Return the state of a sandbox that no snapshot keeps."""
    argv = ["sh", "-c", _UNKEPT]
    return (await sandbox.run(argv, cwd="/", user="root", timeout_s=_GIT_S)).stdout


async def _refresh_index(sandbox: Sandbox, task: Task) -> None:
    """Make git's index match files that a setup wrote: a snapshot has their times of change new."""
    if task.setup:
        git = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false"]
        argv = [*git, "update-index", "-q", "--refresh"]
        await sandbox.run(argv, cwd=task.workdir, timeout_s=_GIT_S)


@functools.cache
def _code_version() -> str:
    """Return a digest of the code that prepares sandboxes."""
    # The modules' own files: an edit of either, or of a script beside them, is a new version.
    codes = [hide_future.__code__, set_up.__code__]
    files = [SCRIPT, *(Path(code.co_filename) for code in codes)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@contextmanager
def _before_the_agent() -> Iterator[None]:
    """Turn an error of a file into one of the Task: no agent has made the path what it is."""
    try:
        yield
    except SandboxFileError as error:
        raise SandboxError(str(error), hint=error.hint) from error


class Clock:
    """Measures the phases of one Episode and emits them; phases of one name add up."""

    def __init__(self, episode: str, emit: Emit) -> None:
        self._episode = episode
        self._emit = emit
        self._started = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a phase."""
        self._emit(PhaseStarted(self._episode, name))
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add a phase that was measured elsewhere and has just ended."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._emit(PhaseEnded(self._episode, name, seconds))

    @property
    def total(self) -> float:
        """Seconds since the Episode began."""
        return time.monotonic() - self._started
