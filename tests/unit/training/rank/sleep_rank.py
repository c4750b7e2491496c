"""Ranks that sleep between steps, started as `python -m ….sleep_rank JOB RANK`.

Two learners of one model take the same two steps; one sleeps after each. Rank 0 writes what it saw.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from swerl.core import plugins
from swerl.engines.families import tiny
from swerl.training import batch as batches
from swerl.training.options import TrainerOptions, WorkerSettings
from swerl.training.rank import megatron_cpu

_COUNTS = 5


def live_bytes(*, without: int = 0) -> int:
    """Count the bytes of all live tensors' storages, each once, but for the host's block.

    The least of some counts: gloo's threads let go of the last gathered weights a little later.
    """
    return min(_count() for _ in range(_COUNTS)) - without


def _count() -> int:
    time.sleep(0.05)
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    options = TrainerOptions.model_validate(job["options"])
    megatron_cpu.install()
    meeting = f"file://{path.with_suffix('.rendezvous')}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=options.ranks)

    from swerl.training.checkpoint import files
    from swerl.training.checkpoint.files import copy_to_host
    from swerl.training.checkpoint.store import Checkpoints, owned_pieces
    from swerl.training.rank.learner import Learner
    from swerl.training.rank.worker import form_groups

    form_groups(options)
    settings = WorkerSettings.model_construct(
        model=Path(job["model"]), family="tiny", options=options, rank=rank
    )
    gspo = plugins.load("algorithms", "gspo")

    def learner() -> Learner:
        return Learner(settings, tiny.build(settings.model), gspo.build(gspo.Options()))

    def state(of: Learner) -> dict[str, torch.Tensor]:
        pieces = copy_to_host(owned_pieces(of))
        return {f"{each.key} {each.offsets}": each.data for each in pieces}

    def weights(of: Learner) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in of.whole_weights()}

    def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return one.keys() == other.keys() and all(
            torch.equal(each.view(torch.uint8), other[name].view(torch.uint8))
            for name, each in one.items()
        )

    def saved_and_restored(of: Learner) -> dict[str, torch.Tensor]:
        """Save from where the state lies, without a copy of it, into another learner."""
        with mock.patch.object(files, "copy_to_host", side_effect=AssertionError):
            Checkpoints(of, settings).save(1)
        other = learner()
        Checkpoints(other, settings).restore(1)
        return state(other)

    found: dict[str, object] = {}
    rows = [batches.read(Path(name)) for name in job["batches"]]
    base = live_bytes()
    sleeper = learner()
    sleeper.sleep()  # before the first step, while the engine starts
    found["host_at_start"] = sleeper.memory._host.numel()
    sleeper.wake()
    sleeper.step(rows[0])
    found["awake"] = live_bytes() - base
    before = (state(sleeper), weights(sleeper))
    sleeper.sleep()
    found["asleep_state_is_equal"] = same(state(sleeper), before[0])
    found["asleep_weights_are_equal"] = same(weights(sleeper), before[1])
    del before
    host = sleeper.memory._host.numel()
    found["host"] = host
    found["asleep"] = live_bytes(without=host) - base
    sleeper.sleep()  # a second sleep does nothing
    sleeper.wake()
    found["gradients_are_zero"] = not any(bool(each.any()) for each in sleeper._gradient_buffers())
    found["awake_again"] = live_bytes(without=host) - base
    sleeper.step(rows[1])
    awake = learner()
    for each in rows:
        awake.step(each)
    found["state_is_equal"] = same(state(sleeper), state(awake))
    found["weights_are_equal"] = same(weights(sleeper), weights(awake))
    sleeper.sleep()
    found["awaited_save_is_equal"] = same(saved_and_restored(sleeper), state(awake))
    if rank == 0:
        path.with_suffix(".found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
