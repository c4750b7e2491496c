"""An Episode as a folder: patch, grade, log, exact tokens; `episode.json` is written last.

Recorded experts have a file of their own, which `trajectory.json` names. `turns.jsonl` grows by a
line a Turn while the agent works.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from swerl.core import experts
from swerl.core.chat import ChatReply, Finish, Message, Role, Tool, ToolCall
from swerl.core.contracts import Family
from swerl.core.episode import Episode, Fork, Status
from swerl.core.errors import InputError, RunError
from swerl.core.events import Emit, Notice
from swerl.core.files import disk_errors, read_json, write_bytes, write_json
from swerl.core.grade import Confirmation, Grade, TestStatus, Verdict
from swerl.core.task import Task, from_row
from swerl.core.turn import RoutedExperts, StoredBytes, Trajectory, Turn, WeightChange
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.replay import RecordedTurn, recorded_turns
from swerl.recipe.sections import INITIAL_MODEL
from swerl.rollout.versions import Versions
from swerl.runs import index
from swerl.runs.layout import Cursor, RunFolder, make_aside

TURNS = "turns.jsonl"
_NEXT_TURNS = "turns.next.jsonl"
TASK, RECIPE = "task.json", "recipe.json"
"""Files of an Episode outside of a run, from which it can be continued."""
_CARRIED = ("harness", "sandbox", "limits", "budgets", "rollout", "gateway")
"""Sections of a recipe that decide what an agent does and sends."""
_OF_SEVERAL = ("name", "weight", "held_out")
"""Keys of an agent among several; a single agent does not have them."""
_EVALUATION = "eval-"
"""Prefix of the stages of evaluations during training, whose Tasks must not be trained on."""
_RUN_DEPTH = 4
"""Folders from an Episode up to its run."""


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
    if episode.fork:
        summary["fork"] = asdict(episode.fork)
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


class TurnLog:
    """Keeps the Turns of a running Episode, so that it can go on after a crash.

    A Session that repeats recorded Turns delivers them again, in another order perhaps. They go to
    a second file, which replaces the first one once it holds more.
    """

    def __init__(self, folder: Path) -> None:
        """Read the Turns that a crash left; a damaged file counts as none. Raises RunError."""
        self._folder = folder
        self._num_turns = 0
        self.recorded: tuple[RecordedTurn, ...] = ()
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if (folder / TURNS).exists():
            with suppress(RunError):
                self.recorded = read_turns(folder)
        if self.recorded:
            (folder / _NEXT_TURNS).unlink(missing_ok=True)
        else:
            self.clear()

    def __call__(self, record: TurnRecord) -> None:
        """Append a Turn."""
        append_turn(self._folder, record, name=_NEXT_TURNS if self.recorded else TURNS)
        self._num_turns += 1
        if self.recorded and self._num_turns > len(self.recorded):
            (self._folder / _NEXT_TURNS).replace(self._folder / TURNS)
            self.recorded = ()

    def reopened(self) -> TurnLog:
        """Return a log that continues after the Turns written so far. Raises RunError."""
        return TurnLog(self._folder)

    def clear(self) -> None:
        """Remove the files: the Episode is written, or another attempt begins."""
        self.recorded = ()
        for name in (TURNS, _NEXT_TURNS):
            (self._folder / name).unlink(missing_ok=True)


def append_turn(folder: Path, record: TurnRecord, *, name: str = TURNS) -> None:
    """Append a Turn with its messages to `turns.jsonl`. Raises RunError."""
    line = {
        "turn": replace(record.turn, routed=None),
        "messages": record.new_messages,
        "tools": record.tools,
        "reply": record.reply.message,
    }
    path = folder / name
    with disk_errors(path), path.open("ab") as file:
        file.write(_dump(line) + b"\n")


def read_turns(folder: Path) -> tuple[RecordedTurn, ...]:
    """Read a recorded Episode's Turns for a replay, with their messages if it has them.

    Also of an Episode that a crash interrupted. Raises RunError on a damaged folder.
    """
    path = folder / TURNS
    with _damaged(folder):
        whole = folder / "trajectory.json"
        if not path.exists():
            if (folder / TASK).exists() and not whole.exists():
                return ()  # a crash interrupted it before its first Turn
            trajectory = _trajectory(read_json(whole), folder)
            return tuple(map(RecordedTurn, trajectory.turns))
        # A kill may have cut the last line.
        lines = path.read_bytes().split(b"\n")[:-1]
        return recorded_turns(_turn_record(orjson.loads(line), folder) for line in lines)


def _turn_record(line: dict[str, Any], folder: Path) -> TurnRecord:
    turn = _turn(line["turn"], folder)
    messages = tuple(_read_message(message) for message in line["messages"])
    reply = ChatReply("", _read_message(line["reply"]), turn.finish)
    return TurnRecord(turn, messages, reply, tuple(Tool(**tool) for tool in line["tools"]))


@dataclass(frozen=True, slots=True)
class Start:
    """A recorded Episode to continue after one of its Turns."""

    folder: Path
    turn: int
    recorded: tuple[RecordedTurn, ...]
    id: str
    task_id: str
    task: Task | None
    """Kept beside an Episode that is in no run."""
    recipe: Mapping[str, Any]
    """Recipe of its run, or of the Episode itself; empty if there is none."""
    settings: tuple[str, ...]
    """The keys of the recipe that decide what the agent sends."""
    run: Path | None

    @property
    def model(self) -> str | None:
        """The model whose tokens it has; None for a script."""
        initial = self.run / INITIAL_MODEL if self.run else None
        return self.recipe.get("model", {}).get("path") or (
            str(initial) if initial and initial.is_dir() else None
        )


def read_start(folder: Path, turn: int) -> Start:
    """Read an Episode to continue it. Raises InputError if it has no such Turn, or no tokens."""
    try:
        recorded = read_turns(folder)
        about = read_json(folder / "episode.json") if is_finished(folder) else {}
        task = from_row(read_json(folder / TASK)) if (folder / TASK).exists() else None
        parents = folder.resolve().parents[:_RUN_DEPTH]
        runs = [parent for parent in parents if (parent / index.RECIPE).exists()]
        file = folder / RECIPE
        path = file if file.exists() else runs[0] / index.RECIPE if runs else None
        recipe = read_json(path) if path else {}
    except RunError as error:
        hint = "give an Episode's folder, such as runs/twin/episodes/00003/TASK.0"
        raise InputError(f"{folder} is no recorded Episode: {error}", hint=hint) from error
    if not recorded or not 0 <= turn <= len(recorded):
        message = f"{folder} has no turn {turn} to continue after"
        none = "none: no turn ended, or its record is cut"
        has = f"{len(recorded)}, counted from 1" if recorded else none
        raise InputError(message, hint=f"it has {has}")
    if any(not record.turn.trainable and record.reply is None for record in recorded):
        hint = f"only Episodes with token ids or {TURNS} can be continued"
        raise InputError(f"{folder} has neither tokens nor messages", hint=hint)
    return Start(
        folder=folder,
        turn=turn,
        recorded=recorded,
        id=about.get("id", folder.name),
        task_id=about.get("task_id", ""),
        task=task,
        recipe=recipe,
        settings=tuple(_settings(_carried(recipe, about.get("agent", "")))),
        run=runs[0] if runs else None,
    )


def _carried(recipe: Mapping[str, Any], agent: str) -> dict[str, Any]:
    """Return the sections to carry over, of several agents the Episode's own."""
    settings = {name: recipe[name] for name in _CARRIED if name in recipe}
    if isinstance(several := settings.get("harness"), list):
        matches = (part for part in several if agent in (part.get("name"), part["type"]))
        mine = next(matches, several[0])
        settings["harness"] = {
            key: section for key, section in mine.items() if key not in _OF_SEVERAL
        }
    elif agent and "harness" not in settings:
        settings["harness"] = {"type": agent}
    return settings


def _settings(value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield nested keys as `--set` takes them; TOML has no null."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _settings(item, f"{prefix}{name}.")
        elif item is not None:
            yield f"{prefix}{name}={orjson.dumps(item).decode()}"


def _read_message(value: dict[str, Any]) -> Message:
    role, calls = Role(value.pop("role")), value.pop("tool_calls")
    return Message(role, tool_calls=tuple(ToolCall(**call) for call in calls), **value)


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
        fork=Fork(**summary["fork"]) if "fork" in summary else None,
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
        if is_finished(path):
            if is_lost(read_versions(path)):
                orphans.append(path)
        elif (path / TURNS).exists():  # a crash interrupted it
            log = TurnLog(path)
            if is_lost(name for record in log.recorded for name, _ in record.turn.spans()):
                log.clear()
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
    return Turn(finish=finish, weight_changes=changes, routed=routed, **value)
