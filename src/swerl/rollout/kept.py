"""Train on recorded Episodes: choose them by their outcome, and serve them as the Groups of steps.

The choice is written to `kept.jsonl` in the run folder before the first step. So a resumed run
trains the same Episodes in the same order, even if its sources have grown since.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from swerl.core.chat import Finish
from swerl.core.contracts import Family
from swerl.core.episode import Episode, Group, Status
from swerl.core.errors import RecipeError, RunError
from swerl.core.events import Emit, Notice, StepStarted
from swerl.core.files import read_json, write_text
from swerl.core.grade import Grade, Verdict
from swerl.core.sample import Sample, to_samples
from swerl.core.turn import Trajectory
from swerl.recipe.schema import Recipe, SftSection
from swerl.recipe.sections import INITIAL_MODEL
from swerl.rollout import record, step
from swerl.rollout.schedules import Transfer
from swerl.rollout.step import StepGroups
from swerl.rollout.versions import Versions
from swerl.runs import index
from swerl.runs.index import FoundRun
from swerl.runs.layout import Cursor

FILE = "kept.jsonl"
UNGRADED = "ungraded"
"""Verdict of a session that nothing graded; it trains with a reward of 0."""
_WHOLE = (Finish.STOP, Finish.TOOL_CALLS)


@dataclass(frozen=True, slots=True)
class KeptEpisode:
    """One recorded Episode to train on."""

    id: str
    """Source, stage and name; unique among the kept ones."""
    path: str
    """Its folder."""
    task: str
    verdict: str
    reward: float
    agent: str = ""
    """Its agent, if the source records it."""
    num_trained: int = 0
    """Tokens in the loss."""
    digest: str = ""
    """Hash of its rows' ids and masks: equal for copies, different after a change."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The model whose tokens the Episodes must have been sampled in."""

    family: Family
    family_name: str
    model: Path
    vocab_size: int
    max_tokens: int
    """Longest row that the trainer takes."""


@dataclass(slots=True)
class _Choice:
    """The choice under way."""

    section: SftSection
    reader: Reader
    kept: dict[str, KeptEpisode] = field(default_factory=dict)
    """Digest -> the first Episode with these rows."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> Episodes."""
    ids: set[str] = field(default_factory=set)

    def add(self, episode: KeptEpisode, trajectory: Trajectory) -> None:
        rows = to_samples(trajectory, episode=episode.id, task=episode.task)
        longest = max((len(row.ids) for row in rows), default=0)
        if longest > self.reader.max_tokens:
            self.left_out["too long"] += 1
        elif not rows:
            self.left_out["without token ids"] += 1
        elif (digest := _digest(rows)) in self.kept:
            self.left_out["copies"] += 1
        else:
            names = (episode.id, *(f"{episode.id}~{n}" for n in range(2, len(self.ids) + 3)))
            unique = next(name for name in names if name not in self.ids)
            self.ids.add(unique)
            num_trained = sum(row.num_trained_tokens for row in rows)
            self.kept[digest] = replace(episode, id=unique, num_trained=num_trained, digest=digest)


def open_kept(recipe: Recipe, root: Path, reader: Reader, emit: Emit) -> list[KeptEpisode]:
    """Return the run's Episodes in a fixed order: those chosen before, or a new choice.

    Raises RecipeError if none is kept, or if a source was sampled by another family or tokenizer,
    and RunError on a damaged file.
    """
    path = root / FILE
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        return [KeptEpisode(**json.loads(line)) for line in lines]
    episodes, left_out = choose(recipe, reader)
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
    if not episodes:
        raise RecipeError(
            f"sft keeps no Episode of {', '.join(map(str, recipe.sft.sources))}: "
            f"{reasons or 'they hold none'}",
            hint="widen sft.verdicts, or name other sft.sources",
        )
    num_tokens = sum(episode.num_trained for episode in episodes)
    text = f"kept {len(episodes)} episodes, {num_tokens:,} tokens to train"
    emit(Notice(f"{text}; left out: {reasons}" if reasons else text))
    write_text(path, "".join(json.dumps(asdict(episode)) + "\n" for episode in episodes))
    return episodes


def choose(recipe: Recipe, reader: Reader) -> tuple[list[KeptEpisode], Counter[str]]:
    """Return the Episodes that the recipe keeps, and the number of others by reason."""
    section = recipe.sft
    choice = _Choice(section, reader)
    for source in section.sources:
        replies: list[bool] = []
        for episode, trajectory in _candidates(source, choice):
            replies += _check_tokens(episode, trajectory, reader)
            choice.add(episode, trajectory)
        if replies and not any(replies):
            raise _foreign(source, reader, "none of its replies ends with a stop token of it")
    order = list(choice.kept.values())
    random.Random(f"{recipe.seed}/kept").shuffle(order)
    of_task: dict[str, list[KeptEpisode]] = defaultdict(list)
    for episode in order:
        of_task[episode.task].append(episode)
    chosen = [episode for of_one in of_task.values() for episode in of_one[: section.max_per_task]]
    choice.left_out["over sft.max_per_task"] = len(order) - len(chosen)
    return sorted(chosen, key=lambda episode: episode.id), +choice.left_out


def _candidates(source: Path, choice: _Choice) -> Iterator[tuple[KeptEpisode, Trajectory]]:
    """Yield the Episodes of a source that pass the rules on their outcome, with their tokens."""
    for run in index.find_runs(source).values():
        recipe = read_json(run.root / index.RECIPE) if run.is_trained else {}
        _check_run(run, recipe, choice.reader)
        for stage, attempt, path in record.trained_attempts(run):
            episode = _found(f"{run.root.name}/{stage}/{attempt.name}", path, attempt, recipe)
            if episode is None:
                choice.left_out["unfinished or damaged"] += 1
            elif _passes(episode, choice):
                try:
                    trajectory = record.read_trajectory(path)
                except RunError:
                    choice.left_out["unfinished or damaged"] += 1
                    continue
                yield episode, trajectory


def _found(
    id: str, path: Path, attempt: index.Attempt, recipe: Mapping[str, Any]
) -> KeptEpisode | None:
    """Return an Episode by its summary, or a session that nothing graded; None if unfinished."""
    about = attempt.summary
    if about:
        harness = recipe.get("harness", {})  # a list in a run of several agents
        agent_type = harness.get("type", "") if isinstance(harness, dict) else ""
        agent = about.get("agent") or agent_type
        verdict, reward = str(about.get("verdict")), float(about.get("reward", 0))
        return KeptEpisode(id, str(path), attempt.task, verdict, reward, agent)
    is_session = (path / "trajectory.json").exists() and not (path / "grade.json").exists()
    return KeptEpisode(id, str(path), id, UNGRADED, 0.0) if is_session else None


def _passes(episode: KeptEpisode, choice: _Choice) -> bool:
    passes = episode.verdict in choice.section.verdicts
    choice.left_out[episode.verdict] += not passes
    return passes


def _check_run(run: FoundRun, recipe: Mapping[str, Any], reader: Reader) -> None:
    """Raise RecipeError if a run's model has another family or tokenizer than the trained one."""
    model = recipe.get("model", {})
    name = model.get("family", "auto")
    if name not in ("auto", reader.family_name):
        raise _foreign(run.root, reader, f"model.family of it is {name!r}")
    theirs = Path(model.get("path") or run.root / INITIAL_MODEL) / "tokenizer.json"
    tokenizer = reader.model / "tokenizer.json"
    if theirs.is_file() and tokenizer.is_file() and theirs.read_bytes() != tokenizer.read_bytes():
        raise _foreign(run.root, reader, f"{theirs} differs from {tokenizer}")


def _check_tokens(episode: KeptEpisode, trajectory: Trajectory, reader: Reader) -> list[bool]:
    """Return for each whole reply whether a stop token ends it. Raises RecipeError."""
    ids = (max((*turn.prompt_ids, *turn.output_ids), default=0) for turn in trajectory.turns)
    if (largest := max(ids, default=0)) >= reader.vocab_size:
        why = f"{episode.id} has the token id {largest} of a vocabulary of {reader.vocab_size}"
        raise _foreign(Path(episode.path), reader, why)
    whole = (turn for turn in trajectory.turns if turn.finish in _WHOLE and turn.output_ids)
    return [turn.output_ids[-1] in reader.family.stop_ids for turn in whole]


def _foreign(source: Path, reader: Reader, why: str) -> RecipeError:
    return RecipeError(
        f"{source} was not sampled in the tokens of {reader.model} ({reader.family_name}): {why}",
        hint="set model.path to the model that sampled the Episodes, or to one of its line",
    )


def _digest(rows: Sequence[Sample]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for row in rows:
        digest.update(array("i", row.ids).tobytes())
        digest.update(array("b", row.mask).tobytes())
    return digest.hexdigest()


def read(entry: KeptEpisode, *, routed: bool) -> Episode:
    """Read a kept Episode's tokens; with `routed` also its recorded experts.

    Its weight versions are named by its source, since the run in training has its own. Raises
    RunError if it has changed since it was chosen.
    """
    path = Path(entry.path)
    try:
        trajectory = record.read_trajectory(path)
    except RunError as error:
        trajectory, why = Trajectory(""), f": {error}"
    else:
        why = ""
    if _digest(to_samples(trajectory, episode=entry.id, task=entry.task)) != entry.digest:
        raise RunError(
            f"the episode {path} is not as it was when the run chose it{why}",
            hint="restore it, or choose again in a new run with --set name=…",
        )
    source = entry.id.partition("/")[0]
    turns = (
        replace(
            turn,
            weight_version=f"{source}/{turn.weight_version}",
            weight_changes=tuple(
                replace(change, version=f"{source}/{change.version}")
                for change in turn.weight_changes
            ),
            routed=turn.routed if routed else None,
        )
        for turn in trajectory.turns
    )
    verdict, reason = entry.verdict, ""
    if verdict == UNGRADED:
        verdict, reason = Verdict.UNSOLVED, UNGRADED
    return Episode(
        id=entry.id,
        task_id=entry.task,
        status=Status.COMPLETED,
        grade=Grade(Verdict(verdict), reason),
        reward=entry.reward,
        trajectory=replace(trajectory, turns=tuple(turns)),
        agent=entry.agent,
    )


class KeptSchedule:
    """Implements Schedule: each step trains kept Episodes; weights are sent when they are needed.

    Nothing samples between two evaluations, so only an evaluation and the end load new weights.
    """

    def __init__(
        self, episodes: Sequence[KeptEpisode], recipe: Recipe, versions: Versions, emit: Emit
    ) -> None:
        self._kept = episodes
        self._recipe = recipe
        self._versions = versions
        self._emit = emit
        self._transfer: Transfer | None = None

    async def take(self, number: int) -> StepGroups:
        count = min(self._recipe.sft.episodes_per_step, len(self._kept))
        chosen = step.choose(len(self._kept), number, count, self._recipe.seed)
        self._emit(StepStarted(number, count))
        of_task: dict[str, list[Episode]] = defaultdict(list)
        for place in sorted(chosen):
            episode = await asyncio.to_thread(
                read, self._kept[place], routed=self._recipe.trainer.routing_replay
            )
            of_task[episode.task_id].append(episode)
        return StepGroups(tuple(Group(task, tuple(episodes)) for task, episodes in of_task.items()))

    async def serve(self, transfer: Transfer) -> None:
        self._transfer = transfer

    async def settle(self) -> None:
        if self._transfer:
            self._versions.add(await self._transfer())
            self._transfer = None

    def cursor(self) -> Cursor:
        """Return an empty one: the step number decides which Episodes come next."""
        return Cursor()
