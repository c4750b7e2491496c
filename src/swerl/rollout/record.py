"""An Episode as a folder: patch, grade, log, exact tokens; `episode.json` is written last.

Recorded experts have a file of their own, which `trajectory.json` names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from swerl.core import experts
from swerl.core.chat import Finish, Message
from swerl.core.contracts import Family
from swerl.core.episode import Episode, Status
from swerl.core.errors import RunError
from swerl.core.events import Emit, Notice
from swerl.core.files import disk_errors, read_json, write_bytes, write_json
from swerl.core.grade import Confirmation, Grade, TestStatus, Verdict
from swerl.core.turn import RoutedExperts, StoredBytes, Trajectory, Turn, WeightChange
from swerl.gateway.conversation import TurnRecord
from swerl.rollout.versions import Versions
from swerl.runs import index
from swerl.runs.layout import Cursor, RunFolder, make_aside

TASK = "task.json"
"""The Task of an Episode outside of a run."""
_EVALUATION = "eval-"
"""Prefix of the stages of evaluations during training, whose Tasks must not be trained on."""


def write(folder: Path, episode: Episode) -> Episode:
    """Write an Episode over an earlier one; return it with its experts on disk. Raises RunError."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "episode.json").unlink(missing_ok=True)  # A kill must not mix the two.
        # A patch holds the bytes of any file, not only UTF-8.
        (folder / "patch.diff").write_bytes(episode.patch.encode("utf-8", "surrogateescape"))
        (folder / "agent.log").write_text(episode.log, encoding="utf-8", errors="replace")
        if episode.records:
            (folder / "agent.records.jsonl").write_bytes(episode.records)
        (folder / "grade.json").write_bytes(_dump(asdict(episode.grade)))
    # After the Grade and before the summary: `episode.json` marks a complete folder.
    trajectory = write_trajectory(folder, episode.trajectory)
    summary = {
        "id": episode.id,
        "task_id": episode.task_id,
        "agent": episode.agent,
        "status": episode.status,
        "verdict": episode.verdict,
        "reward": episode.reward,
        "turns": len(episode.trajectory.turns),
        "sampled_tokens": episode.trajectory.num_sampled_tokens,
        "malformed_calls": sum(turn.malformed_calls for turn in episode.trajectory.turns),
        "lost_tokens": episode.lost_tokens,
        "num_left": episode.num_left,
        "versions": sorted(episode.trajectory.versions),
        "tools": episode.trajectory.tools,
        "timings": dict(episode.timings),
        "error": episode.error,
    }
    write_bytes(folder / "episode.json", _dump(summary))
    return replace(episode, trajectory=trajectory)


def write_trajectory(folder: Path, trajectory: Trajectory) -> Trajectory:
    """Write a Trajectory, its experts first; return it with those on disk. Raises RunError."""
    stored = _with_stored_experts(folder / experts.NAME, trajectory)
    write_bytes(folder / "trajectory.json", _dump(stored))
    return stored


def _with_stored_experts(path: Path, trajectory: Trajectory) -> Trajectory:
    recorded = [turn for turn in trajectory.turns if turn.routed]
    if not recorded and not os.path.lexists(path):
        return trajectory
    stored = experts.store(path, [turn.routed for turn in recorded if turn.routed])
    by_turn = {turn.index: piece for turn, piece in zip(recorded, stored, strict=True)}
    turns = (replace(turn, routed=by_turn.get(turn.index)) for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def trained_attempts(run: index.FoundRun) -> Iterator[tuple[str, index.Attempt, Path]]:
    """Yield stage, summary and folder of each attempt, without evaluations during training."""
    for stage in run.stages():
        if stage.startswith(_EVALUATION):
            continue
        folder = run.stage(stage)
        names = [name for names in index.groups(folder).values() for name in names]
        for attempt in index.read_attempts(folder, names):
            yield stage, attempt, run.episode(stage, attempt.name)


def is_finished(folder: Path) -> bool:
    return (folder / "episode.json").exists()


def read(folder: Path) -> Episode:
    """Read an Episode back. Raises RunError on a damaged folder."""
    with _damaged(folder):
        return _read(folder)


def read_trajectory(folder: Path) -> Trajectory:
    """Read only the Trajectory of an Episode or a served session. Raises RunError."""
    with _damaged(folder):
        return _trajectory(read_json(folder / "trajectory.json"), folder)


def read_grade(folder: Path) -> Grade:
    """Read only an Episode's Grade. Raises RunError."""
    with _damaged(folder):
        return _grade(read_json(folder / "grade.json"))


@contextmanager
def _damaged(folder: Path) -> Iterator[None]:
    """Turn an error in an Episode's files into a RunError that costs only this Episode."""
    try:
        yield
    except (RunError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        hint = f"delete {folder}; the same command attempts the task again"
        raise RunError(f"the episode {folder} is damaged: {error}", hint=hint) from error


def _read(folder: Path) -> Episode:
    summary = read_json(folder / "episode.json")
    records = folder / "agent.records.jsonl"
    return Episode(
        id=summary["id"],
        task_id=summary["task_id"],
        status=Status(summary["status"]),
        grade=_grade(read_json(folder / "grade.json")),
        reward=summary["reward"],
        trajectory=_trajectory(read_json(folder / "trajectory.json"), folder),
        patch=(folder / "patch.diff").read_bytes().decode("utf-8", "surrogateescape"),
        timings=summary["timings"],
        log=(folder / "agent.log").read_text(encoding="utf-8", errors="replace"),
        records=records.read_bytes() if records.exists() else b"",
        error=summary["error"],
        lost_tokens=summary["lost_tokens"],
        num_left=summary["num_left"],
        agent=summary["agent"],
    )


def move_orphans_aside(
    run: RunFolder, versions: Versions, cursor: Cursor, groups_per_step: int, emit: Emit
) -> None:
    """Move orphaned Episodes aside: those sampled by weights that a crash lost.

    After a crash an asynchronous run continues from its committed step, where other Groups may
    finish first. It then makes different weights under the names of the lost ones, so orphans
    must leave before a name is used again. Looks at the stages of Groups that are not trained.
    Raises RunError.
    """
    # No Group before the first untrained position can be sampled again.
    positions = (cursor.next_place, *(position for position, _ in cursor.under_way))
    first_stage = min(positions) // groups_per_step

    def is_lost(names: Iterable[str]) -> bool:
        # Weights of an uncommitted step are not among the known versions.
        return any(versions.number(name) is None for name in names)

    orphans = []
    for path in _since(run.root, first_stage):
        if is_finished(path) and is_lost(read_versions(path)):
            orphans.append(path)
    if not orphans:
        return
    aside = make_aside(run.root)
    for path in orphans:
        target = aside / path.parent.name / path.name
        with disk_errors(target):
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
    emit(Notice(f"moved {len(orphans)} episodes of lost weights aside, to {aside.name}"))


def _since(root: Path, first_stage: int) -> Iterator[Path]:
    """Yield the Episodes of stages from this one on."""
    for stage in sorted((root / "episodes").iterdir()):
        if stage.name.isdecimal() and int(stage.name) >= first_stage:
            yield from sorted(stage.iterdir())


def read_versions(folder: Path) -> tuple[str, ...]:
    """Return the weights that sampled a written Episode. Raises RunError on a damaged folder."""
    return tuple(read_json(folder / "episode.json").get("versions", ()))


def write_transcript(folder: Path, turns: Iterable[TurnRecord], family: Family) -> None:
    """Write the conversation as readable text, Turn by Turn. Raises RunError."""
    write_json(folder / "transcript.json", [transcript_turn(turn, family) for turn in turns])


def transcript_turn(record: TurnRecord, family: Family) -> dict[str, Any]:
    """Return a Turn's new prompt, its reply and its parent as JSON; numbers begin at 1, as shown.

    The prompt is decoded from the rendered tokens, because a chat template may leave messages out.
    The messages stand in its place if the engine takes no tokens.
    """
    turn = record.turn
    return {
        "turn": turn.index + 1,
        "parent": None if turn.parent is None else turn.parent + 1,
        "prompt": family.text(turn.prompt_ids)
        if turn.trainable
        else [_message(message) for message in record.new_messages],
        "said": _message(record.reply.message),
        "finish": record.reply.finish,
        "tokens_in": record.reply.usage.prompt_tokens,
        "tokens_out": record.reply.usage.completion_tokens,
        "duration_s": turn.duration_s,
    }


def _message(message: Message) -> dict[str, Any]:
    """Return a message without its empty parts."""
    parts = asdict(message)
    for call in parts["tool_calls"]:
        # The filter below removes empty parts of the message only, not those of its calls.
        if not call["is_text"]:
            del call["is_text"]
    return {name: value for name, value in parts.items() if value}


def _dump(value: Any) -> bytes:
    try:
        return orjson.dumps(value, default=_plain)
    except TypeError:
        return orjson.dumps(_valid(value), default=_plain)


def _valid(value: Any) -> Any:
    """Return a value whose texts JSON can hold: names of files are any bytes, not only UTF-8."""
    if is_dataclass(value) and not isinstance(value, type):
        return _valid(asdict(value))
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_valid(key): _valid(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(item) for item in value]
    return value


def _plain(value: object) -> Any:
    """Convert a value that JSON lacks; a file of experts is in the Episode's own folder."""
    return value.name if isinstance(value, Path) else str(value)


def _grade(value: dict[str, Any]) -> Grade:
    return Grade(
        verdict=Verdict(value.pop("verdict")),
        tests={name: TestStatus(status) for name, status in value.pop("tests").items()},
        restored=tuple(value.pop("restored")),
        confirmation=Confirmation(value.pop("confirmation")),
        flags=tuple(value.pop("flags")),
        **value,
    )


def _trajectory(value: dict[str, Any], folder: Path) -> Trajectory:
    turns = tuple(_turn(turn, folder) for turn in value.pop("turns"))
    experts.check([turn.routed for turn in turns if turn.routed])
    return Trajectory(turns=turns, **value)


def _turn(value: dict[str, Any], folder: Path) -> Turn:
    for name in ("prompt_ids", "output_ids", "logprobs"):
        value[name] = tuple(value[name])
    changes = tuple(WeightChange(**change) for change in value.pop("weight_changes", ()))
    routed = value.pop("routed", None)
    finish = Finish(value.pop("finish"))
    if routed:
        # A file name is relative to the Episode's folder, so a run folder can be moved.
        data = routed.pop("data")
        stored = StoredBytes(**{**data, "file": folder / data["file"]})
        routed = RoutedExperts(data=stored, **routed)
    # Another release may have recorded more.
    known = {part.name: value[part.name] for part in fields(Turn) if part.name in value}
    return Turn(finish=finish, weight_changes=changes, routed=routed, **known)
