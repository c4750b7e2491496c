"""The pool of Sandboxes: open one for an agent or for grading, prepared and without the future.

The preparation of a sandbox depends on the image and the Task alone. So the first sandbox of a Task
is kept as a snapshot after it, and later ones open the snapshot, if the backend takes snapshots and
this one holds everything that the preparation did.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field, replace
from pathlib import Path

from swerl.core.changes import Changes, FileMap
from swerl.core.contracts import (
    Harness,
    Sandbox,
    SandboxBackend,
    SnapshotBackend,
    SnapshotSandbox,
)
from swerl.core.errors import ImageError, SandboxError, SandboxFileError, SandboxLostError
from swerl.core.sandbox import Limits, Mount
from swerl.core.task import Task
from swerl.tasks.hide_future import SCRIPT, Stage, hide_future, to_remove
from swerl.tasks.set_up import set_up
from swerl.tasks.worktree import TreeListing, is_older, list_start, read_clean

_GIT_S = 60.0
_MAX_FILE_SETS, _MAX_FILE_BYTES = 1000, 64 * 2**10
"""Sets of clean files in memory, and the most bytes of one."""
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


class SandboxPool:
    """Opens Sandboxes. An Episode uses one at a time, so `concurrency` slots bound them."""

    def __init__(self, backend: SandboxBackend, limits: Limits, *, concurrency: int) -> None:
        self._backend = backend
        self._limits = limits
        self._snapshots = Snapshots()
        self._trees = CleanTrees()
        self.slot = asyncio.Semaphore(concurrency)
        """An Episode holds a slot from start to end; waiting for it counts against no budget."""

    @asynccontextmanager
    async def for_agent(
        self,
        task: Task,
        harness: Harness,
        phase: AbstractContextManager[None] | None = None,
    ) -> AsyncIterator[PreparedSandbox]:
        """Open a Sandbox without the repository's future commits, and install the harness.

        `phase` measures the preparation. Raises BrokenImageError on a broken repository.
        """
        async with self._open(task, Stage.AGENT, harness.mounts(), phase) as prepared:
            with _before_the_agent():
                await harness.install(prepared.sandbox)
            yield prepared

    @asynccontextmanager
    async def for_grading(self, task: Task) -> AsyncIterator[PreparedSandbox]:
        """Open a clean Sandbox of the Task's image that no agent has used.

        It reveals no more than an agent's, since the code under test may read all of it.
        """
        async with self._open(task, Stage.GRADING) as prepared:
            yield prepared

    async def prepare(self, task: Task, harness: Harness) -> int:
        """Make the snapshots of a Task ahead; return how many of the two exist then."""
        num_snapshots = 0
        for stage, mounts in ((Stage.AGENT, harness.mounts()), (Stage.GRADING, ())):
            async with self._open(task, stage, mounts):
                key = await self._snapshots.key(self._backend, task, stage, mounts)
            num_snapshots += bool(key and await key.backend.find_snapshot(key.name))
        return num_snapshots

    @asynccontextmanager
    async def _open(
        self,
        task: Task,
        stage: Stage,
        mounts: Sequence[Mount] = (),
        phase: AbstractContextManager[None] | None = None,
    ) -> AsyncIterator[PreparedSandbox]:
        async with AsyncExitStack() as stack:
            backend = self._backend
            key = await self._snapshots.key(backend, task, stage, mounts)
            image, build = await self._snapshots.find(key)
            if build:
                stack.callback(self._snapshots.abandon, build)

            async def opened(image: str) -> Sandbox:
                inside = backend.open(image, self._limits, workdir=task.workdir, mounts=mounts)
                return await stack.enter_async_context(inside)

            since_s = time.time()
            try:
                sandbox = await opened(image or task.image)
            except ImageError:
                if not image:
                    raise
                image = ""  # it was collected just now
                sandbox = await opened(task.image)
            with _before_the_agent(), phase or nullcontext():
                if image:
                    await _refresh_index(sandbox, task)
                else:
                    is_complete = await self._prepare(sandbox, task, stage, mounts, build)
                    if build:
                        build.is_kept.set_result(is_complete)
            yield PreparedSandbox(sandbox, task, key if image else None, since_s, self._trees)

    async def _prepare(
        self,
        sandbox: Sandbox,
        task: Task,
        stage: Stage,
        mounts: Sequence[Mount],
        build: SnapshotBuild | None,
    ) -> bool:
        """Prepare a sandbox and keep it as a snapshot; return True if that is complete."""
        writes = bool(build and (task.setup or task.files))
        unkept = await _unkept(sandbox) if writes else b""
        await set_up(sandbox, task)
        hidden = await hide_future(sandbox, task, stage=stage)
        if not (build and isinstance(sandbox, SnapshotSandbox) and sandbox.snapshot_root):
            return False
        root = sandbox.snapshot_root.rstrip("/")
        paths = [*task.files, *(path.removeprefix("changes of ") for path in hidden.removed)]
        if root and (task.setup or not all(path.startswith(f"{root}/") for path in paths)):
            return False
        if writes and await _unkept(sandbox) != unkept:
            return False
        keys: list[SnapshotKey | None] = [build.key]
        if stage is Stage.AGENT and not (mounts or hidden.removed or task.grading.test_setup):
            # Grading would leave some of the files that were looked for here, and there are none.
            keys.append(await self._snapshots.key(self._backend, task, Stage.GRADING, ()))
        try:
            for key in filter(None, keys):
                await sandbox.snapshot(key.name)
        except SandboxLostError:
            raise
        except SandboxError:
            return False  # each sandbox is then prepared by itself
        return True


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    """A snapshot: the backend that has it, one for each machine of a pool, and its name."""

    backend: SnapshotBackend
    name: str


@dataclass(frozen=True, slots=True)
class SnapshotBuild:
    """A snapshot under construction in an open sandbox."""

    key: SnapshotKey
    is_kept: asyncio.Future[bool]
    """Whether the snapshot was kept, once the build has ended."""


class Snapshots:
    """Names the snapshots of prepared sandboxes, and lets each be built once at a time."""

    def __init__(self) -> None:
        self._builds: dict[SnapshotKey, SnapshotBuild] = {}
        self._fingerprints: dict[Mount, str] = {}
        """A remote sandbox has a copy of each mount, which its snapshot holds, too."""

    async def key(
        self, backend: SandboxBackend, task: Task, stage: Stage, mounts: Sequence[Mount]
    ) -> SnapshotKey | None:
        """Return the key of everything that decides about a snapshot; None if part is unknown."""
        if not isinstance(backend, SnapshotBackend):
            return None
        if not (identity := await backend.identify(task.image)):
            return None
        for mount in mounts:
            if mount not in self._fingerprints:
                self._fingerprints[mount] = await asyncio.to_thread(mount.fingerprint)
        spec = task.grading
        parts = [
            *(_code_version(), identity, stage),
            [(mount.target, self._fingerprints[mount]) for mount in mounts],
            *(task.workdir, task.base_commit, task.setup, dict(task.files), task.gold_patch),
            *(dict(spec.test_files), dict(spec.files), spec.test_patch, to_remove(task)),
            *(spec.test_setup, spec.test_command, spec.report_command, spec.report_path),
        ]
        return SnapshotKey(backend, hashlib.sha256(json.dumps(parts).encode()).hexdigest())

    async def find(self, key: SnapshotKey | None) -> tuple[str, SnapshotBuild | None]:
        """Return the snapshot's reference if there is one, else the build to make.

        Neither: there is none and there will be none. Callers during a build wait for its end.
        """
        if key is None:
            return "", None
        build = self._builds.get(key)
        if build and not await asyncio.shield(build.is_kept):
            return "", None
        if reference := await key.backend.find_snapshot(key.name):
            return reference, None
        if self._builds.get(key) is not build:
            return "", None  # another caller has begun to build it again
        new = SnapshotBuild(key, asyncio.get_running_loop().create_future())
        self._builds[key] = new
        return "", new

    def abandon(self, build: SnapshotBuild) -> None:
        """Make others try again if the build was cancelled, or its sandbox failed."""
        if not build.is_kept.done():
            del self._builds[build.key]
            build.is_kept.set_result(False)


@dataclass(slots=True)
class CleanTrees:
    """Facts about clean work trees, equal in all sandboxes of a snapshot."""

    listings: dict[tuple[SnapshotKey, frozenset[str]], TreeListing] = field(default_factory=dict)
    files: dict[tuple[SnapshotKey, tuple[str, ...]], FileMap] = field(default_factory=dict)
    """(snapshot, paths) -> those files in it, if they are small."""

    def add_files(self, key: tuple[SnapshotKey, tuple[str, ...]], files: FileMap) -> None:
        if sum(len(file.data) for file in files.values() if file) <= _MAX_FILE_BYTES:
            if len(self.files) >= _MAX_FILE_SETS:
                self.files.clear()
            self.files[key] = files


@dataclass(frozen=True, slots=True)
class PreparedSandbox:
    """An open Sandbox of the pool, and its clean work tree."""

    sandbox: Sandbox
    task: Task
    snapshot: SnapshotKey | None
    """The snapshot that it was opened from; None if it was prepared by itself."""
    since_s: float
    """Unix time before it was opened."""
    trees: CleanTrees

    async def list_start(self, *, kept: Collection[str]) -> TreeListing:
        """List the work tree before an agent starts; all sandboxes of a snapshot have one list.

        If the harness has written into the work tree, each sandbox has its own.
        """
        if self.snapshot is None:
            return await list_start(self.sandbox, self.task.workdir, kept=kept)
        key = self.snapshot, frozenset(kept)
        if listing := self.trees.listings.get(key):
            return replace(listing, since_s=int(time.time()))
        listing = await list_start(self.sandbox, self.task.workdir, kept=kept)
        if is_older(listing, self.since_s):
            self.trees.listings[key] = listing
        return listing

    async def compare(self, changes: Changes) -> Changes | None:
        """Compare Changes with a clean work tree; all sandboxes of a snapshot have the same files.

        Returns None if its files are too large to read.
        """
        key = (self.snapshot, tuple(changes.files)) if self.snapshot else None
        if key and key in self.trees.files:
            return changes.against(self.trees.files[key])
        before = await read_clean(self.sandbox, self.task.workdir, list(changes.files))
        if before is None:
            return None
        if key:
            self.trees.add_files(key, before)
        return changes.against(before)


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
