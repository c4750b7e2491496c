from pathlib import Path

from swerl.run import history
from swerl.run.events import EvalEnded, StepEnded
from swerl.run.history import EventLog


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
