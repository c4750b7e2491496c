"""Draws follow the distribution of the settings, each row from its own stream."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from swerl.engines._torch_batch import RECORD
from swerl.engines._torch_model import draw

PROBS = np.array([0.1, 0.4, 0.05, 0.25, 0.2], dtype=np.float32)


def table(num_rows: int, **settings: float) -> NDArray[np.void]:
    """Return settings for rows with one seed each."""
    rows = np.zeros(num_rows, dtype=RECORD)
    rows["temperature"] = 1.0
    rows["top_p"] = 1.0
    rows["top_k"] = -1
    rows["seed"] = np.arange(num_rows)
    for name, value in settings.items():
        rows[name] = value
    return rows


def frequencies(**settings: float) -> NDArray[np.float64]:
    num_rows = 20_000
    draws = draw(np.log(PROBS)[None].repeat(num_rows, 0), table(num_rows, **settings))
    return np.bincount(draws.ids_B, minlength=5) / num_rows


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, PROBS**2 / (PROBS**2).sum()),
        ({"top_k": 2}, np.array([0, 0.4, 0, 0.25, 0]) / 0.65),
        ({"top_p": 0.7}, np.array([0, 0.4, 0, 0.25, 0.2]) / 0.85),
        ({"top_p": 0.01}, np.array([0, 1.0, 0, 0, 0])),
        ({"temperature": 0.0}, np.array([0, 1.0, 0, 0, 0])),
    ],
    ids=["plain", "temperature", "top-k", "top-p", "tiny top-p", "greedy"],
)
def test_frequencies_match(settings: dict[str, float], expected: NDArray[np.float64]) -> None:
    # Five standard deviations of a frequency over 20,000 draws.
    assert abs(frequencies(**settings) - expected).max() < 0.018


def test_a_row_draws_the_same_in_any_company() -> None:
    logits_BV = np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32)
    mixed = table(8)
    mixed["top_p"][3] = 0.5
    mixed["temperature"][5] = 0.0
    together = draw(logits_BV, mixed)
    alone = [draw(logits_BV[i : i + 1], mixed[i : i + 1]).ids_B[0] for i in range(8)]
    assert together.ids_B.tolist() == alone


def test_logprobs_are_those_before_top_k_and_top_p() -> None:
    draws = draw(np.log(PROBS)[None], table(1, top_k=1))
    assert draws.logprobs_B[0] == pytest.approx(np.log(0.4), abs=1e-6)
