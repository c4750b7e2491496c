"""Every kind of parallelism against one rank: three steps on real Megatron-Core over gloo."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swerl.core.learning import Batch
from swerl.training import batch as batches
from swerl.training.options import TrainerOptions
from tests.unit.engines.families.lines import BASE, build, config_of, weights_of
from tests.unit.training.rank.family_ranks import largest_gaps, run_ranks

pytestmark = pytest.mark.integration

MakeBatch = Callable[..., Batch]


@dataclass(frozen=True)
class Case:
    """A model under a layout."""

    model: str
    ranks: int = 1
    algorithm: str = "gspo"
    poisoned: bool = False
    """Whether one step in between has a loss that is not finite."""
    layout: Mapping[str, Any] = field(default_factory=dict)


TP, CP, PP = "tensor_parallel", "context_parallel", "pipeline_parallel"
EP = "expert_parallel"
CASES = {
    "dense": Case("dense"),
    "untied": Case("untied"),
    "moe": Case("moe"),
    "sft": Case("dense", algorithm="sft"),
    "recompute": Case("dense", layout={"recompute": True}),
    "recompute-one": Case("dense", layout={"recompute": 1}),
    "offload": Case("dense", layout={"offload_optimizer": True}),
    "bf16": Case("dense", algorithm="sft", layout={"dtype": "bf16", "recompute": True}),
    "data": Case("dense", 2),
    "tensor": Case("dense", 2, layout={TP: 2}),
    "context": Case("dense", 2, layout={CP: 2}),
    "stages": Case("dense", 2, poisoned=True, layout={PP: 2}),
    "stages-untied": Case("untied", 2, layout={PP: 2}),
    "experts": Case("moe", 2, layout={EP: 2}),
    "expert-tensor": Case("moe", 2, layout={TP: 2}),
    "tensor-context": Case("dense", 4, poisoned=True, layout={TP: 2, CP: 2}),
    "stages-data": Case("dense", 4, layout={PP: 2}),
    "stages-experts": Case("moe", 4, layout={PP: 2, EP: 2}),
    "tensor-context-experts": Case("moe", 4, layout={TP: 2, CP: 2, EP: 4, "recompute": True}),
    "bf16-tensor-stages": Case("dense", 4, "sft", layout={TP: 2, PP: 2, "dtype": "bf16"}),
}


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models: dense with tied and with own output weights, and a mixture of experts."""
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": tiny_model,
        "untied": _untied(tiny_model, root / "untied"),
        "moe": _mixture(tiny_model, root / "moe"),
    }


def _untied(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(2)
    weights["lm_head.weight"] = 0.1 * torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _mixture(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    model = build("qwen3_moe")
    (folder / "config.json").write_text(json.dumps(config_of(model)))
    save_file(weights_of(model), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def found(
    models: dict[str, Path], random_batch: MakeBatch, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What each case's rank 0 reports after three steps."""
    root = tmp_path_factory.mktemp("ranks")
    good = [_write(root / f"{step}.parquet", _narrow(random_batch(step))) for step in range(3)]
    bad = _write(root / "bad.parquet", _poisoned(_narrow(random_batch(1))))
    specs: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 4: []}
    for name, case in CASES.items():
        files = [good[0], bad, *good[1:]] if case.poisoned else good
        specs[case.ranks].append(_job(models, root, name, files))
    run_ranks(root / "jobs.json", specs)
    return {name: torch.load(root / f"{name}.pt", weights_only=False) for name in CASES}


def _job(models: dict[str, Path], root: Path, name: str, files: list[str]) -> dict[str, Any]:
    case = CASES[name]
    return {
        "model": str(models[case.model]),
        "algorithm": case.algorithm,
        "options": _options(root, case).model_dump(mode="json"),
        "batches": files,
        "out": str(root / f"{name}.pt"),
    }


def _options(root: Path, case: Case) -> TrainerOptions:
    return TrainerOptions(
        checkpoint_dir=root,
        publish_dir=root,
        log_dir=root,
        ranks=case.ranks,
        lr=1e-3,
        warmup_steps=2,
        weight_decay=0.1,
        # Two micro-batches or more on every rank.
        tokens_per_micro_batch=70,
        **case.layout,
    )


def _write(path: Path, batch: Batch) -> str:
    batches.write(path, batch)
    return str(path)


def _narrow(batch: Batch) -> Batch:
    """Bring token ids into the small models' vocabulary."""
    samples = [replace(row, ids=[i % BASE["vocab_size"] for i in row.ids]) for row in batch.samples]
    return replace(batch, samples=tuple(samples))


def _poisoned(batch: Batch) -> Batch:
    first, *others = batch.samples
    first = replace(first, advantage=float("nan"))
    return replace(batch, samples=(first, *others))


def _gap(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences: of loss and norm over the wanted, of the rest absolute."""
    gaps = largest_gaps(found, wanted)
    assert found["weights"].keys() == wanted["weights"].keys()
    gaps["weights"] = max(
        float((found["weights"][name].float() - whole).abs().max())
        for name, whole in wanted["weights"].items()
    )
    return gaps


@pytest.mark.parametrize(
    "name",
    [name for name, case in CASES.items() if case.ranks > 1 and case.layout.get("dtype") is None],
)
def test_any_layout_takes_the_steps_of_one_rank(
    found: dict[str, dict[str, Any]], name: str, record_property: Callable[[str, object], None]
) -> None:
    case = CASES[name]
    gaps = _gap(found[name], found[case.model])
    record_property("gaps", gaps)
    assert found[name]["num_skipped"] == int(case.poisoned)
    assert found[name]["unchanged"]
    assert found[name]["agree"]
    assert gaps["loss"] <= 1e-5
    assert gaps["grad_norm"] <= 1e-5
    assert gaps["mismatch"] <= 1e-5
    assert gaps["logprobs"] <= 1e-5
    assert gaps["weights"] <= (3e-5 if case.model == "moe" else 1e-5)


def test_recomputed_activations_change_nothing(found: dict[str, dict[str, Any]]) -> None:
    for name in ("recompute", "recompute-one"):
        assert set(_gap(found[name], found["dense"]).values()) == {0.0}


def test_an_offloaded_optimizer_takes_the_same_steps(
    found: dict[str, dict[str, Any]], record_property: Callable[[str, object], None]
) -> None:
    gaps = _gap(found["offload"], found["dense"])
    record_property("gaps", gaps)
    assert max(gaps.values()) <= 1e-6


@pytest.mark.parametrize("name", CASES)
def test_a_step_reports_the_log_probabilities_before_it(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    for row, other in zip(found[name]["trained_logprobs"], found[name]["logprobs"], strict=True):
        assert row == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("name", ["bf16", "bf16-tensor-stages"])
def test_bf16_stays_close_to_fp32(
    found: dict[str, dict[str, Any]], name: str, record_property: Callable[[str, object], None]
) -> None:
    gaps = _gap(found[name], found["sft"])
    record_property("gaps", gaps)
    assert 0 < gaps["loss"] <= 2e-3
    assert gaps["grad_norm"] <= 1e-2
    assert all(tensor.dtype is torch.bfloat16 for tensor in found[name]["weights"].values())
