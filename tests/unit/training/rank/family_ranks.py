"""Ranks that train models as specs: `python -m …family_ranks JOBS`.

A job is one model under one layout. The file holds lists of jobs by number of ranks. One process
loads Megatron-Core and forks the ranks of each list, which run its jobs one after the other: a test
pays for one start. What a job finds goes to its `out`; rank 0 writes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swerl.core import plugins
from swerl.core.errors import NotFiniteError
from swerl.engines.families import tiny
from swerl.training import batch as batches
from swerl.training.options import TrainerOptions, WorkerSettings
from swerl.training.rank import megatron_cpu
from tests.unit.training.rank.sleep_rank import sleep_between_steps

ROOT = Path(__file__).parents[4]


def largest_gaps(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest differences of two jobs: log-probabilities absolute, figures relative."""
    gaps = dict.fromkeys(("loss", "grad_norm", "mismatch"), 0.0)
    for step, other in zip(found["stats"], wanted["stats"], strict=True):
        assert step["num_tokens"] == other["num_tokens"]
        for name in gaps:
            gaps[name] = max(gaps[name], abs(step[name] / other[name] - 1))
    rows = zip(found["logprobs"], wanted["logprobs"], strict=True)
    gaps["logprobs"] = max(
        float((torch.tensor(row) - torch.tensor(other)).abs().max()) for row, other in rows
    )
    return gaps


def job_of(
    model: Path, batch_files: Sequence[Path], out: Path, options: Mapping[str, Any], **fields: Any
) -> dict[str, Any]:
    """Return a job with the options that all jobs share, and its own."""
    shared = dict.fromkeys(("checkpoint_dir", "publish_dir", "log_dir"), str(out.parent))
    rates = {"lr": 1e-3, "warmup_steps": 2, "weight_decay": 0.1, "tokens_per_micro_batch": 100}
    return {
        "model": str(model),
        "batches": [str(file) for file in batch_files],
        "out": str(out),
        "options": {**shared, **rates, **options},
        **fields,
    }


def run_ranks(file: Path, specs: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    """Write the jobs to `file` and run them; fail with the ranks' output."""
    file.write_text(json.dumps(specs))
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, "-m", "tests.unit.training.rank.family_ranks", str(file)]
    limit_s = 600 + 60 * sum(map(len, specs.values()))
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr[-6000:]


def main() -> None:
    """Run all jobs; exit with 1 once a rank fails, and end the others."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    _die_with_parent()
    megatron_cpu.install()
    # Loaded here once, for all ranks.

    file = Path(sys.argv[1])
    for world, jobs in json.loads(file.read_text()).items():
        meeting = file.with_suffix(f".{world}.rendezvous")
        children = [_fork(meeting, jobs, rank, int(world)) for rank in range(int(world))]
        while children:
            child, status = os.wait()
            children.remove(child)
            if status:
                sys.exit(1)  # and the other ranks end with their parent


def _fork(meeting: Path, jobs: Sequence[dict[str, Any]], rank: int, world: int) -> int:
    child = os.fork()
    if child:
        return child
    _die_with_parent()
    try:
        address = f"file://{meeting}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        for job in jobs:
            found = _run(job, rank)
            if rank == 0:
                torch.save(found, job["out"])
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001  whatever it is, the parent hears of it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _run(job: dict[str, Any], rank: int) -> dict[str, Any]:
    from megatron.core import parallel_state

    from swerl.training.rank.learner import Learner
    from swerl.training.rank.worker import form_groups

    options = TrainerOptions.model_validate(job["options"])
    form_groups(options)
    settings = WorkerSettings.model_construct(
        model=Path(job["model"]), family="tiny", options=options, rank=rank
    )
    module = plugins.load("algorithms", job.get("algorithm", "sft"))
    given = job.get("algorithm_options", {} if "algorithm" in job else {"context_weight": 0.1})
    algorithm = module.build(module.Options.model_validate(given))

    def learner() -> Learner:
        return Learner(settings, tiny.build(settings.model), algorithm)

    if job.get("sleeps"):
        found = sleep_between_steps(learner, settings, job)
    elif "save" in job:
        found = _save(learner(), settings, job)
    else:
        found = _train(learner(), job)
    parallel_state.destroy_model_parallel()
    return found


def _train(learner: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Take a step a Batch; skip those that are not finite."""
    trained = [param for param in learner.model.parameters() if param.requires_grad]
    num_params = sum(each.numel() for each in trained)
    found: dict[str, Any] = {"stats": [], "num_skipped": 0, "num_params": num_params}
    found["loaded"] = digest(learner.whole_weights())
    found["first_adapters"] = _adapters(learner)
    batch_files = [Path(path) for path in job["batches"]]
    found["logprobs"] = [list(row) for row in learner.logprobs(batches.read(batch_files[0]))]
    unchanged = True
    bases = job.get("bases") or [()] * len(batch_files)
    for path, base in zip(batch_files, bases, strict=True):
        before = [param.detach().clone() for param in learner.model.parameters()]
        try:
            stats = learner.step(replace(batches.read(path), base=base))
            found["stats"].append(asdict(replace(stats, logprobs=())))
            found.setdefault("trained_logprobs", [list(row) for row in stats.logprobs])
            found.setdefault("gradients", [each.clone() for each in learner._gradient_buffers()])
        except NotFiniteError:
            found["num_skipped"] += 1
            unchanged &= all(map(torch.equal, before, learner.model.parameters()))
    found["weights"] = {name: tensor.clone() for name, tensor in learner.whole_weights()}
    found["adapters"] = _adapters(learner)
    found["gradient_bytes"] = sum(each.numel() * 4 for each in learner._gradient_buffers())
    ends: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        ends, (found["num_skipped"], unchanged, digest(found["weights"].items()))
    )
    found["unchanged"] = all(each[1] for each in ends)
    found["agree"] = len(set(ends)) == 1
    return found


def _save(learner: Any, settings: WorkerSettings, job: dict[str, Any]) -> dict[str, Any]:
    """Restore a step or take one, save, and take another one, whose figures are returned."""
    from swerl.training.checkpoint.store import Checkpoints

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
    return {"loss": stats.loss, "grad_norm": stats.grad_norm}


def _adapters(learner: Any) -> dict[str, torch.Tensor]:
    """Return the adapters by PEFT's names; none without LoRA."""
    if not learner.adapters:
        return {}
    from swerl.training.adapter_folder import in_pairs, to_peft
    from swerl.training.rank import weights

    factors = in_pairs(weights.tensors(learner.params(adapters=True), learner.memory.on_device))
    return {
        name: tensor.clone()
        for each in factors
        for name, tensor in to_peft(each, learner.mapping, learner.hf_config).items()
    }


def digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a checksum of weights by name, in any order; tied ones may come twice."""
    total = hashlib.sha256()
    for name, tensor in sorted(dict(weights).items()):
        total.update(name.encode() + tensor.detach().float().numpy().tobytes())
    return total.hexdigest()


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
