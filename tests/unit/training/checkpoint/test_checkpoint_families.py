"""Experts, gated delta nets and bf16 through checkpoints of several layouts, on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

from swerl.core.learning import Batch
from swerl.engines.families import tiny
from swerl.training import batch as batches
from swerl.training.checkpoint.files import CheckpointReader
from swerl.training.checkpoint.folder import read_meta
from swerl.training.options import TrainerOptions
from tests.unit.engines.families.lines import build, config_of, weights_of

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[4]


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
        _make_model(work / line, line)
    specs = [_spec(work, job, files) for job in JOBS]
    path = work / "jobs.json"
    path.write_text(json.dumps(specs))
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, "-m", "tests.unit.training.checkpoint.checkpoint_ranks", str(path)]
    ranks = [subprocess.Popen([*argv, str(rank)], cwd=ROOT, env=env) for rank in range(2)]
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0]
    return [tuple(pair) for pair in json.loads(path.with_suffix(".found").read_text())]


def _make_model(folder: Path, line: str) -> None:
    folder.mkdir()
    model = build(line)
    tiny.save_tokenizer(tiny.byte_tokenizer(), folder)
    (folder / "config.json").write_text(json.dumps(config_of(model), default=str))
    save_file(weights_of(model), folder / "model.safetensors", metadata={"format": "pt"})


def _spec(work: Path, job: Job, files: list[Path]) -> dict[str, Any]:
    folder = work / job.line
    options = TrainerOptions(
        checkpoint_dir=folder / "checkpoints",
        publish_dir=folder,
        log_dir=folder,
        ranks=2,
        lr=1e-3,
        tokens_per_micro_batch=200,
        **job.layout,
    )
    return {
        "model": str(folder),
        "options": options.model_dump(mode="json"),
        "batches": [str(file) for file in files],
        "restore": job.restore,
        "save": job.save,
    }
