"""The records of a run that its diagnosis reads: metrics of every step, Episodes of a few.

Only the Episodes of the first step and of the last ones are read, up to a bound on Episodes and
tokens, so the cost does not grow with the run. A missing or damaged file becomes an entry in the
list of problems, and everything else is still read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swerl.core.errors import InputError
from swerl.core.files import read_json
from swerl.recipe.sections import INITIAL_MODEL
from swerl.runs import history, index, prompts, tables
from swerl.runs.index import FoundRun
from swerl.runs.layout import RunFolder

if TYPE_CHECKING:
    from swerl.core.contracts import Family

T = TypeVar("T")
LAST_STEPS = 3
"""Steps at the end whose Episodes are read, besides the first one."""
MAX_EPISODES = 192
"""Episodes of a step that are read."""
_TOKENS = 1 << 21
"""Tokens of a step that are read: 8 MiB."""
_TEXT_CHARS = 20_000
"""Characters of a log, from its end."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """The effect of a fault in the records."""

    step: int
    """First step that was read and that shows it."""
    evidence: tuple[str, ...]
    """Figures, steps and files."""
    says: str = ""
    """A sentence in place of the rule's; `key` and `fix` replace the rule's, too."""
    key: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One Turn as a row of `turns/`."""

    index: int
    parent: int | None
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str
    weight_version: str
    malformed_calls: int


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """One Episode: its summary, its Grade, and its Turns if they were read."""

    id: str
    task: str
    verdict: str = ""
    status: str = ""
    reward: float = 0.0
    reason: str = ""
    """Reason of the Grade, or the error."""
    tests: Mapping[str, str] = field(default_factory=dict)
    confirmation: str = ""
    """Result of its audit; empty in records of older releases."""
    patch: str = ""
    log: str = ""
    """End of the agent's output and of the tests' output."""
    turns: tuple[RecordedTurn, ...] = ()

    @property
    def learnable(self) -> bool:
        return self.verdict in ("solved", "unsolved", "timeout", "cheat")

    @property
    def root(self) -> tuple[int, ...]:
        """The first prompt; empty without Turns."""
        return tuple(self.turns[0].prompt_ids) if self.turns else ()


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step whose Episodes were read."""

    number: int
    metrics: Mapping[str, float]
    episodes: tuple[RecordedEpisode, ...]

    @property
    def learnable(self) -> tuple[RecordedEpisode, ...]:
        return tuple(episode for episode in self.episodes if episode.learnable)

    def figure(self, name: str) -> str:
        """Return a metric with its name, for people."""
        value = self.metrics.get(name)
        return f"{name} is not recorded" if value is None else f"{name} {value:.3g}"

    @property
    def groups(self) -> dict[str, list[RecordedEpisode]]:
        """Task -> its learnable Episodes."""
        groups: dict[str, list[RecordedEpisode]] = {}
        for episode in self.learnable:
            groups.setdefault(episode.task, []).append(episode)
        return groups


@dataclass
class Evidence:
    """The records of one run."""

    root: Path
    recipe: Mapping[str, Any]
    metrics: Mapping[int, Mapping[str, float]]
    """By step, of every step."""
    steps: tuple[RecordedStep, ...]
    error: str
    """Error that ended the run; empty if there was none."""
    problems: list[str] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last step that was read; 0 if there is none."""
        return self.steps[-1].number if self.steps else 0

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of one metric."""
        return [(step, m[name]) for step, m in sorted(self.metrics.items()) if name in m]

    def key(self, path: str, default: Any = None) -> Any:
        """Return a recipe key such as `rollout.max_turns`; `default` if the recipe lacks it."""
        value: Any = self.recipe
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    @cached_property
    def family(self) -> Family | None:
        """The family that decodes the run's tokens; None, and a problem, without a tokenizer."""
        return _part(lambda: family_of(self.root), self.problems)

    @cached_property
    def groups(self) -> Sequence[prompts.GroupEntry]:
        """The prompt ledger: every Group of every step."""
        return _part(lambda: prompts.read(RunFolder(self.root).prompts), self.problems) or ()

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as text; empty without a tokenizer."""
        return self.family.text(ids) if len(ids) and self.family else ""


def read(root: Path) -> Evidence:
    """Read the records of a run folder, live or ended. Raises RunError without a recipe."""
    recipe = read_json(root / index.RECIPE)
    if not isinstance(recipe, dict):
        raise InputError(f"{root / index.RECIPE} is damaged: not an object")
    problems: list[str] = []
    folder = RunFolder(root)
    past = _part(lambda: history.read(folder.events), problems) or history.RunHistory()
    process = _part(lambda: read_json(root / "process.json"), []) or {}
    names = {
        *FoundRun(root.name, root, True).stages(),
        *(path.stem for path in (root / "turns").glob("*.parquet")),
    }
    numbers = sorted({int(name) for name in names if name.isdecimal()})
    chosen = sorted({*numbers[:1], *numbers[-LAST_STEPS:]})
    return Evidence(
        root=root,
        recipe=recipe,
        metrics=dict(past.steps),
        steps=tuple(_step(folder, n, past.steps.get(n, {}), problems) for n in chosen),
        error=str(process.get("error") or "") if isinstance(process, dict) else "",
        problems=problems,
    )


def family_of(root: Path) -> Family:
    """Return the family that decodes a run's tokens. Raises SwerlError if it has no tokenizer."""
    from swerl.core import plugins

    if not (root / index.RECIPE).is_file():
        raise InputError("the folder does not name the model, so its tokens have no text")
    recipe = read_json(root / index.RECIPE)
    if (recipe.get("engine") or {}).get("type") == "scripted":
        return plugins.family("tiny", None)
    chosen = recipe.get("model") or {}
    model = Path(chosen.get("path") or root / INITIAL_MODEL)
    if not model.is_dir():
        raise InputError(
            f"the tokenizer of {model} is not on this machine, so tokens are shown as ids",
            hint="copy the model's folder to the same path",
        )
    return plugins.family(chosen.get("family") or plugins.AUTO_FAMILY, model)


def _part(read_it: Callable[[], T], problems: list[str]) -> T | None:
    value, problem = index.part(read_it)
    if problem:
        problems.append(problem)
    return value


def _step(
    folder: RunFolder, number: int, metrics: Mapping[str, float], problems: list[str]
) -> RecordedStep:
    turns: dict[str, list[RecordedTurn]] = {}
    if (path := folder.turns(number)).exists():
        turns = _part(lambda: _turns(path), problems) or {}
    # Of asynchronous schedules, a step's Groups are in the folders of several stages.
    stage = f"{number:05d}"
    names = [name for group in _groups(folder.root, stage).values() for name in group]
    ids = dict.fromkeys([*turns, *(f"{stage}/{name}" for name in names)])
    episodes = []
    for episode_id in [*ids][:MAX_EPISODES]:
        read_it = partial(_episode, folder.root / "episodes" / episode_id, episode_id)
        episodes.append(_part(partial(read_it, turns.get(episode_id, ())), problems))
    return RecordedStep(number, metrics, tuple(e for e in episodes if e))


def _groups(root: Path, stage: str) -> Mapping[str, Sequence[str]]:
    path = root / "episodes" / stage
    return index.groups(path) if path.is_dir() else {}


def _episode(path: Path, name: str, turns: Sequence[RecordedTurn]) -> RecordedEpisode | None:
    """Read an Episode's folder; None for one without a summary: it has not ended."""
    if not (path / "episode.json").is_file():
        return None
    summary, grade = read_json(path / "episode.json"), read_json(path / "grade.json")
    return RecordedEpisode(
        id=name,
        task=str(summary["task_id"]),
        verdict=str(summary["verdict"]),
        status=str(summary["status"]),
        reward=float(summary["reward"]),
        reason=str(grade.get("reason") or summary.get("error") or ""),
        tests=dict(grade.get("tests") or {}),
        confirmation=str(grade.get("confirmation", "")),
        patch=_tail(path / "patch.diff"),
        log=f"{_tail(path / 'agent.log')}\n{str(grade.get('log', ''))[-_TEXT_CHARS:]}",
        turns=tuple(turns),
    )


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TEXT_CHARS))
        return file.read().decode("utf-8", "replace")


def _turns(path: Path) -> dict[str, list[RecordedTurn]]:
    """Return Episode -> its Turns, up to the limit of tokens."""
    turns: dict[str, list[RecordedTurn]] = {}
    num_tokens = 0
    for row in tables.read_turns(path):
        turn = RecordedTurn(**{name: row[name] for name in RecordedTurn.__slots__})
        num_tokens += len(turn.prompt_ids) + len(turn.output_ids)
        if num_tokens > _TOKENS:
            # The Episode that the limit cuts is left out: rules may count its Turns.
            turns.pop(row["episode"], None)
            break
        turns.setdefault(row["episode"], []).append(turn)
    return turns
