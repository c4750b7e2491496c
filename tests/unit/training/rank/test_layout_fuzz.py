"""Random models under random layouts, algorithms and rows, against transformers and AdamW.

Each case is a small model of some line, a layout of four ranks, rows of awkward lengths and an
algorithm: figures, log-probabilities, gradient norms and weights must be those of one process that
runs one row at a time. A few cases run with the other tests; `SWERL_FUZZ_LAYOUTS=200` runs so many.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

import torch
from safetensors.torch import save_file

from swerl.core import plugins
from swerl.core.contracts import Algorithm
from swerl.core.learning import Batch, LossInputs, Totals
from swerl.core.sample import Sample
from swerl.engines.families import tiny
from swerl.training import batch as batches
from swerl.training.model_folder import copy_tokenizer
from tests.unit.engines.families.lines import build, config_of, per_expert, weights_of
from tests.unit.training.rank.family_ranks import digest, run_ranks
from tests.unit.training.rank.layout_cases import Case, draw, with_holes
from tests.unit.training.rank.references import record_experts, replaying

pytestmark = pytest.mark.integration

STEPS = 3
NUM_CASES = int(os.environ.get("SWERL_FUZZ_LAYOUTS", "0"))
CHOSEN = (10, 13, 30, 34, 42)
"""Cases that together split every line and every axis."""
SEEDS = range(NUM_CASES) if NUM_CASES else CHOSEN
CASES = [draw(seed, 4, num_steps=STEPS) for seed in SEEDS]
LR, WARMUP, DECAY, BETAS, CLIP = 1e-4, 2, 0.1, (0.9, 0.98), 1.0


class Reference:
    """One process that trains a case: transformers, one row at a time, and torch's AdamW."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = build(case.line, **case.changes)
        self.first = build(case.line, **case.changes)
        self.loaded = weights_of(self.model)
        module = plugins.load("algorithms", case.algorithm)
        options = module.Options.model_validate(case.algorithm_options)
        self.algorithm: Algorithm = module.build(options)
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.params = params
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in params if p.ndim > 1], "weight_decay": DECAY},
                {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
            ],
            betas=BETAS,
        )

    def fill(self, step: int) -> Batch:
        """Return a step's Batch with experts and log-probabilities of a slightly other policy."""
        rng = Random(f"fill {self.case.seed} {step}")
        torch.manual_seed(1000 * self.case.seed + step)
        noise = rng.choice([5e-4, 0.3])
        rows = []
        for row in self.case.rows[step]:
            if self.case.replay and rng.random() < 0.8:
                record = record_experts(self.model, row, noise=0.3)
                row = replace(row, routed=with_holes(rng, record))
            with torch.no_grad():
                logp = [0.0, *self.logp(self.model, row).tolist()]
            pairs = zip(logp, row.mask, strict=True)
            old = [value + rng.gauss(0, noise) if on else 0.0 for value, on in pairs]
            rows.append(replace(row, logprobs=old))
        return Batch(step, tuple(rows), len({row.episode for row in rows}))

    def logp(self, model: torch.nn.Module, row: Sample) -> torch.Tensor:
        """Return the log-probability of each token but the first."""
        ids = torch.tensor(list(row.ids))
        with replaying(model, row):
            logits = model(ids[None, :-1]).logits[0] / self.case.temperature
        return torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]

    def trained(self, row: Sample, *, first: bool = False) -> torch.Tensor:
        """Return the log-probability of each trained token, of now or under the first weights."""
        on = torch.tensor(list(row.mask)[1:], dtype=torch.bool)
        with torch.no_grad():
            return self.logp(self.first if first else self.model, row)[on]

    def step(self, batch: Batch, number: int) -> dict[str, float]:
        """Take a step; return the figures."""
        inputs = self._inputs(batch)
        result = self.algorithm.loss(inputs)
        self.optimizer.zero_grad()
        result.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params, CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = LR * min(1.0, (number + 1) / WARMUP)
        self.optimizer.step()
        return {"loss": result.loss.item(), "grad_norm": norm.item(), **result.stats}

    def _inputs(self, batch: Batch) -> LossInputs:
        rows = batch.samples
        pad = torch.nn.utils.rnn.pad_sequence
        with torch.no_grad():
            first = pad([self.logp(self.first, row) for row in rows], batch_first=True)
        logp = pad([self.logp(self.model, row) for row in rows], batch_first=True)
        mask, old = (
            pad([torch.tensor(list(part(row))[1:]).float() for row in rows], batch_first=True)
            for part in (lambda row: row.mask, lambda row: row.logprobs)
        )
        token = pad([torch.ones(len(row.ids) - 1) for row in rows], batch_first=True)
        num_trained = sum(sum(row.mask) for row in rows)
        return LossInputs(
            logp_BT=logp,
            old_logp_BT=old,
            ref_logp_BT=first if self.algorithm.needs_reference else None,
            mask_BT=mask,
            token_BT=token,
            advantage_B=torch.tensor([row.advantage for row in rows]),
            weight_B=torch.tensor([row.share / batch.num_episodes for row in rows]),
            totals=Totals(batch.num_episodes, num_trained),
            base_logp_BT=first * mask if batch.base else None,
        )

    def sure(self) -> dict[str, torch.Tensor]:
        """Mark weights whose gradients are more than rounding: Adam moves all of them as far."""
        marks = {n: torch.ones_like(v, dtype=torch.bool) for n, v in weights_of(self.model).items()}
        for name, param in self.model.named_parameters():
            if "exp_avg_sq" in self.optimizer.state[param]:
                size = self.optimizer.state[param]["exp_avg_sq"].sqrt()
                marks[name] = (size == 0) | (size > 1e-6)
        assert float(torch.cat([mark.flatten() for mark in marks.values()]).float().mean()) >= 0.9
        return marks


def _spoilt(batch: Batch, how: str) -> Batch:
    """Let the last row have no finite loss, or one whose gradients are too large to be squared."""
    *others, last = batch.samples
    if how == "nan":
        return replace(batch, samples=(*others, replace(last, advantage=float("nan"))))
    # A positive advantage and a small ratio: nothing is clipped.
    sampled = [logp + 2.0 for logp in last.logprobs]
    return replace(batch, samples=(*others, replace(last, advantage=1e32, logprobs=sampled)))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """What the ranks and the reference found, by the case's name."""
    root = tmp_path_factory.mktemp("layouts")
    (root / "tokenizer").mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), root / "tokenizer")
    wanted, specs = {}, {}
    for case in CASES:
        wanted[case.name], job = _prepare(root, case)
        specs.setdefault(case.ranks, []).append(job)
    run_ranks(root / "jobs.json", specs)
    return {
        case.name: (wanted[case.name], torch.load(root / case.name / "found.pt")) for case in CASES
    }


def _prepare(root: Path, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train the reference; return what it found, and the job that the ranks are specs."""
    reference = Reference(case)
    folder = root / case.name
    folder.mkdir()
    copy_tokenizer(root / "tokenizer", folder)
    config = json.dumps(config_of(reference.model), default=str)
    (folder / "config.json").write_text(config)
    save_file(reference.loaded, folder / "model.safetensors", metadata={"format": "pt"})
    steps, files, bases, logprobs = [], [], [], []
    for number in range(STEPS):
        batch = reference.fill(number)
        if not number:
            with torch.no_grad():
                logprobs = [reference.trained(row) for row in batch.samples]
        if number == 1 and case.poisoned:
            files.append(folder / "spoilt.parquet")
            batches.write(files[-1], _spoilt(batch, case.poisoned))
        files.append(folder / f"{number}.parquet")
        batches.write(files[-1], batch)
        if number == STEPS - 1:
            # The last Batch is a later part of a step that began with the initial weights.
            base = [reference.trained(row, first=True).tolist() for row in batch.samples]
            batch = replace(batch, base=base)
        bases += [batch.base] * (len(files) - len(bases))
        steps.append(reference.step(batch, number))
    options = {
        **dict.fromkeys(("checkpoint_dir", "publish_dir", "log_dir"), str(folder)),
        "lr": LR,
        "warmup_steps": WARMUP,
        "weight_decay": DECAY,
        "tokens_per_micro_batch": case.tokens_per_micro_batch,
        "routing_replay": case.replay,
        "temperature": case.temperature,
        "ranks": case.ranks,
        **case.layout,
    }
    wanted = {"steps": steps, "logprobs": logprobs, "sure": reference.sure()}
    wanted |= {"loaded": reference.loaded, "weights": weights_of(reference.model)}
    return wanted, {
        "model": str(folder),
        "out": str(folder / "found.pt"),
        "batches": [str(file) for file in files],
        "bases": bases,
        "algorithm": case.algorithm,
        "algorithm_options": case.algorithm_options,
        "options": options,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_layout_trains_as_one_process_does(
    case: Case, found: Mapping[str, tuple[Any, ...]]
) -> None:
    wanted, got = found[case.name]
    as_published = _published(case)
    assert got["loaded"] == digest(as_published(wanted["loaded"]).items())
    assert got["agree"]
    assert got["unchanged"]
    assert got["num_skipped"] == bool(case.poisoned)
    for name in ("logprobs", "trained_logprobs"):
        for row, logp in zip(got[name], wanted["logprobs"], strict=True):
            assert float((torch.tensor(row) - logp).abs().max()) <= 1e-5
    for step, stats in zip(wanted["steps"], got["stats"], strict=True):
        figures = {**stats, **stats["extra"]}
        # Counts of rows by sign become shares in a step's figures.
        plain = {name: step[name] for name in step if not name.endswith(("_positive", "_negative"))}
        for name, value in plain.items():
            assert figures[name] == pytest.approx(value, rel=1e-5, abs=2e-6), name
    weights, sure = as_published(wanted["weights"]), as_published(wanted["sure"])
    assert got["weights"].keys() == weights.keys()
    gaps = {
        name: float(((got["weights"][name] - value).abs() * sure[name]).max())
        for name, value in weights.items()
    }
    name, gap = max(gaps.items(), key=lambda pair: pair[1])
    assert gap <= 3e-6, name


def _published(case: Case) -> Any:
    return dict if case.line == "qwen3_5_moe" else per_expert
