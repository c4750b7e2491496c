"""Losses, advantages and gradients of an own reference in double precision, case by case."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, Totals
from tests.unit import made
from tests.unit.training.algorithms.conftest import NAMES, make

VARIANTS = ("plain", "kl", "kl_reward", "tis", "seqmis", "icepop")


def _group(entry: dict[str, Any]) -> Group:
    episodes = (
        made.episode(each["id"], verdict=each["verdict"], reward=each["reward"])
        for each in entry["episodes"]
    )
    return Group(entry["task"], tuple(episodes))


def _grid(rows: list[dict[str, Any]], name: str) -> torch.Tensor:
    width = max(len(row["mask"]) for row in rows)
    padded = [[*row[name], *[0.0] * (width - len(row[name]))] for row in rows]
    return torch.tensor(padded, dtype=torch.float64)


def _inputs(rows: list[dict[str, Any]], advantages: dict[str, float]) -> LossInputs:
    mask = _grid(rows, "mask")
    episodes = [row["episode"] for row in rows]
    by_episode = {
        name: sum(float(m.sum()) for m, e in zip(mask, episodes, strict=True) if e == name)
        for name in episodes
    }
    count = len(by_episode)
    shares = [float(m.sum()) / by_episode[e] / count for m, e in zip(mask, episodes, strict=True)]
    return LossInputs(
        logp_BT=_grid(rows, "trainer_logp").requires_grad_(),
        old_logp_BT=_grid(rows, "engine_logp"),
        ref_logp_BT=_grid(rows, "reference_logp") if "reference_logp" in rows[0] else None,
        mask_BT=mask,
        token_BT=torch.ones_like(mask),
        advantage_B=torch.tensor([advantages[e] for e in episodes], dtype=torch.float64),
        weight_B=torch.tensor(shares, dtype=torch.float64),
        totals=Totals(count, int(mask.sum())),
    )


def _part(inputs: LossInputs, places: slice) -> LossInputs:
    fields = ("old_logp_BT", "ref_logp_BT", "mask_BT", "token_BT", "advantage_B", "weight_B")
    values = {name: getattr(inputs, name) for name in fields}
    chosen = {name: None if v is None else v[places] for name, v in values.items()}
    return replace(inputs, logp_BT=inputs.logp_BT[places], **chosen)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_the_reference(shared_dir: Path, name: str, variant: str) -> None:
    path = shared_dir / "cases" / "training" / f"loss-{name}-{variant}.json"
    case = json.loads(path.read_text())
    algorithm = make(case["algorithm"], **case["options"])
    groups = [_group(entry) for entry in case["groups"]]
    values = algorithm.advantages(groups)
    advantages = {
        episode.id: value
        for group, row in zip(groups, values, strict=True)
        for episode, value in zip(group.episodes, row, strict=True)
    }
    expected, tolerance = case["expected"], case["expected"]["tolerance"]
    for name, value in expected["advantage"].items():
        assert advantages[name] == pytest.approx(value, abs=tolerance)
    inputs = _inputs(case["rows"], advantages)
    if not algorithm.needs_reference:
        inputs = replace(inputs, ref_logp_BT=None)
    middle = len(case["rows"]) // 2
    parts = [_part(inputs, places) for places in (slice(0, middle), slice(middle, None))]
    loss = sum(algorithm.loss(part).loss for part in parts if len(part.advantage_B))
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=tolerance)
    for found, row in zip(
        inputs.logp_BT.grad.numpy(), expected["gradient_of_trainer_logp"], strict=True
    ):
        np.testing.assert_allclose(found[: len(row)], row, atol=tolerance)
