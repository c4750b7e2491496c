from __future__ import annotations

from pathlib import Path

from swerl.runs import prompts
from swerl.runs.prompts import Fate, GroupEntry


def line(step: int, stage: str, fate: Fate = Fate.TRAINED) -> GroupEntry:
    return GroupEntry(step, "task", stage, fate, ("000001",), (5, 7), (True, False))


def test_steps_that_were_never_committed_are_cut_off_for_good(tmp_path: Path) -> None:
    """A later start has committed other steps of those numbers; the lost ones must not count."""
    path = tmp_path / "prompts.jsonl"
    assert prompts.cut(path, steps=9) == []
    prompts.append(path, [line(0, "00000"), line(1, "00001", Fate.SKIPPED), line(2, "00005")])
    with path.open("a") as file:
        file.write('{"step": 1, "ta')
    assert prompts.cut(path, steps=1) == [line(0, "00000")]
    prompts.append(path, [line(1, "00001"), line(2, "00002")])
    whole = [line(0, "00000"), line(1, "00001"), line(2, "00002")]
    assert prompts.cut(path, steps=3) == whole
    assert len(path.read_text().splitlines()) == 3


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"step": 0, "ta')
    prompts.append(path, [line(0, "00000")])
    assert prompts.cut(path, steps=1) == [line(0, "00000")]
