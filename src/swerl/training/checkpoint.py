"""Checkpoints in Megatron-Core's distributed format: weights, optimizer, schedule, random state.

The format names every tensor by the whole model, so another number of ranks can load it.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import pickle
import queue
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import ChainedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from swerl.errors import TrainerError
from swerl.run.files import disk_errors
from swerl.training import weights
from swerl.training.learner import Learner

KEPT_CHECKPOINTS = 2
"""Checkpoints kept: the newest, and the one before it in case a run stops while committing."""

_WRITE_ERRORS = (CheckpointingException, CheckpointException, RuntimeError)
_READ_ERRORS = (*_WRITE_ERRORS, OSError, EOFError, pickle.UnpicklingError)
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(learner: Learner, folder: Path) -> None:
    """Write a checkpoint folder that appears at once. All ranks must call it together.

    Older checkpoints beside it are removed. Raises TrainerError or RunError on a full disk.
    """
    temporary = folder.with_name(f".{folder.name}.part")
    is_first = torch.distributed.get_rank() == 0
    with disk_errors(folder):
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        torch.distributed.barrier()
        try:
            dist_checkpointing.save(_state(learner, is_loading=False), str(temporary), _strategy())
        except _WRITE_ERRORS as error:
            message = f"cannot write the checkpoint {folder}: {_first_line(error)}"
            raise TrainerError(message, hint="is the disk full? the weights are safe") from error
        torch.distributed.barrier()
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            weights.keep_newest(folder.parent, KEPT_CHECKPOINTS)


def restore(learner: Learner, folder: Path) -> None:
    """Continue from a checkpoint. All ranks must call it together.

    Raises TrainerError where it is missing, damaged or of another model.
    """
    _make_adam_state(learner.optimizer)
    try:
        state = dist_checkpointing.load(_state(learner, is_loading=True), str(folder))
    except _READ_ERRORS as error:
        message = f"cannot restore the checkpoint {folder}: {_first_line(error)}"
        hint = "remove the folder to resume from an older checkpoint, or start the run anew"
        raise TrainerError(message, hint=hint) from error
    learner.model.load_state_dict(state["model"])
    _load_optimizer(learner.optimizer, state["optimizer"])
    learner.scheduler.num_steps = 0  # loading adds to it
    learner.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random_state"])


def _strategy() -> TorchDistSaveShardedStrategy:
    """Return a writer that works in this process alone.

    Megatron-Core's own starts a server for its results and forks a process per file. The server
    outlives a killed rank, and a forked process that dies leaves the save waiting for ever.
    """
    filesystem_async._results_queue = queue.Queue()
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_buckets)
    return TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)


def _write_buckets(
    transforms: list[Any],
    use_msc: bool,
    rank: int,
    buckets: list[Any],
    results: queue.Queue[Any],
) -> None:
    """Write files one after the other; put their results, or the first error, into the queue."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answers, counter = queue.Queue[Any](), queue.Queue[int]()
        counter.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, answers, counter, use_fsync=True, use_msc=use_msc
        )
        _, answer = answers.get_nowait()
        if isinstance(answer, Exception):
            results.put(answer)
            return
        written[number] = answer
    results.put(written)


def _state(learner: Learner, *, is_loading: bool) -> dict[str, Any]:
    model = learner.model.sharded_state_dict()
    return {
        "model": model,
        "optimizer": learner.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=_FORMAT
        ),
        "scheduler": learner.scheduler.state_dict(),
        "random_state": torch.get_rng_state(),
    }


def _make_adam_state(optimizer: ChainedOptimizer) -> None:
    """Give a fresh Adam the state that Megatron-Core expects before it loads into it."""
    (distributed,) = optimizer.chained_optimizers
    adam = distributed.optimizer
    for param in (param for group in adam.param_groups for param in group["params"]):
        if not adam.state[param]:
            adam.state[param] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }


def _load_optimizer(optimizer: ChainedOptimizer, state: dict[str, Any]) -> None:
    """Load a dense model's optimizer, whose base is torch's Adam.

    Megatron-Core 0.16.1 looks for torch Adam's `step` among the saved tensors, where it is not,
    and gives all parameters one shared step tensor, which torch then counts up once a parameter.
    So the steps are taken out while the tensors load, and put back one each.
    """
    (distributed,) = optimizer.chained_optimizers
    tensors = state.pop("param_state")
    distributed.load_state_dict(state)
    adam_state = distributed.optimizer.state
    steps = [(entry, entry.pop("step")) for entry in adam_state.values()]
    distributed.load_parameter_state_from_fully_reshardable(tensors)
    for entry, step in steps:
        entry["step"] = step.clone()


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]
