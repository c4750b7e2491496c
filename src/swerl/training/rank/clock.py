"""Wall time and peak memory of the phases of a step."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from swerl.training.rank.figures import gather_lists

_GIB = 2**30


class Clock:
    """Measures one phase after the other; memory only where there is CUDA."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        """Seconds by phase, the names ending in `_s`."""
        self.peak_bytes: dict[str, int] = {}
        """Most memory that tensors took, by phase."""
        self._last = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def lap(self, phase: str) -> None:
        """End a phase."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.peak_bytes[phase] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.laps[f"{phase}_s"], self._last = now - self._last, now


def peak_memory(
    peak_bytes: Mapping[str, int], group: torch.distributed.ProcessGroup
) -> dict[str, float]:
    """Return the fullest rank's peak by phase and over all, in GiB; nothing on CPU."""
    if not torch.cuda.is_available():
        return {}
    peaks: dict[str, float] = {}
    for phase, size in gather_lists(list(peak_bytes.items()), group):
        for name in ("peak_memory_gib", f"{phase}_peak_memory_gib"):
            peaks[name] = max(peaks.get(name, 0.0), size / _GIB)
    return peaks
