"""From graded Groups to the loss: an Episode is one vote however many Samples it became."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from swerl.core import plugins
from swerl.core.chat import Finish
from swerl.core.contracts import Algorithm
from swerl.core.episode import Episode, Group, Status
from swerl.core.grade import Grade, Verdict
from swerl.core.tree import Trajectory
from swerl.core.turn import Turn
from swerl.plan.parameters import RowCost
from swerl.training import batch as batches
from swerl.training.batch import collect
from swerl.training.rank.microbatch import rank_micro_batches, to_tensors

NAMES = ("gspo", "grpo", "dr-grpo", "dapo", "cispo", "reinforce-pp")
COST = RowCost(per_token=1000.0, per_token_pair=1.0)


def make(name: str) -> Algorithm:
    module = plugins.load("algorithms", name)
    algorithm: Algorithm = module.build(module.Options())
    return algorithm


def episode(name: str, verdict: Verdict, fan_out: int = 1) -> Episode:
    """Return an Episode of `fan_out` conversations of eight sampled tokens."""
    turns = tuple(
        Turn(index, None, (1, 2, 3), (5,) * 8, (-0.5,) * 8, Finish.STOP, "0")
        for index in range(fan_out)
    )
    reward = float(verdict is Verdict.SOLVED)
    task = name.partition(".")[0]
    grade = Grade(verdict, "")
    return Episode(name, task, Status.COMPLETED, grade, reward, Trajectory(name, turns))


def gradients(
    groups: list[Group], algorithm: Algorithm, path: Path, *, num_ranks: int = 1
) -> dict[str, float]:
    """Return the loss's gradient by Episode: collected, written, read, packed, and derived."""
    collected = collect(0, groups, algorithm)
    batches.write(path, collected.batch)
    batch = batches.read(path)
    found = {sample.episode: 0.0 for sample in batch.samples}
    rng = random.Random(0)
    for rank in range(num_ranks):
        for rows in rank_micro_batches(batch, rank=rank, num_ranks=num_ranks, budget=25, cost=COST):
            micro = to_tensors(rows, all_tokens=algorithm.needs_context, device=torch.device("cpu"))
            num_selected = len(micro.row_S)
            logp_S = torch.full((num_selected,), -0.5 + rng.uniform(0, 1e-5), requires_grad=True)
            ref_logp_S = logp_S.detach() if algorithm.needs_reference else None
            algorithm.loss(micro.loss_inputs(logp_S, ref_logp_S, batch.totals)).loss.backward()
            assert logp_S.grad is not None
            for place, row in enumerate(rows):
                found[row.sample.episode] += float(logp_S.grad[micro.row_S == place].sum())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_all_solved_and_one_all_failed_teach_nothing(name: str, tmp_path: Path) -> None:
    """One rollout of the solved prompt is two Samples; without one vote that would matter."""
    solved = Group("a", tuple(episode(f"a.{k}", Verdict.SOLVED, 1 + (k == 0)) for k in range(4)))
    failed = Group("b", tuple(episode(f"b.{k}", Verdict.UNSOLVED) for k in range(4)))
    found = gradients([solved, failed], make(name), tmp_path / "b.parquet")
    assert set(found.values()) == {0.0}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_fan_out_and_losses_change_nobodys_pull(name: str, num_ranks: int, tmp_path: Path) -> None:
    def pulls(fan_out: int, *more: Episode) -> dict[str, float]:
        first = episode("a.0", Verdict.SOLVED, fan_out)
        others = [episode(f"a.{k}", Verdict.UNSOLVED) for k in (1, 2)]
        groups = [Group("a", (first, *others, *more))]
        return gradients(groups, make(name), tmp_path / "b.parquet", num_ranks=num_ranks)

    plain = pulls(1)
    assert plain["a.0"] < 0 < plain["a.1"]
    assert plain["a.0"] == pytest.approx(-plain["a.1"] - plain["a.2"], rel=1e-3)
    assert pulls(3) == pytest.approx(plain, rel=1e-3)
    assert pulls(1, episode("a.3", Verdict.INFRA)) == pytest.approx(plain, rel=1e-3)
