"""After a crash other weights may get the names of lost ones: what those sampled goes aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.core.chat import Finish
from swerl.core.episode import Episode, Group, Status
from swerl.core.events import Event, Notice
from swerl.core.grade import Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.core.tree import Trajectory
from swerl.core.turn import Turn, WeightChange
from swerl.recipe.schema import RolloutSection
from swerl.rollout import group, record
from swerl.rollout.versions import Versions
from swerl.runs.layout import Cursor, RunFolder

TASK = Task("t", "r", "host", "/w", "p", GradingSpec("command"))


def episode(name: str, *names: str, verdict: Verdict = Verdict.SOLVED, tokens: int = 2) -> Episode:
    changes = tuple(WeightChange(1, later) for later in names[1:])
    ids, logprobs = (7,) * tokens, (-1.0,) * tokens
    turn = Turn(0, None, (1,), ids, logprobs, Finish.STOP, names[0], weight_changes=changes)
    grade = Grade(verdict)
    return Episode(name, "t", Status.COMPLETED, grade, 1.0, Trajectory("s", (turn,)))


def test_only_untrained_episodes_of_unknown_weights_go_aside(tmp_path: Path) -> None:
    told: list[Event] = []
    sampled = {
        "00001/t.0": ("lost",),  # of a step that is trained
        "00002/t.0": ("a", "b"),
        "00002/t.1": ("a", "lost"),
        "00005/t.0": ("lost",),
        "eval-heldout-00004/t.0": ("a",),
    }
    for name, versions in sampled.items():
        record.write(tmp_path / "episodes" / name, episode(name, *versions))
    run, versions = RunFolder(tmp_path), Versions(["a", "b"])
    cursor = Cursor(next_place=12, under_way=((5, 1),))
    record.move_orphans_aside(run, versions, cursor, 2, told.append)
    left = {f"{path.parent.parent.name}/{path.parent.name}" for path in _written(tmp_path)}
    assert left == set(sampled) - {"00002/t.1", "00005/t.0"}
    aside = {path.parent.name for path in (tmp_path / "undone-01").glob("*/*/episode.json")}
    assert aside == {"t.0", "t.1"}
    assert told == [Notice("moved 2 episodes of lost weights aside, to undone-01")]
    record.move_orphans_aside(run, versions, cursor, 2, told.append)
    assert len(told) == 1


def _written(root: Path) -> list[Path]:
    return list((root / "episodes").glob("*/*/episode.json"))


async def test_tokens_of_attempts_that_machinery_lost_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [episode(f"00000/t.0+{n}", "a", verdict=Verdict.INFRA, tokens=3) for n in range(3)]
    attempts.append(episode("00000/t.0+3", "a", tokens=5))
    record.write(tmp_path / "episodes/00000/t.0", attempts.pop(0))

    async def run(*_: object) -> Episode:
        return attempts.pop(0)

    monkeypatch.setattr(group.episode, "run", run)
    found = await _one(tmp_path)
    assert (found.lost_tokens, found.trajectory.num_sampled_tokens) == (9, 5)
    assert await _one(tmp_path) == found


async def _one(root: Path) -> Episode:
    class Slot:
        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *_: object) -> None: ...

    class Some:
        rollout = RolloutSection(refills=3)
        spool = None
        provisioner = type("Provisioner", (), {"slot": Slot()})

    found: Group = await group.run_one(TASK, "00000", Some(), size=1, folder=RunFolder(root))  # type: ignore[arg-type]  # what it uses of Parts
    return found.episodes[0]
