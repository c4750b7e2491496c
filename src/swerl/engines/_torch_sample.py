"""Draw one token per row, each from its own reproducible stream of uniforms.

The n-th token of a request uses hash(seed, n) as its uniform and inverts the distribution with it.
So a request's draws depend on its own seed and logits, not on who shares the batch.
Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """One sampled token a row."""

    ids_B: NDArray[np.int64]
    logprobs_B: NDArray[np.float32]
    """Under the temperature-scaled distribution, before top-k and top-p cut it, as SGLang does;
    for greedy rows (temperature 0) at temperature 1."""


def draw(logits_BV: Tensor, table: NDArray[np.void]) -> Draws:
    """Sample each row by its settings in `table` (RECORDs of the rows of the batch)."""
    greedy_B = table["temperature"] == 0.0
    temperature_B = torch.from_numpy(np.where(greedy_B, np.float32(1.0), table["temperature"]))
    logprobs_BV = torch.log_softmax(logits_BV / temperature_B[:, None], -1)
    probs_BV = logprobs_BV.exp().double()
    if (table["top_k"] > 0).any() or (table["top_p"] < 1.0).any():
        probs_BV = _cut(probs_BV, table)
    cdf_BV = probs_BV.cumsum(-1)
    uniform_B = uniforms(table["seed"], table["num_tokens"] - table["num_prompt"])
    target_B1 = torch.from_numpy(uniform_B)[:, None] * cdf_BV[:, -1:]
    ids_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    if greedy_B.any():
        best_B1 = logits_BV.argmax(-1, keepdim=True)
        ids_B1 = torch.where(torch.from_numpy(greedy_B)[:, None], best_B1, ids_B1)
    logprobs_B = logprobs_BV.gather(-1, ids_B1)[:, 0]
    return Draws(ids_B1[:, 0].numpy(), logprobs_B.numpy())


def uniforms(seed_B: NDArray[np.uint64], count_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the count-th number in [0, 1) of each seed's stream (SplitMix64's mixer)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seed_B + golden) + (count_B.astype(np.uint64) + np.uint64(1)) * golden)
    # 40 bits: u times the total stays below the total, so no draw falls off the end.
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _cut(probs_BV: Tensor, table: NDArray[np.void]) -> Tensor:
    """Zero what lies outside each row's top-k and outside its top-p nucleus."""
    top_p_B1 = torch.from_numpy(table["top_p"].astype(np.float64))[:, None]
    num_vocab = probs_BV.shape[-1]
    top_k = np.where(table["top_k"] > 0, table["top_k"], num_vocab)
    top_k_B1 = torch.from_numpy(top_k)[:, None]
    sorted_BV, order_BV = probs_BV.sort(stable=True, dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    kept_BV = (before_BV <= top_p_B1) & (torch.arange(num_vocab) < top_k_B1)
    # The most likely token survives every setting.
    kept_BV[:, 0] = True
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV * kept_BV)
