"""Save and restore one rank's part of a checkpoint, while training continues.

`save` copies this rank's pieces to host memory and returns; a thread writes them. When every rank's
file is synced, the first rank writes the metadata and renames the folder: a checkpoint is whole or
it does not exist. The ranks' threads use a process group of their own, because the main threads
train meanwhile. A thread ends with its process, so a killed rank writes nothing more.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from swerl.core.errors import SwerlError, TrainerError, first_line
from swerl.training.checkpoint import files
from swerl.training.checkpoint import folder as folders
from swerl.training.checkpoint.files import Cut, Piece, pieces
from swerl.training.checkpoint.folder import (
    CheckpointMeta,
    SaveOutcome,
    check_files,
    mark,
    read_meta,
    write_meta,
)
from swerl.training.options import WorkerSettings
from swerl.training.rank.learner import Learner
from swerl.training.rank.optimizer import MOMENTS, adam_state
from swerl.training.rank.weights import belongs_to_experts, is_split, rank_cuts, tensor_group

_Result = TypeVar("_Result")

_WRITE_TIMEOUT = timedelta(days=1)
"""Time that a rank's thread waits for the others: the slowest disk must be fast enough."""
OPTIMIZER = "optimizer."
"""Prefix of the optimizer's tensors."""
_OUTPUT, _TIED = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(slots=True)
class _Save:
    step: int
    folder: Path
    kept: Collection[int]
    pieces: Sequence[Piece]
    common: dict[str, Any]
    random_state: dict[str, Any]
    dtypes: dict[str, str]
    meta: CheckpointMeta
    began: float = field(default_factory=time.monotonic)
    outcome: SaveOutcome | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    written: files.Written
    random_state: dict[str, Any]
    dtypes: dict[str, str]


class Checkpoints:
    """Save and restore one rank's part. Call every method on all ranks together."""

    def __init__(self, learner: Learner, settings: WorkerSettings) -> None:
        self._learner = learner
        self._settings = settings
        self._parent = settings.options.checkpoint_dir
        self._group = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)
        self._rank = dist.get_rank()
        self._base: int | None = None
        """Step of the last checkpoint that was restored or became whole."""
        self._save: _Save | None = None
        self._thread: threading.Thread | None = None

    def save(self, step: int, kept: Collection[int] = ()) -> None:
        """Begin a checkpoint once the one before it is whole.

        Without `trainer.async_save` it is whole at return. Its outcome is written beside it.
        Raises TrainerError if the disk is too full.
        """
        # At most one copy of the state is in host memory at a time.
        self.finish()
        folder = folders.folder_of(self._parent, step)
        owned = owned_pieces(self._learner)
        # The disk is checked before the expensive copy.
        self._prepare(folder, owned)
        self._save = _Save(
            step=step,
            folder=folder,
            kept=kept,
            # Nothing changes the tensors while a save is awaited, so it needs no copy.
            pieces=files.copy_to_host(owned) if self._settings.options.async_save else owned,
            common=common_state(self._learner),
            random_state=random_state(),
            dtypes=param_dtypes(self._learner),
            meta=self._meta(step),
        )
        # The save holds copies, so training may change the tensors from here on.
        self._thread = threading.Thread(target=self._write, args=(self._save,), daemon=True)
        self._thread.start()
        if not self._settings.options.async_save:
            self.finish()

    def finish(self) -> SaveOutcome | None:
        """Wait for the checkpoint that is being written; return its outcome."""
        if self._thread is None or self._save is None:
            return None
        self._thread.join()
        outcome, self._save, self._thread = self._save.outcome, None, None
        return outcome

    def restore(self, step: int) -> None:
        """Continue from a checkpoint of any layout.

        Raises TrainerError, with the weights unchanged, if the folder is missing, damaged, of
        another format or of another model. After an error while tensors are read, the trainer must
        be restarted.
        """
        self.finish()
        folder = folders.folder_of(self._parent, step)
        needed = needed_pieces(self._learner)
        # All ranks check everything before the first tensor is overwritten.
        source = self._agree(lambda: self._open(folder, needed))
        self._agree(lambda: source.read(needed))
        common = source.common()
        load_common_state(self._learner, common)
        load_random_state(common["random_states"], self._rank)
        self._base = step

    def _open(self, folder: Path, needed: Sequence[Piece]) -> files.CheckpointReader:
        meta = read_meta(folder)
        if meta.family != self._settings.family:
            message = f"the checkpoint {folder} is of family {meta.family!r}"
            hint = f"set model.family = {meta.family!r}, or restore a checkpoint of this model"
            raise TrainerError(message, hint=hint)
        check_files(folder, meta, part=self._rank, num_parts=dist.get_world_size())
        source = files.CheckpointReader(folder)
        source.check(needed)
        return source

    def _agree(self, do: Callable[[], _Result]) -> _Result:
        """Call `do` on every rank; if it fails on one, all raise that rank's error."""
        error = None
        try:
            result = do()
        except SwerlError as caught:
            error = (str(caught), caught.hint)
        errors: list[tuple[str, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error, group=self._group)
        for fault in errors:
            if fault is not None:
                raise TrainerError(fault[0], hint=fault[1])
        return result

    def _prepare(self, folder: Path, owned: Sequence[Piece]) -> None:
        """Create the folder to write in. Raises TrainerError if the disk is too full."""
        # At most 4 bytes each: masters and moments are fp32.
        num_bytes = torch.tensor(sum(piece.data.numel() * 4 for piece in owned))
        dist.all_reduce(num_bytes, group=self._group)
        if self._rank == 0:
            self._agree(lambda: folders.make_room(folder, int(num_bytes)))
        else:
            # The others call too, so that an error of the first rank raises on all of them.
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

    def _write(self, save: _Save) -> None:
        """Write this rank's file; the first rank then completes the checkpoint."""
        part: _Part | str
        try:
            written = files.write(save.pieces, folders.part_of(save.folder), self._rank)
            part = _Part(written, save.random_state, save.dtypes)
        except Exception as error:  # noqa: BLE001 - the other ranks' threads wait for an answer
            part = first_line(error)
        # Free the host copy before the wait for slower ranks.
        save.pieces = ()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part, group=self._group)
        outcome: list[Any] = [None if self._rank else self._finish(save, parts)]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        save.outcome = outcome[0]

    def _finish(self, save: _Save, parts: Sequence[Any]) -> SaveOutcome:
        try:
            meta = _make_whole(save, parts)
            # The last whole checkpoint stays until the controller has committed this step.
            spare = {*save.kept, *(() if self._base is None else (self._base,))}
            folders.prune(self._parent, save.step, spare=spare)
            self._base = save.step
            outcome = SaveOutcome(save.step, meta.num_bytes, time.monotonic() - save.began)
        except Exception as error:  # noqa: BLE001 - the other ranks' threads wait for an answer
            shutil.rmtree(folders.part_of(save.folder), ignore_errors=True)
            outcome = SaveOutcome(
                save.step,
                error=f"cannot write the checkpoint {save.folder}: {first_line(error)}",
                hint="the disk may be full; the weights and the checkpoint before it are safe",
            )
        with suppress(SwerlError):  # on a full disk this fails too; the next command reports it
            folders.put_outcome(self._parent, outcome)
        return outcome


def _make_whole(save: _Save, parts: Sequence[Any]) -> CheckpointMeta:
    for part in parts:
        if isinstance(part, str):
            raise TrainerError(part, hint="")
    folder = folders.part_of(save.folder)
    written = [part.written for part in parts]
    random_states = [part.random_state for part in parts]
    shapes = files.finish(written, {**save.common, "random_states": random_states}, folder)
    marks = {name: file_mark for part in written for name, file_mark in part.files.items()}
    marks |= {name: mark(folder / name) for name in files.DESCRIPTIONS}
    num_params = sum(prod(s) for key, s in shapes.items() if not key.startswith(OPTIMIZER))
    dtypes = {key: dtype for part in parts for key, dtype in part.dtypes.items()}
    others = {key: dtype for key, dtype in dtypes.items() if dtype != save.meta.dtype}
    meta = replace(save.meta, num_params=num_params, other_dtypes=others, files=marks)
    # meta.json comes after all other files, because it marks the folder as whole.
    write_meta(folder, meta)
    # Syncs before and after the rename: a power cut leaves a whole checkpoint or none.
    files.sync_folder(folder)
    folders.put_in_place(save.folder)
    files.sync_folder(save.folder.parent)
    return meta


def owned_pieces(learner: Learner) -> list[Piece]:
    """Return the pieces that this rank writes, awake or asleep; no element is written twice.

    They are each trained parameter's fp32 master and Adam's two moments, under the parameter's name
    in the whole model. The weights in training are the masters, rounded, so they are not written.
    """
    owned: list[Piece] = []
    names = _names(learner)
    trained = set()
    for optimizer in _optimizers(learner):
        for param, start, tensors in _shards(optimizer):
            trained.add(param)
            # Other tensor ranks and tied embeddings of the last stage are copies.
            if _is_first_copy(param) and not _is_tied_copy(learner, param):
                copies = {name: learner.memory.read(tensor) for name, tensor in tensors.items()}
                owned += _pieces(names, param, copies, start)
    for param, key in names.items():
        # A trained parameter without a range on this rank is written by another rank.
        is_frozen = param not in trained and not param.requires_grad
        if is_frozen and _is_first_replica(param):
            owned += pieces(key, learner.memory.read(param), param.shape, _cuts(param))
    return owned


def needed_pieces(learner: Learner) -> list[Piece]:
    """Return all pieces that this rank reads: its parameters, and its range of the moments."""
    needed: list[Piece] = []
    names = _names(learner)
    for param, key in names.items():
        needed += pieces(key, param, param.shape, _cuts(param))
    for optimizer in _optimizers(learner):
        for param, start, tensors in _shards(optimizer):
            needed += _pieces(names, param, tensors, start)
    return needed


def common_state(learner: Learner) -> dict[str, Any]:
    """Return the state that is no tensor piece and the same on all ranks."""
    adams = [optimizer.optimizer for optimizer in _optimizers(learner)]
    # Adam counts steps for its bias correction; the count is the same for all parameters.
    # torch's Adam counts for each parameter, fused ones for each parameter group.
    states = [state for adam in adams for state in adam.state.values()]
    counts = [learner.memory.read(state["step"]) for state in states if "step" in state]
    counts += [group["step"] for adam in adams for group in adam.param_groups if "step" in group]
    adam_steps = int(max(counts, default=0))
    return {"scheduler": dict(learner.scheduler.state_dict()), "adam_steps": adam_steps}


def load_common_state(learner: Learner, state: Mapping[str, Any]) -> None:
    # The recipe's rate and number of steps hold, which may have changed since.
    learner.scheduler.num_steps = 0
    learner.scheduler.step(int(state["scheduler"]["num_steps"]))
    steps = state["adam_steps"]
    for adam in (optimizer.optimizer for optimizer in _optimizers(learner)):
        for group in adam.param_groups:
            if "step" in group:  # fused Adams count here
                group["step"] = steps
        for moments in adam.state.values():
            if "step" in moments:
                # One tensor for each: torch's Adam counts in place.
                moments["step"] = torch.tensor(float(steps))


def param_dtypes(learner: Learner) -> dict[str, str]:
    """Return torch's name of the type that each parameter of this rank has in training."""
    names = _names(learner).items()
    return {key: str(param.dtype).removeprefix("torch.") for param, key in names}


def random_state() -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def load_random_state(states: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Restore a rank's random state; the first rank's if there were fewer ranks."""
    state = states[rank] if rank < len(states) else states[0]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["megatron"]))


def _names(learner: Learner) -> dict[torch.nn.Parameter, str]:
    """Return the name of each parameter in the whole model.

    The last pipeline stage has a copy of tied embeddings, which gets the name of the original. With
    adapters these are the checkpoint: the frozen weights are in the model's folder.
    """
    is_tied = learner.model.share_embeddings_and_output_weights
    params = learner.params(adapters=bool(learner.adapters))
    return {
        parameter: _TIED if is_tied and name == _OUTPUT else name
        for name, parameter in params.items()
    }


def _is_tied_copy(learner: Learner, param: torch.nn.Parameter) -> bool:
    model = learner.model
    return bool(
        model.share_embeddings_and_output_weights
        and not model.pre_process
        and param is model.shared_embedding_or_output_weight()
    )


def _optimizers(learner: Learner) -> list[Any]:
    """Return the distributed optimizers: one for dense parameters, one for experts."""
    chained: Any = learner.optimizer
    return list(getattr(chained, "chained_optimizers", [chained]))


def _shards(
    optimizer: Any,
) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
    """Yield each parameter with a range on this rank: its start, its master and moments."""
    masters = _masters(optimizer)
    for buffer in optimizer.gbuf_ranges:
        # Megatron's ranges: buffers, then pairs of types, then buckets, then parameters.
        for buckets in buffer.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    state = adam_state(optimizer.optimizer, masters[param])
                    yield param, ranges["param"].start, {"param": masters[param], **state}


def _masters(optimizer: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return the fp32 master of each parameter that has a range on this rank.

    Megatron-Core's own index of masters is wrong if a bf16 model has fp32 parameters.
    """
    groups = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    return {
        param: master
        for params, masters in groups
        for of_params, of_masters in zip(params, masters, strict=True)
        for param, master in zip(of_params, of_masters, strict=True)
    }


def _pieces(
    names: Mapping[torch.nn.Parameter, str],
    param: torch.nn.Parameter,
    tensors: Mapping[str, torch.Tensor],
    start: int,
) -> Iterator[Piece]:
    key = names[param]
    yield from pieces(key, tensors["param"], param.shape, _cuts(param), start=start)
    for moment in MOMENTS:
        name = f"{OPTIMIZER}{moment}.{key}"
        yield from pieces(name, tensors[moment], param.shape, _cuts(param), start=start)


def _cuts(param: torch.nn.Parameter) -> list[Cut]:
    cuts = rank_cuts(param)
    return [Cut(cut.dim, cut.group.rank(), cut.group.size(), cut.num_stacked) for cut in cuts]


def _is_first_copy(param: torch.nn.Parameter) -> bool:
    """Return whether this is the first tensor rank that holds these elements."""
    return is_split(param) or tensor_group(param).rank() == 0


def _is_first_replica(param: torch.nn.Parameter) -> bool:
    if not _is_first_copy(param):
        return False
    if belongs_to_experts(param):
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)
