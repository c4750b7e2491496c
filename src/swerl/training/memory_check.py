"""The memory plan against what a run measured; on CPU nothing is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swerl.core.events import Emit, Notice
from swerl.recipe.schema import Recipe

MEASURED = "peak_memory_gib"
"""The trainer's metric: what the tensors of its fullest rank took at most."""
PLANNED = "planned_memory_gib"
_OUTSIDE = ("contexts", "gaps")
"""Parts of the plan that are no tensors: CUDA's contexts, NCCL's buffers, the allocator's gaps."""
_ALLOWED = 0.1
"""Share by which a plan may be wrong before the run says so."""


@dataclass(slots=True)
class MemoryCheck:
    """Compares, and warns once."""

    planned_gib: float | None
    """Of the tensors in training; None on CPU."""
    _told: bool = field(default=False)

    @classmethod
    def of(cls, recipe: Recipe) -> MemoryCheck:
        """Return the check of a recipe. Raises RecipeError where it has no plan."""
        from swerl.plan.plan import plan

        if not recipe.cluster.gpus_per_node:
            return cls(None)
        memory = plan(recipe).memory
        assert memory is not None
        train = memory.train
        return cls(train.total - sum(train.parts[name] for name in _OUTSIDE))

    def figures(self, metrics: Mapping[str, float], emit: Emit) -> dict[str, float]:
        """Return what to add to a step's metrics; nothing where nothing was measured."""
        measured = metrics.get(MEASURED)
        if self.planned_gib is None or measured is None:
            return {}
        off = measured / self.planned_gib - 1
        if abs(off) > _ALLOWED and not self._told:
            self._told = True
            emit(Notice(f"memory: {describe(self.planned_gib, measured)}; the plan is off"))
        return {PLANNED: self.planned_gib}


def describe(planned_gib: float, measured_gib: float) -> str:
    """Return both and how far they are apart, in one line."""
    off = measured_gib / planned_gib - 1
    return f"planned {planned_gib:.1f}, measured {measured_gib:.1f} GiB ({off:+.0%})"
