"""Checkpoints that are written while training goes on.

`save` copies this rank's pieces to host memory and returns; a thread writes them. When every
rank's file is there and synced, the first rank adds what describes them, and renames the folder:
a checkpoint is whole or it does not exist. The ranks' threads meet over a process group of their
own, as the main threads train meanwhile. A thread ends with its process, so that nothing of a
killed rank goes on writing.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from swerl.core.errors import SwerlError, TrainerError
from swerl.training.checkpoint import files, state
from swerl.training.checkpoint import folder as folders
from swerl.training.checkpoint.folder import Outcome
from swerl.training.checkpoint.meta import CheckpointMeta, check_files, mark, read_meta, write_meta
from swerl.training.checkpoint.pieces import Piece
from swerl.training.options import WorkerSettings
from swerl.training.rank.learner import Learner

_Result = TypeVar("_Result")

_PATIENCE = timedelta(days=1)
"""How long a rank's thread waits for the others': as long as the slowest disk takes."""


@dataclass(slots=True)
class _Job:
    """One checkpoint on its way to disk."""

    step: int
    folder: Path
    kept: Collection[int]
    pieces: Sequence[Piece]
    common: dict[str, Any]
    random_state: dict[str, Any]
    dtypes: dict[str, str]
    meta: CheckpointMeta
    began: float = field(default_factory=time.monotonic)
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank tells the first one."""

    written: files.Written
    random_state: dict[str, Any]
    dtypes: dict[str, str]


class Checkpoints:
    """Saves and restores one rank's part. Every method must be called on all ranks together."""

    def __init__(self, learner: Learner, settings: WorkerSettings) -> None:
        self._learner = learner
        self._settings = settings
        self._parent = settings.options.checkpoint_dir
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._rank = dist.get_rank()
        self._base: int | None = None
        """The step that the run stands on: restored, or whole since."""
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None

    def save(self, step: int, kept: Collection[int] = ()) -> None:
        """Begin a checkpoint, after the one before it is whole.

        Without `trainer.async_save` it is whole at return. A note beside it says how it went.
        Raises TrainerError where the disk has no room for it.
        """
        self.finish()
        folder = folders.folder_of(self._parent, step)
        owned = state.owned(self._learner)
        self._prepare(folder, owned)
        self._job = _Job(
            step=step,
            folder=folder,
            kept=kept,
            pieces=files.copy_to_host(owned),
            common=state.common(self._learner),
            random_state=state.random_state(),
            dtypes=state.dtypes(self._learner),
            meta=self._meta(step),
        )
        self._thread = threading.Thread(target=self._write, args=(self._job,), daemon=True)
        self._thread.start()
        if not self._settings.options.async_save:
            self.finish()

    def finish(self) -> Outcome | None:
        """Wait for the checkpoint that is being written; return how it went."""
        if self._thread is None or self._job is None:
            return None
        self._thread.join()
        outcome, self._job, self._thread = self._job.outcome, None, None
        return outcome

    def restore(self, step: int) -> None:
        """Continue from a checkpoint of any layout.

        Raises TrainerError, and leaves the weights as they were, where the folder is missing,
        damaged, of another format or of another model. After an error in the middle of reading,
        the trainer must be started anew.
        """
        self.finish()
        folder = folders.folder_of(self._parent, step)
        needed = state.load_pieces(self._learner)
        source = self._agree(lambda: self._open(folder, needed))
        self._agree(lambda: source.read(needed))
        common = source.common()
        state.load_common(self._learner, common)
        state.load_random_state(common["random_states"], self._rank)
        self._base = step

    def _open(self, folder: Path, needed: Sequence[Piece]) -> files.Source:
        meta = read_meta(folder)
        if meta.family != self._settings.family:
            message = f"the checkpoint {folder} is of family {meta.family!r}"
            hint = f"set model.family = {meta.family!r}, or restore a checkpoint of this model"
            raise TrainerError(message, hint=hint)
        check_files(folder, meta, part=self._rank, num_parts=dist.get_world_size())
        source = files.Source(folder)
        source.check(needed)
        return source

    def _agree(self, do: Callable[[], _Result]) -> _Result:
        """Do something on every rank; where it fails on one, all raise that rank's error."""
        error = None
        try:
            result = do()
        except SwerlError as caught:
            error = (str(caught), caught.hint)
        errors: list[tuple[str, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error, group=self._group)
        for found in errors:
            if found is not None:
                raise TrainerError(found[0], hint=found[1])
        return result

    def _prepare(self, folder: Path, owned: Sequence[Piece]) -> None:
        """Make the folder to write in. Raises TrainerError where the disk has too little room."""
        num_bytes = torch.tensor(sum(piece.data.numel() * 4 for piece in owned))
        dist.all_reduce(num_bytes, group=self._group)
        if self._rank == 0:
            self._agree(lambda: folders.make_room(folder, int(num_bytes)))
        else:
            self._agree(lambda: None)

    def _meta(self, step: int) -> CheckpointMeta:
        options, model = self._settings.options, self._learner.model
        return CheckpointMeta(
            step=step,
            family=self._settings.family,
            model_type=str(self._learner.hf_config.get("model_type")),
            num_params=0,
            layout={
                "ranks": options.ranks,
                "tensor": options.tensor_parallel,
                "pipeline": options.pipeline_parallel,
                "context": options.context_parallel,
                "expert": options.expert_parallel,
                "expert_tensor": options.expert_tensor_parallel,
            },
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            other_dtypes={},
            files={},
        )

    def _write(self, job: _Job) -> None:
        """Write this rank's file, and on the first rank what makes the checkpoint whole."""
        part: _Part | str
        try:
            written = files.write(job.pieces, folders.part_of(job.folder), self._rank)
            part = _Part(written, job.random_state, job.dtypes)
        except Exception as error:  # noqa: BLE001 - the other ranks' threads wait for an answer
            part = _first_line(error)
        job.pieces = ()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part, group=self._group)
        verdict: list[Any] = [None if self._rank else self._finish(job, parts)]
        dist.broadcast_object_list(verdict, src=0, group=self._group)
        job.outcome = verdict[0]

    def _finish(self, job: _Job, parts: Sequence[Any]) -> Outcome:
        try:
            meta = _make_whole(job, parts)
            spare = {*job.kept, *(() if self._base is None else (self._base,))}
            folders.prune(
                self._parent, job.step, spare=spare, every=self._settings.options.keep_every
            )
            self._base = job.step
            outcome = Outcome(
                job.step,
                meta.num_bytes,
                time.monotonic() - job.began,
                folders.space_warning(self._parent, meta.num_bytes),
            )
        except Exception as error:  # noqa: BLE001 - the other ranks' threads wait for an answer
            shutil.rmtree(folders.part_of(job.folder), ignore_errors=True)
            outcome = Outcome(
                job.step,
                error=f"cannot write the checkpoint {job.folder}: {_first_line(error)}",
                hint="is the disk full? the weights and the checkpoint before it are safe",
            )
        with suppress(SwerlError):  # a full disk takes no note: the next command says it
            folders.put_outcome(self._parent, outcome)
        return outcome


def _make_whole(job: _Job, parts: Sequence[Any]) -> CheckpointMeta:
    """Describe what the ranks wrote, and rename the folder."""
    for part in parts:
        if isinstance(part, str):
            raise TrainerError(part, hint="")
    folder = folders.part_of(job.folder)
    written = [part.written for part in parts]
    random_states = [part.random_state for part in parts]
    shapes = files.finish(written, {**job.common, "random_states": random_states}, folder)
    marks = {name: found for part in written for name, found in part.files.items()}
    marks |= {name: mark(folder / name) for name in files.DESCRIPTIONS}
    num_params = sum(prod(s) for key, s in shapes.items() if not key.startswith(state.OPTIMIZER))
    dtypes = {key: dtype for part in parts for key, dtype in part.dtypes.items()}
    others = {key: dtype for key, dtype in dtypes.items() if dtype != job.meta.dtype}
    meta = replace(job.meta, num_params=num_params, other_dtypes=others, files=marks)
    write_meta(folder, meta)
    files.sync_folder(folder)
    folders.put_in_place(job.folder)
    files.sync_folder(job.folder.parent)
    return meta


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]
