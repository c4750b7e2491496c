"""Checkpoints that are written while training goes on.

`save` copies this rank's pieces to host memory and returns; a thread writes them. When every
rank's file is there and synced, the first rank adds what describes them, and renames the folder:
a checkpoint is whole or it does not exist. The ranks' threads meet over a process group of their
own, as the main threads train meanwhile. A thread ends with its process, so that nothing of a
killed rank goes on writing.
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

from swerl.core.errors import SwerlError, TrainerError
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
from swerl.training.rank.weights import belongs_to_experts, global_name, rank_cuts, tensor_group

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
    outcome: SaveOutcome | None = None


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
        owned = owned_pieces(self._learner)
        self._prepare(folder, owned)
        self._job = _Job(
            step=step,
            folder=folder,
            kept=kept,
            pieces=files.copy_to_host(owned),
            common=common_state(self._learner),
            random_state=random_state(),
            dtypes=param_dtypes(self._learner),
            meta=self._meta(step),
        )
        self._thread = threading.Thread(target=self._write, args=(self._job,), daemon=True)
        self._thread.start()
        if not self._settings.options.async_save:
            self.finish()

    def finish(self) -> SaveOutcome | None:
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
        needed = needed_pieces(self._learner)
        source = self._agree(lambda: self._open(folder, needed))
        self._agree(lambda: source.read(needed))
        common = source.common()
        load_common_state(self._learner, common)
        load_random_state(common["random_states"], self._rank)
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

    def _finish(self, job: _Job, parts: Sequence[Any]) -> SaveOutcome:
        try:
            meta = _make_whole(job, parts)
            spare = {*job.kept, *(() if self._base is None else (self._base,))}
            folders.prune(
                self._parent, job.step, spare=spare, every=self._settings.options.keep_every
            )
            self._base = job.step
            outcome = SaveOutcome(
                job.step,
                meta.num_bytes,
                time.monotonic() - job.began,
                folders.space_warning(self._parent, meta.num_bytes),
            )
        except Exception as error:  # noqa: BLE001 - the other ranks' threads wait for an answer
            shutil.rmtree(folders.part_of(job.folder), ignore_errors=True)
            outcome = SaveOutcome(
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
    num_params = sum(prod(s) for key, s in shapes.items() if not key.startswith(OPTIMIZER))
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


# heavy imports: this file only runs in the trainer's own processes


OPTIMIZER = "optimizer."
"""What names of the optimizer's tensors begin with."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running means of the gradient and of its square."""
_OUTPUT, _TIED = "output_layer.weight", "embedding.word_embeddings.weight"


def owned_pieces(learner: Learner) -> list[Piece]:
    """Return the pieces that this rank writes: together the ranks hold each element once."""
    found: list[Piece] = []
    names = _names(learner)
    trained = set()
    for optimizer in _optimizers(learner):
        for param, start, tensors in _shards(optimizer):
            trained.add(param)
            if _is_first_copy(param) and not _is_tied_copy(learner, param):
                found += _pieces(names, param, tensors, start)
    for param, key in names.items():
        if param not in trained and not _is_trained(param) and _is_first_replica(param):
            found += pieces(key, param, param.shape, _cuts(param))
    return found


def needed_pieces(learner: Learner) -> list[Piece]:
    """Return all pieces that this rank needs: its parameters, and its range of the moments."""
    found: list[Piece] = []
    names = _names(learner)
    for param, key in names.items():
        found += pieces(key, param, param.shape, _cuts(param))
    for optimizer in _optimizers(learner):
        for param, start, tensors in _shards(optimizer):
            found += _pieces(names, param, tensors, start)
    return found


def common_state(learner: Learner) -> dict[str, Any]:
    """Return what is not a piece of a tensor and the same on all ranks."""
    return {"scheduler": dict(learner.scheduler.state_dict()), "adam_steps": _adam_steps(learner)}


def load_common_state(learner: Learner, state: Mapping[str, Any]) -> None:
    """Take back what `common` returned."""
    learner.scheduler.num_steps = 0  # loading adds to it
    learner.scheduler.load_state_dict(dict(state["scheduler"]))
    for optimizer in _optimizers(learner):
        _set_steps(optimizer.optimizer, state["adam_steps"])


def param_dtypes(learner: Learner) -> dict[str, str]:
    """Return the type that each parameter of this rank has in training, by torch's name."""
    names = _names(learner).items()
    return {key: str(param.dtype).removeprefix("torch.") for param, key in names}


def random_state() -> dict[str, Any]:
    """Return this rank's random state."""
    on_gpu = torch.cuda.is_available()
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def load_random_state(states: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Continue from a rank's random state; from the first one's where there were fewer ranks."""
    state = states[rank] if rank < len(states) else states[0]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["megatron"]))


def _names(learner: Learner) -> dict[torch.nn.Parameter, str]:
    """Return the name of each parameter in the whole model.

    A last pipeline stage has a copy of tied embeddings, which goes by the name of the original.
    """
    model = learner.model
    is_tied = model.share_embeddings_and_output_weights
    names = {param: global_name(model, name) for name, param in model.named_parameters()}
    return {param: _TIED if is_tied and name == _OUTPUT else name for param, name in names.items()}


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
    """Yield each parameter that this rank's optimizer has a range of: its start, its state."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    master = _master(optimizer, param)
                    state = optimizer.optimizer.state[master]
                    if not state:
                        state.update(_fresh_adam_state(master))
                    yield param, ranges["param"].start, {"param": master, **state}


def _master(optimizer: Any, param: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's range of a parameter in the form that Adam updates."""
    group, order = optimizer.model_param_group_index_map[param]
    main: torch.Tensor = optimizer.optimizer.param_groups[group]["params"][order]
    return main


def _fresh_adam_state(param: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
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


def _adam_steps(learner: Learner) -> int:
    """Return the steps that Adam counts for its bias correction, the same for all parameters."""
    adams = [optimizer.optimizer for optimizer in _optimizers(learner)]
    counts = [state["step"] for adam in adams for state in adam.state.values() if "step" in state]
    counts += [group["step"] for adam in adams for group in adam.param_groups if "step" in group]
    return int(max(counts, default=0))


def _set_steps(adam: Any, steps: int) -> None:
    for group in adam.param_groups:
        if "step" in group:  # where fused Adams count
            group["step"] = steps
    for state in adam.state.values():
        if "step" in state:
            # One tensor each: torch's Adam counts in place.
            state["step"] = torch.tensor(float(steps))


def _is_trained(param: torch.nn.Parameter) -> bool:
    """Return whether some rank's optimizer has the parameter; this one may have no range of it."""
    return param.requires_grad


def _is_first_replica(param: torch.nn.Parameter) -> bool:
    if not _is_first_copy(param):
        return False
    if belongs_to_experts(param):
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def _cuts(param: torch.nn.Parameter) -> list[Cut]:
    """Return how the ranks share a parameter."""
    shares = rank_cuts(param)
    return [
        Cut(each.dim, each.group.rank(), each.group.size(), each.num_stacked) for each in shares
    ]


def _is_first_copy(param: torch.nn.Parameter) -> bool:
    """Return whether this rank is the first of the tensor ranks that hold the same elements."""
    return getattr(param, "tensor_model_parallel", False) or tensor_group(param).rank() == 0
