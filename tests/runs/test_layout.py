import errno
import json
from pathlib import Path

import pytest

from swerl.core.errors import RunError
from swerl.core.files import disk_errors, read_json, write_json
from swerl.runs.layout import State, open_run


def test_a_new_run_starts_at_step_zero_and_remembers_its_state(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {"steps": 3}) as folder:
        assert folder.read_state() == State()
        folder.write_state(State(step=2, evals_done=("eval-heldout-00000",)))
    with open_run(tmp_path / "run", {"steps": 3}) as folder:
        assert folder.read_state() == State(2, False, ("eval-heldout-00000",))


def test_another_recipe_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {"steps": 3, "trainer": {"lr": 1.0, "ranks": 1}}):
        pass
    with (
        pytest.raises(RunError) as caught,
        open_run(tmp_path / "run", {"steps": 3, "trainer": {"lr": 2.0, "ranks": 1}}),
    ):
        pass
    assert "trainer.lr (1.0 -> 2.0)" in str(caught.value)
    assert "ranks" not in str(caught.value)


def test_what_changes_nothing_that_is_learned_may_differ(tmp_path: Path) -> None:
    for restarts in (0, 3):
        recipe = {"trainer": {"lr": 1.0, "restarts": restarts, "recompute": bool(restarts)}}
        with open_run(tmp_path / "run", recipe):
            pass
    assert read_json(tmp_path / "run" / "recipe.resolved.json") == recipe


def test_a_run_folder_serves_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        open_run(tmp_path / "run", {}),
        pytest.raises(RunError, match="another process"),
        open_run(tmp_path / "run", {}),
    ):
        pass


def test_a_lock_that_may_not_be_opened_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "run" / "lock").mkdir(parents=True)
    with pytest.raises(RunError, match=r"cannot write .*lock"), open_run(tmp_path / "run", {}):
        pass


def test_a_damaged_state_says_what_to_do(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as folder:
        (folder.root / "state.json").write_text('{"step": ')
        with pytest.raises(RunError) as caught:
            folder.read_state()
    assert "delete the run folder" in caught.value.hint


def test_each_start_gets_a_log_folder_of_its_own(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as folder:
        assert folder.new_attempt().name == "attempt-01"
        assert folder.new_attempt().name == "attempt-02"
        (folder.root / "logs" / "attempt-01").rmdir()
        assert folder.new_attempt().name == "attempt-03"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(RunError):
        write_json(tmp_path / "no-such-folder" / "value.json", {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_error_that_says_the_run_resumes(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught, disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "No space left" in str(caught.value)
    assert "resumes" in caught.value.hint
