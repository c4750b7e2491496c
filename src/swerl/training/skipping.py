"""Steps whose loss or gradients are not finite: skipped and counted; a row of them ends the run."""

from __future__ import annotations

from pathlib import Path

from swerl.core.contracts import Trainer
from swerl.core.errors import NotFiniteError
from swerl.core.events import Emit, StepSkipped
from swerl.core.learning import Batch, StepStats


class Skipping:
    """Takes steps, and passes over those that cannot be taken."""

    def __init__(self, allowed: int, *, total: int = 0, in_a_row: int = 0) -> None:
        self.total = total
        self.in_a_row = in_a_row
        self._allowed = allowed

    async def step(
        self, trainer: Trainer, batch: Batch, path: Path, emit: Emit
    ) -> StepStats | None:
        """Take an optimizer step on a Batch, which `path` holds; None where it was skipped.

        Raises NotFiniteError once more than `allowed` steps in a row were skipped.
        """
        try:
            stats = await trainer.step(batch)
        except NotFiniteError as error:
            self.total += 1
            self.in_a_row += 1
            emit(StepSkipped(batch.step, str(error), str(path)))
            if self.in_a_row > self._allowed:
                message = f"{self.in_a_row} steps in a row were skipped; the last one: {error}"
                hint = f"look at {path}; lower trainer.lr, or start anew from an older checkpoint"
                raise NotFiniteError(message, hint=hint) from error
            return None
        self.in_a_row = 0
        return stats
