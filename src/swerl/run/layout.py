"""The run folder: where everything lies, who may use it, and which step it stands at.

runs/<name>/  recipe.resolved.json  meta.json  state.json  events.jsonl  lock
  episodes/<step>/<task>.<k>/  turns/<step>.parquet  samples/<step>.parquet
  checkpoints/<step>/  weights/<version>/  logs/attempt-NN/
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swerl.errors import RunError
from swerl.run.files import disk_errors, read_json, write_json


@dataclass(frozen=True, slots=True)
class State:
    """How far a run has come. Writing it is what commits a step."""

    step: int = 0
    """Steps that are committed; the next step has this number."""
    finished: bool = False
    evals_done: tuple[str, ...] = ()
    """Evaluations that are committed, by name."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    def episode(self, step: str, name: str) -> Path:
        """Return the folder of one Episode."""
        return self.root / "episodes" / step / name

    @property
    def checkpoints(self) -> Path:
        """Return the trainer's checkpoints, one folder a step."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Return the published weights, one folder a version."""
        return self.root / "weights"

    @property
    def scratch(self) -> Path:
        """Return the folder for generated task repositories."""
        return self.root / "tasks"

    def samples(self, step: int) -> Path:
        """Return the file of the Batch of a step."""
        return self.root / "samples" / f"{step:05d}.parquet"

    def turns(self, step: int) -> Path:
        """Return the file of the Turns of a step."""
        return self.root / "turns" / f"{step:05d}.parquet"

    @property
    def events(self) -> Path:
        """Return the file of all events."""
        return self.root / "events.jsonl"

    def read_state(self) -> State:
        """Return the committed state, the initial one for a new run."""
        path = self.root / "state.json"
        if not path.exists():
            return State()
        value = read_json(path)
        try:
            return State(value["step"], value["finished"], tuple(value["evals_done"]))
        except (KeyError, TypeError) as error:
            message = f"{path} is damaged: {error!r}"
            raise RunError(message, hint="delete the run folder to start the run anew") from error

    def write_state(self, state: State) -> None:
        """Commit a state."""
        write_json(self.root / "state.json", asdict(state))

    def new_attempt(self) -> Path:
        """Make and return the log folder of this start of the run."""
        logs = self.root / "logs"
        with disk_errors(logs):
            logs.mkdir(parents=True, exist_ok=True)
            folder = logs / f"attempt-{len(list(logs.iterdir())) + 1:02d}"
            folder.mkdir()
        return folder


@contextmanager
def open_run(root: Path, recipe: dict[str, Any]) -> Iterator[RunFolder]:
    """Open a run folder for this process alone, making it or checking that it fits the recipe.

    Raises RunError where another process holds it or its recipe differs, naming the keys.
    """
    folder = RunFolder(root)
    with disk_errors(root):
        for name in ("", "episodes", "samples", "turns", "weights", "checkpoints", "logs"):
            (root / name).mkdir(parents=True, exist_ok=True)
    with _locked(root / "lock"):
        _check_recipe(root / "recipe.resolved.json", recipe)
        if not (root / "meta.json").exists():
            write_json(root / "meta.json", {"created": time.time(), "pid": os.getpid()})
        yield folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            message = f"another process is using {path.parent}"
            hint = "wait for it, stop it, or name this run differently with --set name=…"
            raise RunError(message, hint=hint) from error
        yield


def _check_recipe(path: Path, recipe: dict[str, Any]) -> None:
    if not path.exists():
        write_json(path, recipe)
        return
    differing = _differing(read_json(path), recipe)
    if differing:
        shown = ", ".join(f"{key} ({old!r} -> {new!r})" for key, old, new in differing[:5])
        message = f"{path.parent} belongs to another recipe: {shown}"
        hint = "restore those keys to resume, or start a new run with --set name=…"
        raise RunError(message, hint=hint)


def _differing(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            found += _differing(old.get(key), new.get(key), f"{prefix}{key}.")
        return found
    return [] if old == new else [(prefix.rstrip("."), old, new)]
