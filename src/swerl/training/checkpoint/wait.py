"""Waits in the controller until a checkpoint is whole, while the ranks do something else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from swerl.core.errors import TrainerError
from swerl.core.learning import CheckpointRef
from swerl.training.checkpoint.folder import take_outcome

_LOOK_S = 0.05
"""Seconds between looks for the first rank's note."""


async def wait_until_whole(parent: Path, step: int, *, lives: Callable[[], bool]) -> CheckpointRef:
    """Return when the checkpoint of a step is whole.

    Raises TrainerError where it could not be written, or where the trainer ended before.
    """
    while True:
        is_alive = lives()
        outcome = take_outcome(parent, step)
        if outcome is None and not is_alive:
            raise TrainerError(
                f"the trainer ended before the checkpoint of step {step} was whole",
                hint="the same command resumes from the one before",
            )
        if outcome is not None:
            break
        await asyncio.sleep(_LOOK_S)
    if outcome.error:
        raise TrainerError(outcome.error, hint=outcome.hint)
    return CheckpointRef(step, outcome.num_bytes, outcome.write_s, outcome.warning)
