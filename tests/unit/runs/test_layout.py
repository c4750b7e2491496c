from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from swerl.core.errors import InputError, RecipeError, RunError
from swerl.core.files import disk_errors, read_json, write_json
from swerl.recipe.schema import Recipe
from swerl.runs.layout import Cursor, RunFolder, RunState, open_run, rewind


def test_a_new_run_starts_at_step_zero_and_remembers_its_state(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {"steps": 3}) as folder:
        assert folder.read_state() == RunState()
        folder.write_state(RunState(step=2, evals_done=("eval-heldout-00000",)))
    with open_run(tmp_path / "run", {"steps": 3}) as folder:
        assert folder.read_state() == RunState(2, False, ("eval-heldout-00000",))
        # Each start has a log folder of its own.
        assert folder.new_attempt().name == "attempt-01"
        assert folder.new_attempt().name == "attempt-02"
        (folder.root / "logs" / "attempt-01").rmdir()
        assert folder.new_attempt().name == "attempt-03"


def recipe(changes: dict[str, object] | None = None) -> dict[str, object]:
    """Return a complete recipe with a few keys set."""
    value = Recipe(name="r", steps=3).model_dump(mode="json")
    for key, new in (changes or {}).items():
        *sections, name = key.split(".")
        part = value
        for section in sections:
            part = part[section]
        part[name] = new
    return value


def reopen(root: Path, changes: dict[str, object]) -> tuple[str, ...]:
    """Open a run that has Episodes, then again with changed keys; return the noted changes."""
    with open_run(root, recipe()) as folder:
        folder.episode("00000", "t.0").mkdir(parents=True)
    with open_run(root, recipe(changes)) as folder:
        return folder.changes


@pytest.mark.parametrize(
    ("key", "new"),
    [
        *(("steps", 9), ("trainer.lr", 2.0), ("trainer.ranks", 2), ("trainer.tensor_parallel", 2)),
        *(("trainer.save_every", 2), ("limits.num_cpus", 2.0), ("metrics.project", "p")),
        *(("budgets.agent_s", 9.0), ("cluster.nodes", 2)),
        *(("cost.max_dollars", 9.0), ("engine.threads", 9)),
    ],
)
def test_what_does_not_change_the_meaning_may_change_and_is_noted(
    tmp_path: Path, key: str, new: object
) -> None:
    [change] = reopen(tmp_path / "run", {key: new})
    assert change.startswith(f"{key} (")
    assert change.endswith(f" -> {new!r})")
    assert read_json(tmp_path / "run" / "recipe.resolved.json") == recipe({key: new})


@pytest.mark.parametrize(
    ("key", "new"),
    [
        *(("tasks.source", "other.jsonl"), ("model.path", "m"), ("algorithm.type", "grpo")),
        *(("seed", 7), ("trainer.lora.rank", 8), ("trainer.dtype", "bf16"), ("harness.type", "h")),
        *(("rollout.temperature", 0.5), ("rollout.episodes_per_group", 4), ("engine.type", "e")),
    ],
)
def test_what_changes_the_meaning_is_refused_with_both_values(
    tmp_path: Path, key: str, new: object
) -> None:
    with pytest.raises(RecipeError, match=rf"{key} \(.* -> {new!r}\)"):
        reopen(tmp_path / "run", {key: new, "trainer.ranks": 2})
    assert read_json(tmp_path / "run" / "recipe.resolved.json") == recipe()


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", recipe()) as folder:
        folder.episode("00000", "t.0").mkdir(parents=True)
        folder.write_state(RunState(step=2))
    with (
        pytest.raises(RecipeError, match="steps = 1, but"),
        open_run(tmp_path / "run", recipe({"steps": 1})),
    ):
        pass


def test_a_folder_without_results_takes_any_recipe(tmp_path: Path) -> None:
    """An error at the start may advise any key."""
    for seed in (0, 1):
        with open_run(tmp_path / "run", recipe({"seed": seed})):
            pass


def test_a_run_of_a_release_without_some_keys_goes_on(tmp_path: Path) -> None:
    older = recipe()
    del older["trainer"]["dtype"]
    for each in (older, recipe()):
        with open_run(tmp_path / "run", each) as folder:
            folder.episode("00000", "t.0").mkdir(parents=True, exist_ok=True)
    changed = recipe({"trainer.dtype": "bf16"})
    with pytest.raises(RecipeError, match="dtype"), open_run(tmp_path / "run", changed):
        pass


def test_a_lock_that_may_not_be_opened_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "run" / "lock").mkdir(parents=True)
    with pytest.raises(RunError, match=r"cannot write .*lock"), open_run(tmp_path / "run", {}):
        pass


def test_a_damaged_state_is_rebuilt_from_the_newest_checkpoint(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as folder:
        for step in (1, 2):
            folder.state_of(step).parent.mkdir()
            folder.write_state(RunState(step=step, evals_done=("eval-heldout-00000",)))
        (folder.root / "state.json").write_text('{"step": ')
        assert folder.read_state() == RunState(2, False, ("eval-heldout-00000",))
        folder.state_of(2).write_text("[]")
        assert folder.read_state().step == 1


def test_a_damaged_state_without_a_checkpoint_is_that_of_a_new_run(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as folder:
        (folder.root / "state.json").write_text('{"step": ')
        assert folder.read_state() == RunState()
        folder.samples(0).write_bytes(b"")
        with pytest.raises(RunError, match="cannot read") as caught:
            folder.read_state()
    assert "delete" not in caught.value.hint


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(RunError):
        write_json(tmp_path / "no-such-folder" / "value.json", {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_error_with_a_hint_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught, disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "No space left" in str(caught.value)
    assert "resumes" in caught.value.hint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of three steps, whose checkpoints 2 and 3 are there."""
    root = tmp_path / "run"
    with open_run(root, {"name": "run"}) as folder:
        for step in (2, 3):
            (folder.checkpoints / f"{step:05d}").mkdir()
            evals = tuple(f"eval-heldout-{n:05d}" for n in range(step + 1))
            cursor = Cursor(next_place=step * 8)
            folder.write_state(RunState(step, step == 3, evals, ("000000",) * step, cursor))
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
