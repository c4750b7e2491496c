"""Every model line in Megatron-Core against transformers and AdamW, on one rank and on several."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.plan.layout import Layout
from swerl.plan.parameters import rank_params
from swerl.plan.shape import shape_from_config
from swerl.recipe.schema import LoraSection
from swerl.training import batch as batches
from tests.unit.engines.families.lines import (
    LINES,
    build,
    config_of,
    per_expert,
    weights_of,
    write_model,
)
from tests.unit.training.rank.family_ranks import job_of, run_ranks
from tests.unit.training.rank.references import (
    adamw,
    logp,
    record_experts,
    sft_loss,
    take_step,
)

pytestmark = pytest.mark.integration

STEPS = 3
ONE_KEY_HEAD = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}


@dataclass(frozen=True)
class Job:
    """One line under one layout."""

    line: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the line's config."""
    replay: bool = False
    """Whether an engine's noisy choices of experts are recorded and replayed."""

    @property
    def name(self) -> str:
        layout = "-".join(f"{key.removesuffix('_parallel')}{n}" for key, n in self.layout.items())
        return f"{self.line}-{layout}" + "-changed" * bool(self.changes) + "-replay" * self.replay


ONE_RANK = [
    *(Job(line) for line in LINES),
    Job("qwen3_5_moe", {"recompute": True}, replay=True),
    Job("glm4_moe", replay=True),
]
BF16 = [Job("qwen3_5_moe", {"dtype": "bf16"}), Job("glm4_moe", {"dtype": "bf16"})]
TWO_RANKS = [
    Job("qwen3_5_moe"),
    Job("qwen3_moe", {"expert_parallel": 2}),
    Job("qwen3_5_moe", {"tensor_parallel": 2, "expert_parallel": 2}),
    Job("qwen3_5_moe", {"context_parallel": 2, "recompute": True}, replay=True),
    Job("qwen3_5", {"context_parallel": 2}, ONE_KEY_HEAD),
    Job("glm4_moe", {"tensor_parallel": 2}, replay=True),
    Job("glm4_air", {"pipeline_parallel": 2}),
    Job("qwen2", {"tensor_parallel": 2}),
    Job("llama", {"context_parallel": 2}),
    Job("smollm2", {"pipeline_parallel": 2}),
]


FOUR_RANKS = [
    Job("qwen3_5_moe", {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 4}),
    Job("qwen3_5", {"context_parallel": 4}),
    Job("glm4_air", {"pipeline_parallel": 2, "expert_parallel": 2}),
    Job("qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": True}),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Mapping[str, Any]]:
    """What each job found, by its number of ranks and its name."""
    work = tmp_path_factory.mktemp("families")
    jobs = {1: [*ONE_RANK, *BF16], 2: TWO_RANKS, 4: FOUR_RANKS}
    specs = {count: [_spec(work, job, count) for job in each] for count, each in jobs.items()}
    run_ranks(work / "jobs.json", specs)
    return {
        count: {
            job.name: torch.load(one["out"], weights_only=False)
            for job, one in zip(jobs[count], specs[count], strict=True)
        }
        for count in jobs
    }


@pytest.fixture(scope="module")
def one_rank(ranks: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any]:
    return ranks[1]


@pytest.mark.parametrize("job", ONE_RANK, ids=lambda job: job.name)
def test_a_line_trains_as_in_transformers(job: Job, one_rank: Mapping[str, Any]) -> None:
    _compare(job, one_rank[job.name])


@pytest.mark.parametrize(
    ("count", "job"),
    [*((2, job) for job in TWO_RANKS), *((4, job) for job in FOUR_RANKS)],
    ids=lambda part: getattr(part, "name", part),
)
def test_several_ranks_train_as_transformers_does(
    count: int, job: Job, ranks: Mapping[int, Mapping[str, Any]]
) -> None:
    _compare(job, ranks[count][job.name], num_ranks=count)


@pytest.mark.parametrize("job", BF16, ids=lambda job: job.name)
def test_in_bf16_routers_and_decays_are_still_fp32(job: Job, one_rank: Mapping[str, Any]) -> None:
    found, model = one_rank[job.name], _build(job)
    optimizer = adamw(model)
    for number, (batch, stats) in enumerate(zip(_batches(job), found["stats"], strict=True)):
        loss, norm = take_step(optimizer, sft_loss(model, batch), number)
        assert stats["loss"] == pytest.approx(loss, rel=2e-3)
        assert stats["grad_norm"] == pytest.approx(norm, rel=1e-2)
    wide = {name for name, value in found["weights"].items() if value.dtype is torch.float32}
    kept = ("A_log", "e_score_correction_bias")
    assert wide == {name for name in found["weights"] if name.endswith(kept)}


def test_replay_closes_the_gap_to_an_engine_that_routes_otherwise(
    one_rank: Mapping[str, Any],
) -> None:
    """The engine's noise changes some choices; without its record the trainer is far away."""
    engine = _build(Job("qwen3_5_moe"))
    batch = _batches(Job("qwen3_5_moe", replay=True))[0]
    with torch.no_grad():
        sampled = [logp(engine, row)[torch.tensor(row.mask[1:]) > 0] for row in batch.samples]

    without, replayed = (
        _mean_gap(one_rank[name]["logprobs"], sampled)
        for name in ("qwen3_5_moe-", "qwen3_5_moe-recomputeTrue-replay")
    )
    print(f"mean gap to the engine: {without:.1e}, replayed {replayed:.1e}")  # noqa: T201
    assert without >= 1e-3
    assert replayed <= 1e-6


def test_replaying_ones_own_choices_changes_nothing() -> None:
    job = Job("glm4_moe")
    model = _build(job)
    row = _rows(0)[0]
    with torch.no_grad():
        recorded = replace(row, routed=(record_experts(model, row, noise=0.0),))
        assert torch.equal(logp(model, row), logp(model, recorded))


def _compare(job: Job, found: Mapping[str, Any], num_ranks: int = 2) -> None:
    """Hold a job's log-probabilities, three steps and weights against transformers'."""
    model, steps = _build(job), _batches(job)
    with torch.no_grad():
        expected = [logp(model, row) for row in steps[0].samples]
    worst = max(
        float((torch.tensor(values) - whole[torch.tensor(row.mask[1:]) > 0]).abs().max())
        for values, whole, row in zip(found["logprobs"], expected, steps[0].samples, strict=True)
    )
    assert worst <= 2e-6
    optimizer = adamw(model)
    for number, (batch, stats) in enumerate(zip(steps, found["stats"], strict=True)):
        loss, norm = take_step(optimizer, sft_loss(model, batch), number)
        assert stats["loss"] == pytest.approx(loss, rel=1e-5)
        assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
    _count(job, found["num_params"], num_ranks=num_ranks)
    weights = weights_of(model)
    published = weights if job.line == "qwen3_5_moe" else per_expert(weights)
    assert found["weights"].keys() == published.keys()
    sure = _sure(job, model, optimizer)
    gaps = {
        name: float(((found["weights"][name] - value).abs() * sure[name]).max())
        for name, value in published.items()
    }
    name, gap = max(gaps.items(), key=lambda pair: pair[1])
    assert gap <= (3e-5 if any("experts" in name for name in published) else 1e-5), name
    print(f"{job.name}: logp {worst:.1e}, weights {gap:.1e}")  # noqa: T201  read with -s


def _count(
    job: Job, num_params: int, lora: LoraSection | None = None, *, num_ranks: int = 2
) -> None:
    """Hold a rank's parameters against the memory plan's; stages differ by their ends."""
    if "pipeline_parallel" in job.layout:
        return
    sizes = {
        kind: job.layout.get(f"{kind}_parallel", 1)
        for kind in ("tensor", "pipeline", "context", "expert")
    }
    sizes["expert_tensor"] = sizes["tensor"] if sizes["expert"] == 1 else 1
    layout = Layout(
        num_nodes=1,
        gpus_per_node=num_ranks,
        colocated=True,
        ranks=num_ranks,
        num_engines=1,
        gpus_per_engine=1,
        **sizes,
    )
    shape = shape_from_config(job.line, config_of(_build(job)))
    planned = rank_params(shape, layout, lora)
    assert num_params == planned.dense + planned.expert


def _sure(
    job: Job, model: torch.nn.Module, optimizer: torch.optim.AdamW
) -> dict[str, torch.Tensor]:
    """Mark the weights whose gradients are more than rounding: Adam moves all of them as far."""
    marks = {
        name: torch.ones_like(value, dtype=torch.bool) for name, value in weights_of(model).items()
    }
    for name, param in model.named_parameters():
        size = optimizer.state[param]["exp_avg_sq"].sqrt()
        marks[name] = (size == 0) | (size > 1e-6)
    flat = torch.cat([mark.flatten() for mark in marks.values()])
    assert float(flat.float().mean()) >= 0.98
    return marks if job.line == "qwen3_5_moe" else per_expert(marks)


def _mean_gap(rows: Sequence[Sequence[float]], sampled: Sequence[torch.Tensor]) -> float:
    gaps = [(torch.tensor(row) - own).abs() for row, own in zip(rows, sampled, strict=True)]
    return float(torch.cat(gaps).mean())


def _batches(job: Job) -> list[Batch]:
    found = []
    engine = _build(job) if job.replay else None
    torch.manual_seed(7)
    for step in range(STEPS):
        rows = _rows(step)
        if engine is not None:
            rows = [replace(row, routed=(record_experts(engine, row, noise=0.5),)) for row in rows]
        found.append(Batch(step, tuple(rows), len(rows)))
    return found


def _rows(step: int) -> list[Sample]:
    rng = random.Random(step)
    rows = []
    for number in range(5):
        length = rng.randint(20, 60)
        mask = [0] * 5 + [int(place % 20 < 12) for place in range(length - 5)]
        rows.append(
            Sample(
                episode=f"episode-{number}",
                task="task",
                ids=tuple(rng.randrange(320) for _ in range(length)),
                mask=tuple(mask),
                logprobs=(0.0,) * length,
                weight_versions=(),
                advantage=1.0,
            )
        )
    return rows


def _build(job: Job) -> torch.nn.Module:
    return build(job.line, **job.changes)


def _spec(work: Path, job: Job, num_ranks: int, name: str = "") -> dict[str, Any]:
    folder = work / f"{num_ranks}-{name or job.name}"
    write_model(_build(job), folder)
    files = [folder / f"{step}.parquet" for step in range(STEPS)]
    for file, batch in zip(files, _batches(job), strict=True):
        batches.write(file, batch)
    options = {"routing_replay": job.replay, "ranks": num_ranks, **job.layout}
    return job_of(folder, files, folder / "found.pt", options)
