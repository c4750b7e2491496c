from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerl.core import experts
from swerl.core.chat import Finish
from swerl.core.episode import Episode, Group, Status
from swerl.core.events import Event, Notice
from swerl.core.grade import Confirmation, Grade, TestStatus, Verdict
from swerl.core.task import Task
from swerl.core.turn import RoutedExperts, Trajectory, Turn, WeightChange
from swerl.rollout import group, record
from swerl.rollout.versions import Versions
from swerl.runs.layout import Cursor, RunFolder
from tests.unit import made


def _episode(patch: str, logprob: float) -> Episode:
    first = Turn(0, None, (1, 2, 3), (4, 5), (logprob, -0.5), Finish.TOOL_CALLS, "v1", 0.1, 0.2)
    second = Turn(1, 0, (6,), (7,), (-1.0,), Finish.STOP, "v1", malformed_calls=1)
    routed = RoutedExperts(start=4, num_layers=2, top_k=1, bytes_per_id=1, data=b"\x00\xff\x80\x01")
    second = replace(second, weight_changes=(WeightChange(0, "v2"),), routed=routed)
    tests = {"a": TestStatus.PASSED, "b": TestStatus.MISSING}
    return Episode(
        id="00001/t.0",
        task_id="t",
        status=Status.COMPLETED,
        grade=Grade(
            Verdict.SOLVED, "ok", tests, ("conftest.py",), duration_s=1.5, test_s=1.0, log="log"
        ),
        reward=1.0,
        trajectory=Trajectory("00001/t.0", (first, second), {"aborted": 3}),
        patch=patch,
        timings={"boot": 0.01, "total": 2.0},
        log="said",
        records=b'{"n": 1}\n\xff',
        lost_tokens=17,
    )


@given(
    patch=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"))
    | st.just(b"\xff\x00patch\xfe".decode("utf-8", "surrogateescape")),
    logprob=st.floats(max_value=0, allow_nan=False, allow_infinity=False),
)
def test_an_episode_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, patch: str, logprob: float
) -> None:
    """Also where its folder is moved to; a binary patch keeps its bytes."""
    folder = tmp_path_factory.mktemp("episode")
    episode = _episode(patch, logprob)
    assert not record.is_finished(folder)
    written = record.write(folder, episode)
    assert record.is_finished(folder)
    assert record.read(folder) == written
    moved = folder.rename(folder.with_name(f"{folder.name}-moved"))
    assert _in_memory(record.read(moved)) == episode
    assert (moved / "patch.diff").read_bytes() == patch.encode("utf-8", "surrogateescape")
    assert (moved / "experts.bin").read_bytes() == b"\x00\xff\x80\x01"


def _in_memory(episode: Episode) -> Episode:
    """Return an Episode whose experts are read from its folder."""
    turns = list(episode.trajectory.turns)
    for place, turn in enumerate(turns):
        if turn.routed:
            [data] = experts.read([turn.routed])
            turns[place] = replace(turn, routed=replace(turn.routed, data=bytes(data)))
    return replace(episode, trajectory=replace(episode.trajectory, turns=tuple(turns)))


def test_an_episode_killed_while_it_replaces_another_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back, it would have the grade of the one and the reward of the other."""
    record.write(tmp_path, _episode("", -1.0))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(record, "write_trajectory", killed)
    with pytest.raises(KeyboardInterrupt):
        record.write(tmp_path, _episode("other", -2.0))
    assert not record.is_finished(tmp_path)


def test_the_versions_of_an_episode_are_read_without_its_tokens(tmp_path: Path) -> None:
    record.write(tmp_path, _episode("", -1.0))
    (tmp_path / "trajectory.json").unlink()
    assert record.read_versions(tmp_path) == ("v1", "v2")


def episode(name: str, *names: str, verdict: str = "solved", tokens: int = 2) -> Episode:
    changes = tuple(WeightChange(1, later) for later in names[1:])
    turn = made.turn(output=(7,) * tokens, version=names[0], weight_changes=changes)
    return made.episode(name, turn, verdict=verdict, reward=1.0)


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
    paths = (tmp_path / "episodes").glob("*/*/episode.json")
    left = {f"{path.parent.parent.name}/{path.parent.name}" for path in paths}
    assert left == set(sampled) - {"00002/t.1", "00005/t.0"}
    aside = {path.parent.name for path in (tmp_path / "undone-01").glob("*/*/episode.json")}
    assert aside == {"t.0", "t.1"}
    assert told == [Notice("moved 2 episodes of lost weights aside, to undone-01")]
    record.move_orphans_aside(run, versions, cursor, 2, told.append)
    assert len(told) == 1


async def test_tokens_of_attempts_lost_to_infrastructure_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [episode(f"00000/t.0+{n}", "a", verdict="infra", tokens=3) for n in range(3)]
    attempts.append(episode("00000/t.0+3", "a", tokens=5))
    record.write(tmp_path / "episodes/00000/t.0", attempts.pop(0))

    async def run(*_: object, **__: object) -> Episode:
        return attempts.pop(0)

    monkeypatch.setattr(group.episode, "run", run)
    found = await _one(tmp_path)
    assert (found.lost_tokens, found.trajectory.num_sampled_tokens) == (9, 5)
    assert await _one(tmp_path) == found


async def _one(root: Path) -> Episode:
    return (await _group(root, size=1)).episodes[0]


async def _group(root: Path, *, size: int) -> Group:
    class Slot:
        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *_: object) -> None: ...

    pool: Any = type("Pool", (), {"slot": Slot()})
    parts = made.parts(sandboxes=pool)
    return await group.run_one(made.task("t"), "00000", parts, size=size, folder=RunFolder(root))


async def test_a_group_with_a_forgery_is_confirmed_whole_before_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {
        "0": (Verdict.CHEAT, Confirmation.FORGED),
        "1": (Verdict.SOLVED, Confirmation.NONE),
        "2": (Verdict.SOLVED, Confirmation.REAL),
        "3": (Verdict.UNSOLVED, Confirmation.NONE),
    }

    async def run(task: Task, name: str, *_: object, **__: object) -> Episode:
        verdict, confirmation = results[name[-1]]
        grade = Grade(verdict, confirmation=confirmation)
        return replace(episode(name, "v1", verdict=verdict), grade=grade, id=f"{name}+1")

    async def confirm(earlier: Episode, *_: object) -> Episode:
        return replace(earlier, grade=Grade(Verdict.CHEAT, confirmation=Confirmation.FORGED))

    monkeypatch.setattr(group.episode, "run", run)
    monkeypatch.setattr(group.episode, "confirm", confirm)
    found = await _group(tmp_path, size=4)
    assert [e.verdict.value for e in found.episodes] == ["cheat", "cheat", "solved", "unsolved"]
    assert await _group(tmp_path, size=4) == found
