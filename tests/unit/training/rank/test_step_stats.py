"""Phases of a step: seconds everywhere, peak memory where there is CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swerl.training.rank import step_stats as clock
from swerl.training.rank.microbatch import MicroBatch
from swerl.training.rank.step_stats import PhaseTimer, compare, peak_memory, to_stats

GIB = 2**30
GROUP: Any = None
"""The stand-in for gathering asks for no group."""


class FakeCuda:
    """Stands in for torch.cuda's memory counters: a peak that grows until it is reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peaks: list[int]) -> None:
        self._peaks = iter(peaks)
        self.resets = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(self._peaks))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    def _reset(self) -> None:
        self.resets += 1


def test_each_phase_has_the_fullest_ranks_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, [3 * GIB, 5 * GIB])
    measured = PhaseTimer()
    measured.lap("reference")
    measured.lap("optimizer")
    assert cuda.resets == 3
    others = [("reference", 4 * GIB), ("optimizer", 2 * GIB)]
    monkeypatch.setattr(clock, "gather_lists", lambda own, group: [*own, *others])
    assert peak_memory(measured.peak_bytes, GROUP) == {
        "peak_memory_gib": 5.0,
        "reference_peak_memory_gib": 4.0,
        "optimizer_peak_memory_gib": 5.0,
    }


@pytest.mark.parametrize(("gaps", "spread"), [((1e-2,) * 4, 0.0), ((1e-2, 1e-2, 0.0, 1e-9), 2.0)])
def test_rows_of_another_engine_spread_the_mismatch(gaps: tuple[float, ...], spread: float) -> None:
    """Two of four rows differ by 1e-2, the others by less than rounding, which counts as 1e-6."""
    rows = torch.ones(len(gaps) + 1, 3, dtype=torch.float64)
    mask_BT = rows.clone()
    mask_BT[-1] = 0  # A row of padding has no say.
    micro = MicroBatch(
        *(None,) * 3, -rows, None, mask_BT, rows, *(rows[:, 0],) * 2, sampled_B=rows[:, 0]
    )  # type: ignore[arg-type]
    logp_BT = -rows + torch.tensor([*gaps, 1.0], dtype=torch.float64).unsqueeze(1)
    figures = {**compare(logp_BT, micro), "loss": 0.0}
    stats = to_stats(figures, 0.0, {"optimizer_s": 1.0}, 0.1)
    assert stats.extra["mismatch_spread"] == pytest.approx(spread, abs=1e-6)
    assert stats.mismatch == pytest.approx(sum(gaps) / len(gaps))
