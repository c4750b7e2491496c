from pathlib import Path

import pytest

from swerl.core.errors import RunError
from swerl.core.events import EvalEnded, PhaseStarted, Progress, StepEnded
from swerl.runs import history
from swerl.runs.history import EventLog, read


def test_a_step_done_twice_counts_once_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log(StepEnded(0, {"reward": 0.1}))
        log(StepEnded(1, {"reward": 0.2}))
    with path.open("a") as file:
        file.write('{"event": "StepEn\n')
    with EventLog(path) as log:
        log(StepEnded(1, {"reward": 0.3}))
        log(EvalEnded(2, "heldout", 0.5, 10))
    past = history.read(path)
    assert past.series("reward") == [0.1, 0.3]
    assert past.evals == {"heldout": [(2, 0.5)]}


def test_an_unfinished_last_line_stays_the_only_lost_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log(StepEnded(0, {"reward": 0.1}))
        log(StepEnded(1, {"reward": 0.2}))
    path.write_bytes(path.read_bytes()[:-20])
    reader = history.HistoryReader(path)
    assert reader.read().series("reward") == [0.1]
    for reward in (0.3, 0.4):
        with EventLog(path) as log:
            log(StepEnded(2, {"reward": reward}))
    assert reader.read().series("reward") == read(path).series("reward") == [0.1, 0.4]
    assert len(path.read_text().splitlines()) == 4
    assert [event["step"] for event in history.read_events(path)] == [0, 2, 2]


def test_progress_events_are_flushed_at_once(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log(Progress("starting", 0, 1))
        assert "starting" in (tmp_path / "events.jsonl").read_text()


def test_a_full_disk_is_one_error_and_hides_no_other() -> None:
    full = Path("/dev/full")
    with pytest.raises(RunError, match="No space left"), EventLog(full) as log:
        log(PhaseStarted("e", "agent"))
    with pytest.raises(KeyError), EventLog(full) as log:
        log(PhaseStarted("e", "agent"))
        raise KeyError


def test_solve_rates_by_agent_are_a_matrix_with_those_held_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for step in range(12):
            # Not every step has a Group of each agent.
            rates = {"solve_rate/a": step / 10} | ({"solve_rate/b": 0.5} if step % 2 else {})
            log(StepEnded(step, rates))
        for step, rate in ((0, 0.1), (12, 0.7)):
            log(EvalEnded(step, "heldout", rate, 4, agent="a"))
            log(EvalEnded(step, "heldout", rate / 2, 4, agent="held"))
            log(EvalEnded(step, "alone", rate, 4))
    found = read(path).by_agent()
    assert found == {
        "train": {"a": (pytest.approx(0.2), pytest.approx(0.9)), "b": (0.5, 0.5)},
        "heldout": {"a": (0.1, 0.7), "held": (0.05, 0.35)},
    }
