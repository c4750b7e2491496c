"""One rank that saves and restores as specs, started as `python -m ….checkpoint_ranks JOBS RANK`.

A job is one model under one layout of two ranks: restore a step or train one, save, train another.
All jobs run one after the other, so that a test pays for one start of the ranks. Rank 0 writes the
loss and gradient norm of each job's last step.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swerl.core import plugins
from swerl.engines.families import tiny
from swerl.training import batch as batches
from swerl.training.options import TrainerOptions, WorkerSettings
from swerl.training.rank import megatron_cpu


def main() -> None:
    """Run all jobs."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    specs = json.loads(path.read_text())
    megatron_cpu.install()
    meeting = f"file://{path.with_suffix('.rendezvous')}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    found = [_run(job, rank) for job in specs]
    if rank == 0:
        path.with_suffix(".found").write_text(json.dumps(found))
    dist.destroy_process_group()


def _run(job: dict[str, Any], rank: int) -> tuple[float, float]:
    from megatron.core import parallel_state

    from swerl.training.checkpoint.store import Checkpoints
    from swerl.training.rank.learner import Learner
    from swerl.training.rank.worker import form_groups

    options = TrainerOptions.model_validate(job["options"])
    form_groups(options)
    settings = WorkerSettings.model_construct(
        model=Path(job["model"]), family="tiny", options=options, rank=rank
    )
    sft = plugins.load("algorithms", "sft")
    learner = Learner(settings, tiny.build(settings.model), sft.build(sft.Options()))
    checkpoints = Checkpoints(learner, settings)
    first, second = (batches.read(Path(name)) for name in job["batches"])
    if job["restore"] is None:
        learner.step(first)
    else:
        checkpoints.restore(job["restore"])
    checkpoints.save(job["save"], range(9))
    stats = learner.step(second)
    outcome = checkpoints.finish()
    assert outcome is not None and not outcome.error, outcome
    parallel_state.destroy_model_parallel()
    return stats.loss, stats.grad_norm


if __name__ == "__main__":
    main()
