"""An Episode as a folder: patch, grade, log, exact tokens; `episode.json` is written last."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from swerl.chat import Finish, Message
from swerl.episode import Episode, Status
from swerl.gateway.sessions import TurnRecord
from swerl.grade import Canary, Grade, TestStatus, Verdict
from swerl.rollout.versions import versions_of
from swerl.run.files import disk_errors, read_json, write_bytes, write_json
from swerl.tree import Trajectory
from swerl.turn import RoutedExperts, Turn, WeightChange


def write(folder: Path, episode: Episode) -> None:
    """Write an Episode, in place of one that was there. Raises RunError where the disk refuses."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "episode.json").unlink(missing_ok=True)  # a kill must not mix the two
        (folder / "patch.diff").write_bytes(episode.patch.encode("utf-8", "surrogateescape"))
        (folder / "agent.log").write_text(episode.log, encoding="utf-8", errors="replace")
        if episode.records:
            (folder / "agent.records.jsonl").write_bytes(episode.records)
        (folder / "grade.json").write_bytes(_dump(asdict(episode.grade)))
    write_trajectory(folder, episode.trajectory)
    summary = {
        "id": episode.id,
        "task_id": episode.task_id,
        "status": episode.status,
        "verdict": episode.verdict,
        "reward": episode.reward,
        "turns": len(episode.trajectory.turns),
        "sampled_tokens": episode.trajectory.num_sampled_tokens,
        "lost_tokens": episode.lost_tokens,
        "versions": sorted(versions_of(episode)),
        "timings": dict(episode.timings),
        "error": episode.error,
    }
    write_bytes(folder / "episode.json", _dump(summary))


def write_trajectory(folder: Path, trajectory: Trajectory) -> None:
    """Write a Trajectory in exact tokens. Raises RunError where the disk refuses."""
    write_bytes(folder / "trajectory.json", _dump(asdict(trajectory)))


def is_finished(folder: Path) -> bool:
    """Return whether the folder holds a whole Episode."""
    return (folder / "episode.json").exists()


def read(folder: Path) -> Episode:
    """Read an Episode back. Raises RunError where the folder is damaged."""
    summary = read_json(folder / "episode.json")
    records = folder / "agent.records.jsonl"
    return Episode(
        id=summary["id"],
        task_id=summary["task_id"],
        status=Status(summary["status"]),
        grade=_grade(read_json(folder / "grade.json")),
        reward=summary["reward"],
        trajectory=_trajectory(read_json(folder / "trajectory.json")),
        patch=(folder / "patch.diff").read_bytes().decode("utf-8", "surrogateescape"),
        timings=summary["timings"],
        log=(folder / "agent.log").read_text(encoding="utf-8", errors="replace"),
        records=records.read_bytes() if records.exists() else b"",
        error=summary["error"],
        lost_tokens=summary.get("lost_tokens", 0),
    )


def read_versions(folder: Path) -> tuple[str, ...]:
    """Return the weights that sampled a written Episode. Raises RunError on a damaged folder."""
    return tuple(read_json(folder / "episode.json").get("versions", ()))


def write_transcript(folder: Path, turns: Iterable[TurnRecord]) -> None:
    """Write the conversation as a person reads it: what each Turn heard and said, and after whom.

    Raises RunError where the disk refuses.
    """
    write_json(folder / "transcript.json", [words(record) for record in turns])


def words(record: TurnRecord) -> dict[str, Any]:
    """Return what a Turn heard and said, and after whom, as JSON."""
    return {
        "turn": record.turn.index,
        "parent": record.turn.parent,
        "heard": [_message(message) for message in record.new_messages],
        "said": _message(record.reply.message),
        "finish": record.reply.finish,
        "tokens_in": record.reply.usage.prompt_tokens,
        "tokens_out": record.reply.usage.completion_tokens,
        "duration_s": record.turn.duration_s,
    }


def _message(message: Message) -> dict[str, Any]:
    """Return a message without its empty parts."""
    parts = asdict(message)
    for call in parts["tool_calls"]:
        if not call["is_text"]:
            del call["is_text"]
    return {name: value for name, value in parts.items() if value}


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, default=_as_text)


def _as_text(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _grade(value: dict[str, Any]) -> Grade:
    tests = {name: TestStatus(status) for name, status in value.pop("tests").items()}
    verdict = Verdict(value.pop("verdict"))
    restored = tuple(value.pop("restored"))
    canary = Canary(value.pop("canary"))
    return Grade(verdict=verdict, tests=tests, restored=restored, canary=canary, **value)


def _trajectory(value: dict[str, Any]) -> Trajectory:
    turns = tuple(map(_turn, value.pop("turns")))
    return Trajectory(turns=turns, **value)


def _turn(value: dict[str, Any]) -> Turn:
    for name in ("prompt_ids", "output_ids", "logprobs"):
        value[name] = tuple(value[name])
    changes = tuple(WeightChange(**change) for change in value.pop("weight_changes", ()))
    routed = value.pop("routed", None)
    if routed:
        routed = RoutedExperts(**{**routed, "data": base64.b64decode(routed["data"])})
    finish = Finish(value.pop("finish"))
    return Turn(finish=finish, weight_changes=changes, routed=routed, **value)
