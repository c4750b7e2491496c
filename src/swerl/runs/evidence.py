"""The records of a run that its diagnosis reads: metrics of every step, Episodes of a few.

Only the first step and the last ones are read, and of these a bounded number of Episodes and
tokens, so the cost does not grow with the run. Episodes that no step trains, such as those of
`swerl eval`, `rollout` and `serve`, are read as one step. A missing or damaged file is a problem in
the list and costs its own part alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swerl.core.errors import InputError, SwerlError
from swerl.core.files import read_json
from swerl.core.sample import Sample
from swerl.core.task import Task, from_row, read_tasks
from swerl.recipe.sections import INITIAL_MODEL
from swerl.runs import history, index, tables
from swerl.runs.index import DAMAGE, FoundRun
from swerl.runs.layout import RunFolder

if TYPE_CHECKING:
    from swerl.core.contracts import Family

T = TypeVar("T")
_TWIN = "twin"
"""Source of generated Tasks."""
LAST_STEPS = 3
"""Steps at the end whose Episodes are read, besides the first one."""
_EPISODES = 192
"""Episodes of a step that are read."""
_TOKENS = 1 << 21
"""Tokens of a step that are read, in Turns and in Samples; 8 MiB each."""
_TEXT_CHARS = 20_000
"""Characters of a log, from its end."""
_EVAL_EPISODES = 512


@dataclass(frozen=True, slots=True)
class Symptom:
    """The effect of a fault that a rule found in the records."""

    step: int
    """First step that was read and that shows it."""
    evidence: tuple[str, ...]
    """Figures, steps and files."""
    says: str = ""
    """A sentence in place of the rule's own."""
    key: str = ""
    """A recipe key in place of the rule's own."""


@dataclass(frozen=True, slots=True)
class SeenTurn:
    """One Turn as its row of `turns/` has it."""

    index: int
    parent: int | None
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str
    weight_version: str
    malformed_calls: int
    replayed: bool = False
    """True if it is of the prefix that the Episode began from."""


@dataclass(frozen=True, slots=True)
class SeenEpisode:
    """One Episode: its summary, its Grade, and its Turns if they were read."""

    id: str
    task: str
    verdict: str
    """Empty for a served session, which nothing grades."""
    status: str
    reward: float
    reason: str
    """Of the Grade, or the error."""
    tests: Mapping[str, str]
    restored: Sequence[str]
    patch: str
    log: str
    """End of the agent's output and of the tests' output."""
    tools: str = ""
    """Digest of the tools that the agent offered."""
    fork: str = ""
    """The prefix that it began from; empty from the start."""
    turns: tuple[SeenTurn, ...] = ()

    @property
    def learnable(self) -> bool:
        return self.verdict in ("solved", "unsolved", "timeout", "cheat")

    @property
    def sampled(self) -> tuple[SeenTurn, ...]:
        """Its Turns without those of a prefix."""
        return tuple(turn for turn in self.turns if not turn.replayed)

    @property
    def root(self) -> tuple[int, ...]:
        """The first prompt; empty without Turns."""
        return tuple(self.turns[0].prompt_ids) if self.turns else ()


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One step whose Episodes were read."""

    number: int
    metrics: Mapping[str, float]
    episodes: tuple[SeenEpisode, ...]
    samples: tuple[Sample, ...]

    @property
    def learnable(self) -> tuple[SeenEpisode, ...]:
        return tuple(each for each in self.episodes if each.learnable)

    def told(self, name: str) -> str:
        value = self.metrics.get(name)
        return f"{name} is not recorded" if value is None else f"{name} {value:.3g}"

    @property
    def groups(self) -> dict[tuple[str, str], list[SeenEpisode]]:
        """Task and prefix -> its learnable Episodes: those that are compared."""
        found: dict[tuple[str, str], list[SeenEpisode]] = {}
        for each in self.learnable:
            found.setdefault((each.task, each.fork), []).append(each)
        return found


@dataclass
class Evidence:
    """The records of one run."""

    root: Path
    recipe: Mapping[str, Any]
    metrics: Mapping[int, Mapping[str, float]]
    """By step, of every step."""
    steps: tuple[SeenStep, ...]
    eval_prompts: Mapping[str, tuple[int, ...]]
    """Task of an evaluation -> its first prompt."""
    error: str
    """Error that ended the run; empty if there was none."""
    problems: list[str] = field(default_factory=list)
    trains: bool = True
    """False if no step trains the Episodes: then they are one step, 0, and not of this recipe's
    Tasks."""

    @property
    def last(self) -> int:
        """The last step that was read; 0 if there is none."""
        return self.steps[-1].number if self.steps else 0

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of one metric."""
        return [(step, m[name]) for step, m in sorted(self.metrics.items()) if name in m]

    def key(self, path: str, default: Any = None) -> Any:
        """Return a recipe key such as `rollout.max_turns`; `default` if the recipe lacks it."""
        found: Any = self.recipe
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    @cached_property
    def family(self) -> Family | None:
        """The family that decodes the run's tokens; None, and a problem, without a tokenizer."""
        return _part(lambda: family_of(self.root), self.problems)

    @cached_property
    def solutions(self) -> Mapping[str, str]:
        """Task -> its known solution as a diff, of the Tasks that were read and have one."""
        wanted = {each.task for step in self.steps for each in step.episodes}
        return _part(lambda: _solutions(self, wanted), self.problems) or {}

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as text; empty without a tokenizer."""
        return self.family.text(ids) if len(ids) and self.family else ""


def _solutions(run: Evidence, wanted: set[str]) -> dict[str, str]:
    from swerl.tasks import twin

    source = run.key("tasks.source", _TWIN) if run.trains else ""
    if not source:
        return {}
    if source == _TWIN:
        size, seed = run.key("tasks.num_train", 0), run.key("seed", 0)
        return twin.solutions(split=twin.Split.TRAIN, count=size, seed=seed)
    return {task.id: task.gold_patch for task in read_tasks(Path(source)) if task.id in wanted}


def read(root: Path, *, until: int | None = None) -> Evidence:
    """Read the records of a run folder, live or ended, of its first `until` steps if given.

    Raises RunError if there is neither a recipe nor an Episode.
    """
    found_run = index.run_at(root)
    is_bare = found_run is not None and not found_run.is_trained
    recipe = {} if is_bare else read_json(root / index.RECIPE)
    if not isinstance(recipe, dict):
        raise InputError(f"{root / index.RECIPE} is damaged: not an object")
    problems: list[str] = []
    folder = RunFolder(root)
    past = _part(lambda: history.read(folder.events), problems) or history.RunHistory()
    process = _part(lambda: read_json(root / "process.json"), []) or {}
    found = {*_stages(root), *(path.stem for path in (root / "turns").glob("*.parquet"))}
    numbers = sorted({int(each) for each in found if each.isdecimal()})
    if found_run and not found_run.has_steps and not numbers:
        step = _only_step(found_run, problems)
        return Evidence(root, recipe, {}, (step,), {}, "", problems, trains=False)
    metrics = dict(past.steps)
    if until is not None:
        numbers = [each for each in numbers if each < until]
        metrics = {step: each for step, each in metrics.items() if step < until}
    chosen = sorted({*numbers[:1], *numbers[-LAST_STEPS:]})
    steps = tuple(_step(folder, n, metrics.get(n, {}), problems) for n in chosen)
    return Evidence(
        root=root,
        recipe=recipe,
        metrics=metrics,
        steps=steps,
        eval_prompts=_eval_prompts(root),
        error=str(process.get("error") or "") if isinstance(process, dict) else "",
        problems=problems,
    )


def family_of(root: Path) -> Family:
    """Return the family that decodes a run's tokens. Raises SwerlError if it has no tokenizer."""
    from swerl.core import plugins
    from swerl.recipe.schema import Recipe

    if not (root / index.RECIPE).is_file():
        raise InputError("the folder does not name the model, so its tokens have no text")
    # Other sections may be of another version, which must not hide the text.
    recipe = read_json(root / index.RECIPE)
    chosen = Recipe.model_validate({"name": "text", "model": recipe.get("model", {})}).model
    if (recipe.get("engine") or {}).get("type") == "scripted":
        return plugins.family("tiny", None)
    model = chosen.path or root / INITIAL_MODEL
    if not Path(model).is_dir():
        raise InputError(
            f"the tokenizer of {model} is not on this machine, so tokens are shown as ids",
            hint="copy the model's folder to the same path",
        )
    return plugins.family(chosen.family, model)


def task_of(root: Path, name: str) -> Task | None:
    """Return a Task from the files that a run's recipe names; None if they do not have it.

    Generated Tasks have no file. Raises InputError on a file that is not there.
    """
    files = read_json(root / index.RECIPE).get("tasks") or {}
    wanted = json.dumps(name, ensure_ascii=False).encode()
    for path in (files.get("source"), files.get("heldout")):
        if path in (None, _TWIN):
            continue
        if not Path(path).is_file():
            hint = "the certificate of a Task is in its row"
            raise InputError(f"the task file {path} is not on this machine", hint=hint)
        with Path(path).open("rb") as lines:
            # Rows are long, so only one that names the Task is parsed.
            for line in lines:
                if wanted in line and (task := from_row(json.loads(line))).id == name:
                    return task
    return None


def _part(read_it: Callable[[], T], problems: list[str]) -> T | None:
    try:
        return read_it()
    except SwerlError as error:
        problems.append(error.explained())
    except ModuleNotFoundError as error:
        problems.append(f"not read: Python package {error.name} is not installed")
    except DAMAGE as error:
        problems.append(f"not readable: {type(error).__name__}: {error}")
    return None


def _stages(root: Path) -> list[str]:
    return index.FoundRun(root.name, root, True).stages()


def _step(
    folder: RunFolder, number: int, metrics: Mapping[str, float], problems: list[str]
) -> SeenStep:
    turns: dict[str, list[SeenTurn]] = {}
    if (path := folder.turns(number)).exists():
        turns = _part(lambda: _turns(path), problems) or {}
    samples: list[Sample] = []
    if (path := folder.samples(number)).exists():
        samples = _part(lambda: list(_samples(path)), problems) or []
    # Of asynchronous schedules, a step's Groups are in the folders of several stages.
    stage = f"{number:05d}"
    names = [n for each in _groups(folder.root, stage).values() for n in each]
    ids = dict.fromkeys([*turns, *(f"{stage}/{name}" for name in names)])
    places = {each: folder.root / "episodes" / each for each in [*ids][:_EPISODES]}
    seen = [_episode(at, each, turns.get(each, ()), problems) for each, at in places.items()]
    return SeenStep(number, metrics, tuple(each for each in seen if each), tuple(samples))


def _only_step(run: FoundRun, problems: list[str]) -> SeenStep:
    """Read Episodes that no step trains, with the Turns of their own files."""
    found: list[tuple[str, str]] = []
    for stage in run.stages():
        folder = run.stage(stage)
        found += [(stage, name) for names in index.groups(folder).values() for name in names]
        _part(partial(index.require_open, folder), problems)
    if len(found) > _EPISODES:
        problems.append(f"{len(found) - _EPISODES} Episodes beyond the first {_EPISODES}")
    seen, num_tokens = [], 0
    for stage, name in found[:_EPISODES]:
        path = run.episode(stage, name)
        turns: Sequence[SeenTurn] = ()
        if num_tokens < _TOKENS:
            turns = _part(partial(_own_turns, path / "trajectory.json"), problems) or ()
        num_tokens += sum(len(each.prompt_ids) + len(each.output_ids) for each in turns)
        is_session = not run.is_trained
        seen.append(_episode(path, f"{stage}/{name}", turns, problems, is_session=is_session))
    return SeenStep(0, {}, tuple(each for each in seen if each), ())


def _own_turns(path: Path) -> list[SeenTurn]:
    rows = read_json(path)["turns"] if path.exists() else ()
    return [SeenTurn(**{name: row[name] for name in SeenTurn.__slots__}) for row in rows]


def _groups(root: Path, stage: str) -> Mapping[str, Sequence[str]]:
    path = root / "episodes" / stage
    return index.groups(path) if path.is_dir() else {}


def _episode(
    path: Path,
    name: str,
    turns: Sequence[SeenTurn],
    problems: list[str],
    *,
    is_session: bool = False,
) -> SeenEpisode | None:
    """Read an Episode's folder; None for one that has not ended.

    A served session has no summary, only Turns.
    """

    def found() -> SeenEpisode | None:
        if not (path / "episode.json").is_file():
            bare = SeenEpisode(name, path.name, "", "", 0.0, "", {}, (), "", "", turns=tuple(turns))
            return bare if is_session else None
        summary, grade = read_json(path / "episode.json"), read_json(path / "grade.json")
        agent = path / "agent.log"
        texts = (_tail(agent) if agent.exists() else "", str(grade.get("log", ""))[-_TEXT_CHARS:])
        return SeenEpisode(
            id=name,
            task=str(summary["task_id"]),
            verdict=str(summary["verdict"]),
            status=str(summary["status"]),
            reward=float(summary["reward"]),
            reason=str(grade.get("reason") or summary.get("error") or ""),
            tests=dict(grade.get("tests") or {}),
            restored=tuple(grade.get("restored") or ()),
            patch=_tail(path / "patch.diff") if (path / "patch.diff").exists() else "",
            log="\n".join(texts),
            tools=str(summary.get("tools", "")),
            fork="{episode}@{turn}".format(**fork) if (fork := summary.get("fork")) else "",
            turns=tuple(turns),
        )

    return _part(found, problems)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TEXT_CHARS))
        return file.read().decode("utf-8", "replace")


def _turns(path: Path) -> dict[str, list[SeenTurn]]:
    """Return Episode -> its Turns, up to the limit of tokens."""
    found: dict[str, list[SeenTurn]] = {}
    num_tokens = 0
    for row in tables.read_turns(path):
        # Runs of older releases lack the last column.
        turn = SeenTurn(**{name: row.get(name, False) for name in SeenTurn.__slots__})
        num_tokens += len(turn.prompt_ids) + len(turn.output_ids)
        if num_tokens > _TOKENS:
            # The Episode that the limit cuts is left out: rules may count its Turns.
            found.pop(row["episode"], None)
            break
        found.setdefault(row["episode"], []).append(turn)
    return found


def _samples(path: Path) -> Iterator[Sample]:
    num_tokens = 0
    for sample in tables.read_samples(path):
        num_tokens += len(sample.ids)
        if num_tokens > _TOKENS:
            return
        yield sample


def _eval_prompts(root: Path) -> dict[str, tuple[int, ...]]:
    """Return Task -> first prompt of each evaluated Task, one attempt each."""
    found: dict[str, tuple[int, ...] | None] = {}
    for stage in (name for name in _stages(root) if not name.isdecimal()):
        for task, names in _groups(root, stage).items():
            if task not in found and len(found) < _EVAL_EPISODES:
                found[task] = _part(
                    partial(_first_prompt, root / "episodes" / stage / names[0]), []
                )
    return {task: prompt for task, prompt in found.items() if prompt is not None}


def _first_prompt(folder: Path) -> tuple[int, ...]:
    turns = read_json(folder / "trajectory.json")["turns"]
    return tuple(turns[0]["prompt_ids"]) if turns else ()
