"""One rank that trains models as told: `python -m tests.training.family_ranks JOBS RANK WORLD`.

A job is one model under one layout. All jobs of a file run one after the other, so that a test pays
for one start of the ranks only. Results go to `<out>.pt` on rank 0.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swerl import plugins
from swerl.errors import NotFiniteError
from swerl.families import tiny
from swerl.training import batch as batches
from swerl.training import megatron_cpu
from swerl.training.options import TrainerOptions, WorkerSettings


def main() -> None:
    """Run all jobs."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    rank, world = int(sys.argv[2]), int(sys.argv[3])
    megatron_cpu.install()
    rendezvous = Path(sys.argv[1]).with_suffix(".rendezvous")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    for job in jobs:
        found = _run(job, rank)
        if rank == 0:
            torch.save(found, job["out"])
    dist.destroy_process_group()


def _run(job: dict[str, Any], rank: int) -> dict[str, Any]:
    from megatron.core import parallel_state

    from swerl.training.learner import Learner
    from swerl.training.parallel import form_groups

    options = TrainerOptions.model_validate(job["options"])
    form_groups(options)
    settings = WorkerSettings.model_construct(
        model=Path(job["model"]), family="tiny", options=options, rank=rank
    )
    algorithm = plugins.load("algorithms", job.get("algorithm", "sft"))
    family = tiny.build(Path(job["model"]))
    learner = Learner(settings, family, algorithm.build(algorithm.Options()))
    trained = [param for param in learner.model.parameters() if param.requires_grad]
    num_params = sum(each.numel() for each in trained)
    found: dict[str, Any] = {"stats": [], "num_skipped": 0, "num_params": num_params}
    batch_files = [Path(path) for path in job["batches"]]
    found["logprobs"] = learner.logprobs(batches.read(batch_files[0]))
    for path in batch_files[: job["steps"]]:
        try:
            found["stats"].append(asdict(learner.step(batches.read(path))))
        except NotFiniteError:
            found["num_skipped"] += 1
    found["weights"] = {name: tensor.clone() for name, tensor in learner.whole_weights()}
    parallel_state.destroy_model_parallel()
    return found


if __name__ == "__main__":
    main()
