"""Sets a run back to the checkpoint of an earlier step, and loses nothing of what came after.

Every checkpoint keeps the run's state of its step: the data's cursor, the weight versions, which
evaluations were done. Episodes that later weights sampled are moved aside, so that none is taken
for one of the weights to come.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from swerl.core.errors import InputError
from swerl.core.files import disk_errors, read_json
from swerl.runs.aside import make_aside
from swerl.runs.layout import RunFolder, open_run


def rewind(root: Path, step: int) -> Path | None:
    """Set a run back; return the folder of what was moved aside, None where there was nothing.

    Raises InputError where the step has no checkpoint with the run's state, RunError where a
    process is at work in the run.
    """
    with open_run(root, read_json(root / "recipe.resolved.json")) as run:
        if not run.state_of(step).is_file():
            there = ", ".join(str(found) for found in _steps(run)) or "none"
            raise InputError(
                f"{root} has no checkpoint of step {step} to go back to",
                hint=f"steps that have one: {there}",
            )
        state = replace(run.read_state(step), finished=False)
        aside = _move_aside(run, step)
        run.write_state(state)
    return aside


def _steps(run: RunFolder) -> list[int]:
    found = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    named = (int(path.name) for path in found if path.name.isdecimal())
    return sorted(step for step in named if run.state_of(step).is_file())


def _move_aside(run: RunFolder, step: int) -> Path | None:
    later = list(_later(run.root / "episodes", step))
    if not later:
        return None
    aside = make_aside(run.root)
    with disk_errors(aside):
        for folder in later:
            folder.rename(aside / folder.name)
        if run.prompts.exists():
            shutil.copyfile(run.prompts, aside / run.prompts.name)
    return aside


def _later(episodes: Path, step: int) -> Iterator[Path]:
    """Yield the folders of later steps and evaluations: `00012`, `eval-heldout-00012`."""
    for folder in episodes.iterdir():
        number = folder.name.rpartition("-")[2]
        if number.isdecimal() and int(number) > step:
            yield folder
