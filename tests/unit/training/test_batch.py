"""The Batch on disk, and the one vote of every Episode, also in the gradient."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swerl.core import experts
from swerl.core.contracts import Algorithm
from swerl.core.episode import Episode, Group, Status
from swerl.core.errors import TrainerError
from swerl.core.grade import Verdict
from swerl.core.learning import Batch
from swerl.core.turn import RoutedExperts
from swerl.plan.parameters import RowCost
from swerl.runs import tables
from swerl.training import batch as batches
from swerl.training.batch import collect
from swerl.training.rank.microbatch import rank_micro_batches, to_tensors
from tests.unit import made
from tests.unit.training.algorithms.conftest import NAMES, make

MakeBatch = Callable[..., Batch]


def test_a_written_batch_reads_back_the_same(tmp_path: Path, random_batch: MakeBatch) -> None:
    batch = random_batch(3)
    batches.write(tmp_path / "new" / "3.parquet", batch)
    read = batches.read(tmp_path / "new" / "3.parquet")
    assert (read.step, read.num_episodes) == (3, 6)
    for before, after in zip(batch.samples, read.samples, strict=True):
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-6)
        assert replace(after, logprobs=before.logprobs) == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["3.parquet"]


def test_the_file_has_the_documented_columns(tmp_path: Path, random_batch: MakeBatch) -> None:
    import pyarrow.parquet as pq

    batches.write(tmp_path / "batch.parquet", random_batch(0))
    table = pq.read_table(tmp_path / "batch.parquet")
    page = (Path(__file__).parents[3] / "docs" / "reference" / "samples.md").read_text()
    for field in table.schema:
        assert f"| `{field.name}` |" in page
    assert sum(table.column("weight").to_pylist()) == pytest.approx(1.0)


def _experts(start: int, num_positions: int) -> RoutedExperts:
    return RoutedExperts(start, 3, 2, 2, bytes(range(12)) * num_positions)


def test_routed_experts_are_read_back_row_by_row(
    tmp_path: Path, random_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_GROUP_BYTES", 600)  # several row groups
    rows = list(random_batch(0).samples)
    rows[2] = replace(rows[2], routed=(_experts(0, 4), _experts(6, 9)))
    rows[5] = replace(rows[5], routed=(_experts(1, 3),))
    batches.write(tmp_path / "b.parquet", Batch(0, tuple(rows), 6))
    read = batches.read(tmp_path / "b.parquet").samples
    assert [_in_memory(row.routed) for row in read] == [tuple(row.routed) for row in rows]
    assert [row.num_routed for row in read] == [0, 0, 13, 0, 0, 3, 0]
    assert [row.ids for row in read] == [row.ids for row in rows]


def _in_memory(pieces: Sequence[RoutedExperts]) -> tuple[RoutedExperts, ...]:
    data = experts.read(pieces)
    return tuple(replace(piece, data=bytes(ids)) for piece, ids in zip(pieces, data, strict=True))


def test_a_batch_names_the_experts_of_its_episodes_wherever_the_run_goes(
    tmp_path: Path, random_batch: MakeBatch
) -> None:
    run = tmp_path / "run"
    (run / "episodes").mkdir(parents=True)
    pieces = (_experts(0, 4), _experts(6, 9))
    stored = experts.store(run / "episodes" / "experts.bin", pieces)
    rows = list(random_batch(0).samples)
    rows[2] = replace(rows[2], routed=tuple(stored))
    batches.write(run / "samples" / "b.parquet", Batch(0, tuple(rows), 6))
    assert [path.name for path in (run / "samples").iterdir()] == ["b.parquet"]
    run.rename(tmp_path / "moved")
    read = batches.read(tmp_path / "moved" / "samples" / "b.parquet").samples
    assert _in_memory(read[2].routed) == pieces
    unread = batches.read(tmp_path / "moved" / "samples" / "b.parquet", routed=False)
    assert not any(row.routed for row in unread.samples)


def test_a_batch_without_all_samples_of_an_episode_is_refused(random_batch: MakeBatch) -> None:
    batch = random_batch(0)
    with pytest.raises(TrainerError, match="not all of them"):
        batches.weights(replace(batch, samples=batch.samples[1:]))
    with pytest.raises(TrainerError, match="0 samples"):
        batches.weights(replace(batch, samples=()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed": (_experts(0, 1), _experts(0, 1))}, "two records of experts at 0"),
        ({"routed": (_experts(0, 1000),)}, "experts of 1000 positions"),
        ({"mask": (1, 1, 0)}, "trains its first token"),
        ({"ids": (7,), "mask": (0,), "logprobs": (0.0,)}, "trains its first token"),
        ({"mask": (0, 0, 0)}, "trains no token"),
        ({"logprobs": (0.0,)}, "different lengths"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused(
    tmp_path: Path, random_batch: MakeBatch, change: dict[str, object], message: str
) -> None:
    row = replace(
        random_batch(0).samples[2],
        share=1.0,
        **{"ids": (1, 2, 3), "mask": (0, 1, 0), "logprobs": (0.0, -1.0, 0.0), **change},
    )
    with pytest.raises(TrainerError, match=message):
        batches.write(tmp_path / "batch.parquet", Batch(0, (row,), 1))


def test_a_damaged_file_is_a_trainer_error(tmp_path: Path, random_batch: MakeBatch) -> None:
    path = tmp_path / "batch.parquet"
    with pytest.raises(TrainerError, match="cannot read the batch"):
        batches.read(path)
    batches.write(path, random_batch(0))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(TrainerError, match="cannot read the batch"):
        batches.read(path)


COST = RowCost(per_token=1000.0, per_token_pair=1.0)


def episode(name: str, verdict: Verdict, fan_out: int = 1) -> Episode:
    """Return an Episode of `fan_out` conversations of eight sampled tokens."""
    turns = (made.turn(index, None, (1, 2, 3), (5,) * 8) for index in range(fan_out))
    return made.episode(name, *turns, verdict=verdict)


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
def test_no_advantage_depends_on_the_groups_of_another_agent(name: str) -> None:
    """Two algorithms scale over the step: by agent, or a strong one would shrink the others."""

    def advantages(*others: str) -> dict[str, float]:
        verdicts = {"a": ("solved", "unsolved"), "b": ("solved", "solved", "unsolved")}
        groups = [
            Group(task, tuple(_by("weak", f"{task}.{k}", v) for k, v in enumerate(some)), "weak")
            for task, some in verdicts.items()
        ]
        more = tuple(_by("strong", f"c.{k}", verdict) for k, verdict in enumerate(others))
        groups.insert(1, Group("c", more, "strong"))
        samples = collect(0, groups, make(name)).batch.samples
        assert {(each.agent, each.task) for each in samples} >= {("weak", "a"), ("strong", "c")}
        return {each.episode: each.advantage for each in samples if each.agent == "weak"}

    found = advantages("solved", "unsolved")
    assert found == advantages("unsolved", "unsolved") == advantages("solved", *["unsolved"] * 7)
    assert found["a.0"] >= found["a.1"]


def _by(agent: str, name: str, verdict: str) -> Episode:
    return replace(episode(name, Verdict(verdict)), agent=agent)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_all_solved_and_one_all_failed_teach_nothing(name: str, tmp_path: Path) -> None:
    """One rollout of the solved prompt is two Samples; without one vote that would matter."""
    solved = Group("a", tuple(episode(f"a.{k}", Verdict.SOLVED, 1 + (k == 0)) for k in range(4)))
    failed = Group("b", tuple(episode(f"b.{k}", Verdict.UNSOLVED) for k in range(4)))
    found = gradients([solved, failed], make(name), tmp_path / "b.parquet")
    assert set(found.values()) == {0.0}


def test_a_reply_without_ids_costs_its_episode_and_no_other(tmp_path: Path) -> None:
    whole = [episode(f"a.{k}", Verdict.SOLVED if k == 0 else Verdict.UNSOLVED) for k in range(3)]
    broken = episode("a.3", Verdict.SOLVED, 2)
    turns = broken.trajectory.turns
    turns = (turns[0], replace(turns[1], output_ids=(), logprobs=(), num_reported=8))
    broken = replace(broken, trajectory=replace(broken.trajectory, turns=turns))
    collected = collect(0, [Group("a", (*whole, broken))], make("grpo"))
    assert collected == replace(collect(0, [Group("a", tuple(whole))], make("grpo")), lost=("a.3",))


@pytest.mark.parametrize("status", [Status.LIMIT, Status.TIMEOUT])
def test_a_truncated_episode_is_masked_but_stays_in_its_groups_mean(status: Status) -> None:
    episodes = [episode(f"a.{k}", Verdict.SOLVED if k else Verdict.UNSOLVED) for k in range(3)]
    episodes[1] = replace(episodes[1], status=status)
    groups = [Group("a", tuple(episodes))]
    trained, masked = (
        collect(0, groups, make("grpo"), mask_truncated=masks) for masks in (False, True)
    )
    assert (trained.num_masked, trained.batch.num_episodes) == (0, 3)
    assert (masked.num_masked, masked.batch.num_episodes) == (1, 2)
    assert masked.batch.samples == (trained.batch.samples[0], trained.batch.samples[2])
    assert sum(batches.weights(masked.batch)) == pytest.approx(1.0)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_fan_out_and_lost_episodes_change_no_other_gradient(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
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
