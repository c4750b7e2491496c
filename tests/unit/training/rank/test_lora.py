"""Adapters of every model line against PEFT on transformers and AdamW, on one rank and on more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from swerl.recipe.schema import LoraSection
from swerl.training.adapter_folder import write_adapters
from tests.unit.training.rank.family_ranks import run_ranks
from tests.unit.training.rank.references import adamw, logp, sft_loss, take_step
from tests.unit.training.rank.test_families import Job, _batches, _build, _count, _spec

pytestmark = pytest.mark.integration

LORA = {"rank": 4, "alpha": 8.0}
NO_MLP = {**LORA, "targets": ["attention", "experts"]}
"""PEFT takes `gate_proj` of these lines for the routed experts'."""


def _job(line: str, lora: Mapping[str, Any] = LORA, replay: bool = False, **layout: Any) -> Job:
    return Job(line, {"lora": lora, **layout}, replay=replay)


TP, CP, PP = "tensor_parallel", "context_parallel", "pipeline_parallel"
EP = "expert_parallel"
JOBS = {
    1: [
        _job("qwen3_tied"),
        _job("qwen3_moe", NO_MLP),
        _job("llama"),
        _job("qwen3_5"),
        _job("qwen3_5_moe", recompute=True),
        _job("glm4_moe", NO_MLP, replay=True),
    ],
    2: [
        _job("qwen3_5_moe"),
        _job("qwen3_tied", **{TP: 2}),
        _job("qwen2", **{TP: 2}),
        _job("qwen3_5_moe", **{TP: 2, EP: 2}),
        _job("qwen3_5_moe", **{CP: 2, "recompute": True}),
        _job("glm4_moe", NO_MLP, **{TP: 2}),
        _job("qwen3_5_moe", **{PP: 2, "offload_optimizer": True}),
    ],
    4: [
        _job("qwen3_5_moe", **{TP: 2, CP: 2, EP: 4, "recompute": True}),
        _job("qwen3_tied", **{PP: 2}),
    ],
}
BF16 = [_job("qwen3_tied", dtype="bf16"), _job("qwen3_5_moe", dtype="bf16")]
ALL = [(count, job) for count, jobs in JOBS.items() for job in jobs]


def _name(job: Job) -> str:
    return job.name.replace("-lora{'rank': 4, 'alpha': 8.0}", "").replace(" ", "")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[int, str], Mapping[str, Any]]:
    work = tmp_path_factory.mktemp("lora")
    all_jobs = {**JOBS, 1: [*JOBS[1], *BF16]}
    specs: dict[int, list[dict[str, Any]]] = {
        count: [_spec(work, job, count, str(number)) for number, job in enumerate(jobs)]
        for count, jobs in all_jobs.items()
    }
    run_ranks(work / "lora.json", specs)
    return {
        (count, job.name): torch.load(spec["out"], weights_only=False)
        for count, jobs in all_jobs.items()
        for job, spec in zip(jobs, specs[count], strict=True)
    }


@pytest.mark.parametrize(("count", "job"), ALL, ids=lambda each: getattr(each, "name", each))
def test_adapters_train_as_pefts_do(
    count: int, job: Job, found: Mapping[tuple[int, str], Mapping[str, Any]], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    ours = found[count, job.name]
    lora = LoraSection.model_validate(job.layout["lora"])
    wrapped = _peft(job, ours, tmp_path)
    assert sum(each.numel() for each in wrapped.parameters() if each.requires_grad) == sum(
        each.numel() for each in ours["adapters"].values()
    )
    if job.layout.get(TP, 1) == 1 or EP in job.layout or "moe" not in job.line:
        _count(job, ours["num_params"], lora)
    # The frozen weights have no gradient buffer: only padding is added to the adapters'.
    assert ours["gradient_bytes"] <= 4 * ours["num_params"] + 64_000
    optimizer = adamw(wrapped)
    steps = _batches(job)
    with torch.no_grad():
        for row, logps in zip(steps[0].samples, ours["logprobs"], strict=True):
            expected = logp(wrapped, row)[torch.tensor(row.mask[1:]) > 0]
            assert float((torch.tensor(logps) - expected).abs().max()) <= 1e-5
    for logps, trained in zip(ours["logprobs"], ours["trained_logprobs"], strict=True):
        assert trained == pytest.approx(logps, abs=1e-6)
    worst = dict.fromkeys(("loss", "grad_norm"), 0.0)
    for number, (batch, stats) in enumerate(zip(steps, ours["stats"], strict=True)):
        loss, norm = take_step(optimizer, sft_loss(wrapped, batch), number)
        worst["loss"] = max(worst["loss"], abs(stats["loss"] / loss - 1))
        worst["grad_norm"] = max(worst["grad_norm"], abs(stats["grad_norm"] / norm - 1))
    assert max(worst.values()) <= 1e-6
    theirs = peft.get_peft_model_state_dict(wrapped)
    assert theirs.keys() == ours["adapters"].keys()
    gaps = {
        name: float((ours["adapters"][name] - value).abs().max()) for name, value in theirs.items()
    }
    name, gap = max(gaps.items(), key=lambda pair: pair[1])
    print(f"{count} {job.name}: {worst}, adapters {gap:.1e} {name}")  # noqa: T201  read with -s
    assert gap <= 3e-5, name
    assert ours["agree"]


@pytest.mark.parametrize("job", BF16, ids=lambda job: job.name)
def test_adapters_of_a_bf16_model_train_as_pefts_in_fp32(
    job: Job, found: Mapping[tuple[int, str], Mapping[str, Any]], tmp_path: Path
) -> None:
    ours = found[1, job.name]
    wrapped = _peft(job, ours, tmp_path)
    optimizer = adamw(wrapped)
    for number, (batch, stats) in enumerate(zip(_batches(job), ours["stats"], strict=True)):
        loss, norm = take_step(optimizer, sft_loss(wrapped, batch), number)
        assert stats["loss"] == pytest.approx(loss, rel=2e-3)
        assert stats["grad_norm"] == pytest.approx(norm, rel=2e-2)
    assert {each.dtype for each in ours["adapters"].values()} == {torch.bfloat16}
    assert ours["gradient_bytes"] <= 4 * ours["num_params"] + 64_000


def _peft(job: Job, ours: Mapping[str, Any], folder: Path) -> Any:
    """Return PEFT's model with the first adapters of a job."""
    peft = pytest.importorskip("peft")
    lora = LoraSection.model_validate(job.layout["lora"])
    write_adapters(folder, ours["adapters"], lora, model=folder)
    config = peft.LoraConfig.from_pretrained(folder)
    config.inference_mode = False
    wrapped = peft.get_peft_model(_build(job), config).eval()
    wrong = peft.set_peft_model_state_dict(wrapped, ours["first_adapters"])
    assert not wrong.unexpected_keys
    return wrapped
