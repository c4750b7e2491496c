"""Send a run's metrics to Trackio or Weights & Biases as its steps end."""

from __future__ import annotations

import functools
import importlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from swerl.core.errors import RecipeError, install_command
from swerl.core.events import Emit, EvalEnded, Event, Notice, StepEnded, fan_out, ignore
from swerl.core.files import write_text
from swerl.core.secrets import public
from swerl.recipe.schema import Recipe

_Send: TypeAlias = Callable[[Mapping[str, float], int], None]
_CALL_S = 60.0
"""Seconds after which a call of a tracker counts as hanging; a start over a slow line takes ten."""
_END_S = 15.0
"""Seconds at the end of a run for the last metrics to be sent."""


@contextmanager
def open_sinks(recipe: Recipe, root: Path, emit: Emit) -> Iterator[Emit]:
    """Open every sink that the recipe names; yield one listener for all of them.

    A resumed run continues under its id, which is kept in the run folder. A sink that fails or
    hangs, at its start too, does not end or delay the run: one Notice is emitted. Raises
    RecipeError if its package is not installed.
    """
    for name in recipe.metrics.sinks:
        _module(name)
    with ExitStack() as stack:
        sinks = [_Sink(name, recipe, root, emit) for name in recipe.metrics.sinks]
        yield fan_out(*(stack.enter_context(closing(sink)) for sink in sinks))


class _Sink:
    """A sink in a thread of its own, because a call of a tracker may take minutes."""

    def __init__(self, name: str, recipe: Recipe, root: Path, emit: Emit) -> None:
        self._name = name
        self._emit = emit
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._error = ""
        self._is_reported = False
        self._since_s: float | None = time.monotonic()
        """Start of the call under way; None between two calls."""
        run_id = _id(root)
        work = functools.partial(self._work, recipe, root, run_id)
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEnded | EvalEnded):
            self._report()
            # A sink that hangs gets no more events, so that they do not fill the memory.
            if not self._is_reported or not self._hangs():
                self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join(0.0 if self._hangs() else _END_S)
        if self._thread.is_alive():
            self._error = self._error or f"its last call takes over {_END_S:g} s"
        self._report()

    def _work(self, recipe: Recipe, root: Path, run_id: str) -> None:
        opened = ExitStack()
        log: Emit = ignore

        def start() -> None:
            nonlocal log
            log = opened.enter_context(_open(self._name, recipe, root, run_id))

        self._attempt(start)
        while (event := self._events.get()) is not None:
            self._attempt(functools.partial(log, event))
        self._attempt(opened.close)

    def _attempt(self, work: Callable[[], None]) -> None:
        self._since_s = time.monotonic()
        try:
            work()
        except Exception as error:  # noqa: BLE001  # the boundary: a package may raise anything
            self._error = self._error or repr(error)
        self._since_s = None

    def _hangs(self) -> bool:
        return self._since_s is not None and time.monotonic() - self._since_s > _CALL_S

    def _report(self) -> None:
        """Emit the first error as a Notice, from the thread of the run."""
        error = self._error or (f"one call takes over {_CALL_S:g} s" if self._hangs() else "")
        if error and not self._is_reported:
            self._is_reported = True
            text = f"metrics: {self._name} failed; events.jsonl has all of them: {error}"
            self._emit(Notice(text))


def _id(root: Path) -> str:
    """Return the id of the run in the run folder, made at its first start."""
    path = root / "tracking_id"
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:8])
    return path.read_text(encoding="utf-8")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"metrics.sinks names {name!r}, which is not installed",
            hint=install_command(name),
        ) from error


@contextmanager
def _open(name: str, recipe: Recipe, root: Path, run_id: str) -> Iterator[Emit]:
    with _tracker(name, recipe, root, run_id) as send:

        def log(event: Event) -> None:
            if isinstance(event, StepEnded):
                send(event.metrics, event.step)
            elif isinstance(event, EvalEnded):
                name = f"eval/{event.name}"
                rates = {
                    name: event.solve_rate,
                    f"{name}_low": event.low,
                    f"{name}_high": event.high,
                }
                if event.k > 1:
                    rates[f"{name}_pass_at_{event.k}"] = event.pass_at_k
                send(rates, event.step)

        yield log


@contextmanager
def _tracker(name: str, recipe: Recipe, root: Path, run_id: str) -> Iterator[_Send]:
    """Open Trackio or Weights & Biases, whose interfaces are the same."""
    module = _module(name)
    settings = {"project": recipe.metrics.project, "resume": "allow"}
    if name == "wandb":
        settings |= {"name": recipe.name, "id": f"{recipe.name}-{run_id}", "dir": str(root)}
    else:
        # Trackio has no id beside the name.
        settings["name"] = f"{recipe.name}-{run_id}"
    module.init(config=public(recipe.model_dump(mode="json")), **settings)
    try:
        yield lambda metrics, step: module.log(dict(metrics), step=step)
    finally:
        module.finish()
