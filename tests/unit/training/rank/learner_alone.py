"""One rank's learner, alone in its process: on a GPU if there is one, else on a CPU.

pytest tests/unit/training/rank/learner_alone.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swerl.core.learning import Batch

sys.path.insert(0, str(Path(__file__).parents[4] / "bench"))
import _gpu_model as models

ROUNDING = 2e-2
"""Of bf16, relative to a tensor's norm, a few times over."""


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def learner_of(folder: Path, **changes: Any) -> Any:
    """Return a rank of a hybrid model with experts; its process is the only rank."""
    config = models.SMALL_HYBRID | {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    }
    return models.random_learner(folder, config, positions=512, dtype="bf16", **changes)


def weights(learner: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().cpu().clone() for name, each in learner.whole_weights()}


def rows(*lengths: int) -> Batch:
    batch: Batch = models.random_batch(lengths, 512)
    return batch


def test_a_learner_s_weights_sleep_and_come_back(tmp_path: Path) -> None:
    learner = learner_of(tmp_path)
    learner.step(rows(90, 50))
    before = weights(learner)
    learner.sleep()
    asleep = weights(learner)
    learner.wake()
    after = weights(learner)
    for name, value in before.items():
        assert torch.equal(value, asleep[name]) and torch.equal(value, after[name]), name
    assert learner.step(rows(90, 50)).grad_norm > 0


def test_adam_on_the_host_takes_the_same_steps(tmp_path: Path) -> None:
    here, there = (learner_of(tmp_path, offload_optimizer=offload) for offload in (False, True))
    for learner in (here, there):
        for _ in range(2):
            learner.step(rows(90, 50))
    start = weights(learner_of(tmp_path))
    wanted = weights(there)
    for name, value in weights(here).items():
        moved = (wanted[name].float() - start[name].float()).norm()
        assert (value.float() - wanted[name].float()).norm() <= 0.02 * moved, name


def test_adapters_learn_and_the_base_stays(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, lora={"rank": 8, "alpha": 8.0})
    base = {name: each.cpu().clone() for name, each in learner.params(adapters=False).items()}
    first = {name: each.cpu().clone() for name, each in learner.params(adapters=True).items()}
    for _ in range(2):
        learner.step(rows(90, 50))
    assert all(
        torch.equal(each.cpu(), base[name]) for name, each in learner.params(adapters=False).items()
    )
    assert any(
        not torch.equal(each.cpu(), first[name])
        for name, each in learner.params(adapters=True).items()
    )


def test_rows_that_share_prefixes_have_the_log_probabilities_of_whole_rows(
    tmp_path: Path,
) -> None:
    batch = rows(200, 180)
    one, other = batch.samples
    # The second row repeats 100 tokens of the first.
    batch = replace(batch, samples=(one, replace(other, ids=one.ids[:100] + other.ids[100:])))
    apart, together = (
        learner_of(tmp_path, shared_prefixes=shared).logprobs(batch) for shared in (False, True)
    )
    for row, shared_row in zip(apart, together, strict=True):
        assert gap(torch.tensor(shared_row), torch.tensor(row)) <= ROUNDING


def test_a_checkpoint_holds_every_bit(tmp_path: Path) -> None:
    from swerl.training.checkpoint.store import Checkpoints

    learner, other = learner_of(tmp_path), learner_of(tmp_path)
    learner.step(rows(90, 50))
    settings = models.learner_settings(tmp_path, learner.options)
    store = Checkpoints(learner, settings)
    store.save(1)
    outcome = store.finish()
    assert outcome is not None and not outcome.error, outcome
    Checkpoints(other, settings).restore(1)
    restored = weights(other)
    assert all(torch.equal(value, restored[name]) for name, value in weights(learner).items())
    learner.step(rows(60, 40))
    other.step(rows(60, 40))
    after = weights(other)
    for name, value in weights(learner).items():
        assert gap(after[name], value) <= ROUNDING, name
