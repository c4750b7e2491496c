"""Going back to an earlier checkpoint: the state of then, later Episodes aside, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.core.errors import InputError, RunError
from swerl.runs.layout import Cursor, RunFolder, State, open_run, rewind


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of three steps, whose checkpoints 2 and 3 are there."""
    root = tmp_path / "run"
    with open_run(root, {"name": "run"}) as folder:
        for step in (2, 3):
            (folder.checkpoints / f"{step:05d}").mkdir()
            evals = tuple(f"eval-heldout-{n:05d}" for n in range(step + 1))
            cursor = Cursor(next_place=step * 8)
            folder.write_state(State(step, step == 3, evals, ("000000",) * step, cursor))
        for name in ("00001", "00002", "00003", "eval-heldout-00002", "eval-heldout-00003"):
            (root / "episodes" / name / "task.0").mkdir(parents=True)
    return root


def test_the_state_of_the_step_comes_back_and_later_episodes_move_aside(root: Path) -> None:
    (root / "prompts.jsonl").write_text("lines\n")
    aside = rewind(root, 2)
    state = RunFolder(root).read_state()
    assert (state.step, state.finished, state.cursor.next_place) == (2, False, 16)
    assert state.evals_done[-1] == "eval-heldout-00002"
    assert aside is not None
    names = {"00003", "eval-heldout-00003", "prompts.jsonl"}
    assert {path.name for path in aside.iterdir()} == names
    assert (aside / "00003" / "task.0").is_dir()
    left = {path.name for path in (root / "episodes").iterdir()}
    assert left == {"00001", "00002", "eval-heldout-00002"}
    assert rewind(root, 2) is None
    assert RunFolder(root).read_state() == state


def test_a_step_without_a_checkpoint_is_refused_with_those_that_have_one(root: Path) -> None:
    before = RunFolder(root).read_state()
    with pytest.raises(InputError, match="no checkpoint of step 1") as error:
        rewind(root, 1)
    assert "2, 3" in error.value.hint
    assert RunFolder(root).read_state() == before


def test_a_run_at_work_is_left_alone(root: Path) -> None:
    with open_run(root, {"name": "run"}), pytest.raises(RunError, match="another process"):
        rewind(root, 2)
