from __future__ import annotations

from pathlib import Path

from swerl.run import prompts
from swerl.run.prompts import Entry, Fate


def line(step: int, stage: str, fate: Fate = Fate.TRAINED) -> Entry:
    return Entry(step, "task", stage, fate, ("000001",), (5, 7), (True, False))


def test_steps_that_were_never_committed_are_passed_over_and_later_lines_count(
    tmp_path: Path,
) -> None:
    path = tmp_path / "prompts.jsonl"
    assert prompts.read(path, steps=9) == []
    prompts.append(path, [line(0, "00000"), line(1, "00001", Fate.SKIPPED)])
    with path.open("a") as file:
        file.write('{"step": 1, "ta')
    prompts.append(path, [line(1, "00001")])
    assert prompts.read(path, steps=2) == [line(0, "00000"), line(1, "00001")]
    assert prompts.read(path, steps=1) == [line(0, "00000")]
