"""The run folder: its paths, its lock, its committed state; and going back to an earlier step.

runs/<name>/  recipe.resolved.json  meta.json  state.json  events.jsonl  prompts.jsonl  lock
  episodes/<step>/<task>.<k>/  {turns,samples,logprobs}/<step>.parquet
  checkpoints/<step>/  weights/<version>/  evals/<name>.json  logs/attempt-NN/  spool/
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swerl.core.errors import InputError, RecipeError, RunError
from swerl.core.files import disk_errors, read_json, write_json
from swerl.core.secrets import public


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of an asynchronous run in the order of its Tasks.

    A Group's place is its number, from 0, in the order in which Groups start.
    """

    next_place: int = 0
    """Place of the next Group to start."""
    under_way: tuple[tuple[int, int], ...] = ()
    """(place, index into `RunState.versions`) of Groups that have started and are not trained."""


@dataclass(frozen=True, slots=True)
class Best:
    """The step with the best evaluation."""

    step: int
    """Optimizer steps before it, which is its checkpoint's number."""
    split: str
    pass_at_1: float


_MAY_CHANGE = {
    "": ("steps", "cost", "metrics", "limits", "budgets", "cluster"),
    "rollout.": ("concurrency", "refill_rounds"),
    "eval.": ("every",),
    "engine.": (
        *("url", "python", "flags", "servers", "gpus_per_server"),
        *("threads", "restarts", "start_timeout_s"),
    ),
    "trainer.": (
        *("ranks", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"),
        *("tokens_per_micro_batch", "recompute", "offload_optimizer", "shared_prefixes"),
        *("lr", "lr_end", "warmup_steps", "save_every", "async_save"),
        *("restarts", "step_timeout_s"),
    ),
}
"""Keys and sections that may change when a run resumes: where and how long it runs, what it may
use, and its learning rate. Tasks, model, algorithm and seed may not: they are its meaning."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The progress of a run. Writing it commits a step."""

    step: int = 0
    """Committed steps; the next step has this number."""
    finished: bool = False
    evals_done: tuple[str, ...] = ()
    """Names of committed evaluations."""
    versions: tuple[str, ...] = ()
    """Weight versions that have served, oldest first."""
    cursor: Cursor = Cursor()
    skipped: int = 0
    """Steps skipped because loss or gradients were not finite."""
    skipped_in_a_row: int = 0
    """Skipped steps directly before this one."""
    best: Best | None = None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    root: Path
    changes: tuple[str, ...] = ()
    """Recipe keys that differ from the last start, with both values."""

    def episode(self, step: str, name: str) -> Path:
        return self.root / "episodes" / step / name

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def scratch(self) -> Path:
        """Generated task repositories."""
        return self.root / "tasks"

    @property
    def spool(self) -> Path:
        """Recorded experts of running Episodes."""
        return self.root / "spool"

    def samples(self, step: int) -> Path:
        return self.root / "samples" / f"{step:05d}.parquet"

    def trained_steps(self) -> list[int]:
        """Return the steps whose Samples it holds."""
        return sorted(int(path.stem) for path in self.samples(0).parent.glob("*.parquet"))

    def turns(self, step: int) -> Path:
        return self.root / "turns" / f"{step:05d}.parquet"

    def logprobs(self, step: int) -> Path:
        """The trainer's log-probabilities of a step."""
        return self.root / "logprobs" / f"{step:05d}.parquet"

    def evaluation(self, name: str) -> Path:
        return self.root / "evals" / f"{name}.json"

    @property
    def prompts(self) -> Path:
        """The prompt ledger."""
        return self.root / "prompts.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    def state_of(self, step: int) -> Path:
        """The copy of the run's state in a step's checkpoint."""
        return self.checkpoints / f"{step:05d}" / "state.json"

    def read_state(self, step: int | None = None) -> RunState:
        """Return the committed state or a checkpoint's; the initial one of a new run.

        In place of a damaged committed state, returns that of the newest checkpoint. Raises
        RunError if there is none but steps were trained, or if a checkpoint's state is damaged.
        """
        path = self.root / "state.json" if step is None else self.state_of(step)
        if not path.exists():
            return RunState()
        try:
            return _read_state(path)
        except RunError as error:
            if step is not None:
                raise
            for saved in reversed(_steps(self)):
                # Every commit writes this copy first, so it is as new.
                with suppress(RunError):
                    return _read_state(self.state_of(saved))
            if any(self.samples(0).parent.glob("*.parquet")):
                error.hint = "no checkpoint has a copy of it; --set name=… starts another run"
                raise
            return RunState()

    def write_state(self, state: RunState) -> None:
        """Commit a state; the checkpoint of its step keeps a copy."""
        # The copy comes first, because `state.json` commits the step.
        if (copy := self.state_of(state.step)).parent.is_dir():
            write_json(copy, asdict(state))
        write_json(self.root / "state.json", asdict(state))

    def new_attempt(self) -> Path:
        """Create the log folder of this start of the run."""
        logs = self.root / "logs"
        with disk_errors(logs):
            logs.mkdir(parents=True, exist_ok=True)
            folder = logs / f"attempt-{next_number(logs, 'attempt-'):02d}"
            folder.mkdir()
        return folder


@contextmanager
def open_run(root: Path, recipe: dict[str, Any]) -> Iterator[RunFolder]:
    """Lock a run folder for this process; create it, or check that it fits the recipe.

    Raises RunError if another process holds it; RecipeError if its recipe has another meaning,
    naming the keys with both values. A folder without results takes any recipe.
    """
    folder = RunFolder(root)
    with disk_errors(root):
        for name in (
            *("", "episodes", "samples", "turns", "weights", "checkpoints", "evals", "logs"),
        ):
            (root / name).mkdir(parents=True, exist_ok=True)
    with _locked(root / "lock"):
        changes = _check_recipe(folder, public(recipe))
        if not (root / "meta.json").exists():
            write_json(root / "meta.json", {"created": time.time(), "pid": os.getpid()})
        yield replace(folder, changes=changes)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with disk_errors(path):
        lock = path.open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            message = f"another process is using {path.parent}"
            hint = "wait for it, stop it, or name this run differently with --set name=…"
            raise RunError(message, hint=hint) from error
        yield


def _check_recipe(folder: RunFolder, recipe: dict[str, Any]) -> tuple[str, ...]:
    """Write the recipe, or compare it with the last start's; return the changes."""
    path = folder.root / "recipe.resolved.json"
    before = read_json(path) if path.exists() else recipe
    changes = _differing(_completed(before), _completed(recipe))
    texts = tuple(f"{key} ({old!r} -> {new!r})" for key, old, new in changes)
    fixed = [
        text for text, change in zip(texts, changes, strict=True) if not _may_change(change[0])
    ]
    if not _has_results(folder.root):
        # An error at the start may have advised any key.
        (folder.root / "tasks.json").unlink(missing_ok=True)
    elif fixed:
        message = f"{folder.root} belongs to another recipe: {', '.join(fixed[:5])}"
        hint = "restore those keys to resume, or start a new run with --set name=…"
        raise RecipeError(message, hint=hint)
    elif (step := folder.read_state().step) > (steps := recipe.get("steps", step)):
        message = f"steps = {steps}, but {folder.root} has {step}"
        raise RecipeError(message, hint="set more, or `swerl train rewind` to an earlier step")
    if changes or not path.exists():
        write_json(path, recipe)
    return texts


def _may_change(key: str) -> bool:
    """Return whether a key, or a section around it, may change."""
    return any(
        key == (name := section + part) or key.startswith(f"{name}.")
        for section, parts in _MAY_CHANGE.items()
        for part in parts
    )


def _has_results(root: Path) -> bool:
    from swerl.recipe.sections import INITIAL_MODEL

    folders = (root / name for name in ("episodes", "evals", "samples", "checkpoints"))
    return (root / INITIAL_MODEL).exists() or any(any(folder.iterdir()) for folder in folders)


def _completed(stored: Any) -> Any:
    """Return a recipe with the defaults of the keys that its release did not have."""
    from pydantic import ValidationError

    from swerl.recipe.schema import Recipe

    try:
        return Recipe.model_validate(stored).model_dump(mode="json")
    except ValidationError:
        return stored


def _read_state(path: Path) -> RunState:
    """Read a state file. Raises RunError on a damaged one."""
    try:
        return _state(read_json(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = "`swerl train rewind RUN --step STEP` continues from another checkpoint"
        raise RunError(f"{path} is damaged: {error!r}", hint=hint) from error


def _state(value: dict[str, Any]) -> RunState:
    """Read a state; fields that an older file lacks get their defaults."""
    cursor, best = value.get("cursor") or {}, value.get("best")
    under_way = tuple((place, began) for place, began in cursor.get("under_way", ()))
    return RunState(
        step=value["step"],
        finished=value["finished"],
        evals_done=tuple(value["evals_done"]),
        versions=tuple(value.get("versions", ())),
        cursor=Cursor(cursor.get("next_place", 0), under_way),
        skipped=value.get("skipped", 0),
        skipped_in_a_row=value.get("skipped_in_a_row", 0),
        best=Best(**best) if best else None,
    )


def _differing(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        changes = []
        for key in sorted(old.keys() | new.keys()):
            changes += _differing(old.get(key), new.get(key), f"{prefix}{key}.")
        return changes
    return [] if old == new else [(prefix.rstrip("."), old, new)]


def next_number(parent: Path, prefix: str) -> int:
    """Return the highest number among names with this prefix, plus one."""
    ends = (path.name.removeprefix(prefix) for path in parent.glob(f"{prefix}*"))
    return max((int(end) for end in ends if end.isdecimal()), default=0) + 1


def make_aside(root: Path) -> Path:
    """Create a folder `undone-NN` for results that the run no longer uses. Raises RunError."""
    aside = root / f"undone-{next_number(root, 'undone-'):02d}"
    with disk_errors(aside):
        aside.mkdir()
    return aside


def rewind(root: Path, step: int) -> Path | None:
    """Reset a run to the checkpoint of an earlier step, without losing anything.

    The checkpoint keeps the state of its step: data cursor, weight versions, evaluations. Episodes
    of later weights are moved aside, so that none is mistaken for one of the weights to come.
    Returns their new folder, None if there are none. Raises InputError if the step has no
    checkpoint with a state, RunError if a process uses the run.
    """
    with open_run(root, read_json(root / "recipe.resolved.json")) as run:
        if not run.state_of(step).is_file():
            there = ", ".join(str(saved) for saved in _steps(run)) or "none"
            raise InputError(
                f"{root} has no checkpoint of step {step}",
                hint=f"steps that have one: {there}",
            )
        state = replace(run.read_state(step), finished=False)
        aside = _move_aside(run, step)
        run.write_state(state)
    return aside


def _steps(run: RunFolder) -> list[int]:
    folders = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    numbers = (int(path.name) for path in folders if path.name.isdecimal())
    return sorted(step for step in numbers if run.state_of(step).is_file())


def _move_aside(run: RunFolder, step: int) -> Path | None:
    later = list(_later(run.root / "episodes", step))
    if not later:
        return None
    aside = make_aside(run.root)
    with disk_errors(aside):
        for folder in later:
            folder.rename(aside / folder.name)
        # The resumed run cuts this file, so a copy keeps the later lines.
        if run.prompts.exists():
            shutil.copyfile(run.prompts, aside / run.prompts.name)
    return aside


def _later(episodes: Path, step: int) -> Iterator[Path]:
    """Yield the folders of later steps and evaluations: `00012`, `eval-heldout-00012`."""
    for folder in episodes.iterdir():
        number = folder.name.rpartition("-")[2]
        if number.isdecimal() and int(number) > step:
            yield folder
