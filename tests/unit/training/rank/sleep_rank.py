"""A rank that sleeps between steps, beside one that does not."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from swerl.training import batch as batches
from swerl.training.options import WorkerSettings

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


def sleep_between_steps(
    learner: Callable[[], Any], settings: WorkerSettings, job: Mapping[str, Any]
) -> dict[str, Any]:
    """Let two learners of one model take the same two steps; one sleeps after each."""
    from swerl.training.checkpoint import files
    from swerl.training.checkpoint.files import copy_to_host
    from swerl.training.checkpoint.store import Checkpoints, owned_pieces

    def state(of: Any) -> dict[str, torch.Tensor]:
        pieces = copy_to_host(owned_pieces(of))
        return {f"{each.key} {each.offsets}": each.data for each in pieces}

    def weights(of: Any) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in of.whole_weights()}

    def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return one.keys() == other.keys() and all(
            torch.equal(each.view(torch.uint8), other[name].view(torch.uint8))
            for name, each in one.items()
        )

    def saved_and_restored(of: Any) -> dict[str, torch.Tensor]:
        """Save from where the state lies, without a copy of it, into another learner."""
        with mock.patch.object(files, "copy_to_host", side_effect=AssertionError):
            Checkpoints(of, settings).save(1)
        other = learner()
        Checkpoints(other, settings).restore(1)
        return state(other)

    found: dict[str, Any] = {}
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
    return found
