"""Experts, gated delta nets and bf16 through checkpoints of several layouts, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

from swerl.core.learning import Batch
from swerl.training import batch as batches
from swerl.training.checkpoint.files import CheckpointReader
from swerl.training.checkpoint.folder import read_meta
from tests.unit.engines.families.lines import build, write_model
from tests.unit.training.rank.family_ranks import job_of, run_ranks

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Job:
    """One model line under one layout: restore or train, save, train."""

    line: str
    save: int
    restore: int | None = None
    layout: dict[str, Any] = field(default_factory=dict)


EXPERT, TENSOR = {"expert_parallel": 2}, {"tensor_parallel": 2}
STAGES = {"pipeline_parallel": 2}
HALF = {"dtype": "bf16"}
ADAPTERS = {"lora": {"rank": 4}}
JOBS = [
    Job("qwen3_5_moe", 1),
    Job("qwen3_5_moe", 2, 1, EXPERT),
    Job("qwen3_5_moe", 3, 2, TENSOR),
    Job("qwen3_5_moe", 4, 3),
    Job("qwen3_5_moe", 5, 4, STAGES),
    Job("qwen3_5_moe", 6, 5, TENSOR),
    Job("glm4_moe", 1, layout=EXPERT),
    Job("glm4_moe", 2, 1),
    Job("qwen3_moe", 1, layout=HALF),
    Job("qwen3_moe", 2, 1, {**EXPERT, **HALF}),
    Job("qwen3_moe", 3, 2, HALF),
    Job("glm4_air", 1, layout={**EXPERT, **ADAPTERS}),
    Job("glm4_air", 2, 1, {**TENSOR, **ADAPTERS}),
    Job("glm4_air", 3, 2, {**STAGES, **ADAPTERS}),
    Job("glm4_air", 4, 3, {**EXPERT, **ADAPTERS}),
]


def test_experts_and_bf16_pass_through_every_layout_unchanged(
    tmp_path: Path, random_batch: Callable[..., Batch]
) -> None:
    names = [(job.line, job.save) for job in JOBS]
    found = dict(zip(names, _run(tmp_path, random_batch), strict=True))
    for line in ("qwen3_5_moe", "glm4_moe", "qwen3_moe", "glm4_air"):
        jobs = [job for job in JOBS if job.line == line]
        first, *others = jobs
        content = _content(tmp_path, first)
        for job in others:
            other = _content(tmp_path, job)
            assert content.keys() == other.keys()
            assert {key for key in content if not torch.equal(content[key], other[key])} == set()
        wanted = found[line, first.save]
        for job in others:
            got = found[line, job.save]
            same = next(each for each in jobs if each.layout == job.layout)
            assert got == found[line, same.save], "the same layout goes on bit for bit"
            if "dtype" not in job.layout:
                assert got == pytest.approx(wanted, rel=1e-5)
    half = read_meta(tmp_path / "qwen3_moe" / "checkpoints" / "00001")
    assert half.dtype == "bfloat16"
    adapters = _content(tmp_path, next(job for job in JOBS if "lora" in job.layout))
    assert adapters and all("_lora." in name for name in adapters), "frozen weights are not saved"
    masters = _content(tmp_path, next(job for job in JOBS if job.layout == HALF))
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values())


def _content(work: Path, job: Job) -> dict[str, torch.Tensor]:
    source = CheckpointReader(work / job.line / "checkpoints" / f"{job.save:05d}")
    return {key: source.tensor(key) for key in source.shapes}


def _run(work: Path, random_batch: Callable[..., Batch]) -> list[tuple[float, float]]:
    files = [work / f"{step}.parquet" for step in range(2)]
    for step, file in enumerate(files):
        batches.write(file, random_batch(step, sampled=False))
    for line in sorted({job.line for job in JOBS}):
        write_model(build(line), work / line)
    specs = [_spec(work / job.line, job, files) for job in JOBS]
    run_ranks(work / "jobs.json", {2: specs})
    found = [torch.load(spec["out"], weights_only=False) for spec in specs]
    return [(each["loss"], each["grad_norm"]) for each in found]


def _spec(folder: Path, job: Job, files: list[Path]) -> dict[str, Any]:
    options = {
        "checkpoint_dir": str(folder / "checkpoints"),
        "ranks": 2,
        "tokens_per_micro_batch": 200,
        **job.layout,
    }
    out = folder / f"{job.save}.pt"
    return job_of(folder, files, out, options, save=job.save, restore=job.restore)
