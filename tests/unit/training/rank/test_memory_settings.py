"""Recomputation, an offloaded optimizer and bf16 against plain fp32, on real Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from swerl.core.learning import Batch
from swerl.training import batch as batches
from tests.unit.training.rank.family_ranks import job_of, largest_gaps, run_ranks

pytestmark = pytest.mark.integration

PLAIN = {"gspo": "plain", "sft": "sft"}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("gspo", {}),
    "sft": ("sft", {}),
    "recompute": ("gspo", {"recompute": True}),
    "recompute-one": ("gspo", {"recompute": 1}),
    "offload": ("gspo", {"offload_optimizer": True}),
    "bf16": ("sft", {"dtype": "bf16", "recompute": True}),
    "bf16-tensor-stages": (
        "sft",
        {"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2, "dtype": "bf16"},
    ),
}


@pytest.fixture(scope="module")
def gaps(
    tiny_model: Path,
    random_batch: Callable[..., Batch],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, float]]:
    """Largest differences from the plain case: of loss and norm relative, of the rest absolute."""
    root = tmp_path_factory.mktemp("ranks")
    files = [root / f"{step}.parquet" for step in range(3)]
    for step, file in enumerate(files):
        batches.write(file, random_batch(step))
    specs: dict[int, list[dict[str, Any]]] = {1: [], 4: []}
    for name, (algorithm, settings) in CASES.items():
        options = {"tokens_per_micro_batch": 70, **settings}
        out = root / f"{name}.pt"
        job = job_of(tiny_model, files, out, options, algorithm=algorithm)
        specs[settings.get("ranks", 1)].append(job)
    run_ranks(root / "jobs.json", specs)
    found = {name: torch.load(root / f"{name}.pt", weights_only=False) for name in CASES}
    for result in found.values():
        assert result["agree"]
        pairs = zip(result["trained_logprobs"], result["logprobs"], strict=True)
        assert all(row == pytest.approx(other, abs=1e-6) for row, other in pairs)
    return {
        name: _gaps(found[name], found[PLAIN[algorithm]]) for name, (algorithm, _) in CASES.items()
    }


def _gaps(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    weights = {name: whole.float() for name, whole in plain["weights"].items()}
    gaps = [float((found["weights"][n].float() - w).abs().max()) for n, w in weights.items()]
    return {**largest_gaps(found, plain), "weights": max(gaps)}


@pytest.mark.parametrize("name", ["recompute", "recompute-one"])
def test_recomputed_activations_change_nothing(gaps: dict[str, Any], name: str) -> None:
    assert set(gaps[name].values()) == {0.0}


def test_an_offloaded_optimizer_takes_the_same_steps(gaps: dict[str, Any]) -> None:
    assert max(gaps["offload"].values()) <= 1e-6


@pytest.mark.parametrize("name", ["bf16", "bf16-tensor-stages"])
def test_bf16_stays_close_to_fp32(gaps: dict[str, Any], name: str) -> None:
    assert 0 < gaps[name]["loss"] <= 2e-3
    assert gaps[name]["grad_norm"] <= 1e-2
