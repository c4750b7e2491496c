"""Send a run's metrics to Trackio or Weights & Biases as its steps end."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from swerl.core.errors import RecipeError
from swerl.core.events import Emit, EvalEnded, Event, Notice, StepEnded, fan_out
from swerl.recipe.schema import Recipe


@contextmanager
def open_sinks(recipe: Recipe, root: Path, emit: Emit) -> Iterator[Emit]:
    """Open every sink that the recipe names; yield one listener for all of them.

    A resumed run continues under the same name. A sink that fails later does not end the run: one
    Notice is emitted. Raises RecipeError if its package is not installed.
    """
    with ExitStack() as stack:
        yield fan_out(
            *(
                _tolerant(name, stack.enter_context(_open(name, recipe, root)), emit)
                for name in recipe.metrics.sinks
            )
        )


def _tolerant(name: str, log: Emit, emit: Emit) -> Emit:
    has_failed = False

    def listen(event: Event) -> None:
        nonlocal has_failed
        try:
            log(event)
        except Exception as error:  # noqa: BLE001  # the boundary: a package may raise anything
            if not has_failed:
                has_failed = True
                emit(Notice(f"metrics: {name} failed; events.jsonl has all of them: {error!r}"))

    return listen


@contextmanager
def _open(name: str, recipe: Recipe, root: Path) -> Iterator[Emit]:
    try:
        sink: Any = importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"metrics.sinks names {name!r}, which is not installed",
            hint=f"pip install 'swerl[{name}]'",
        ) from error
    settings = {"project": recipe.metrics.project, "name": recipe.name, "resume": "allow"}
    if name == "wandb":
        settings |= {"id": recipe.name, "dir": str(root)}
    sink.init(config=recipe.model_dump(mode="json"), **settings)

    def log(event: Event) -> None:
        if isinstance(event, StepEnded):
            sink.log(dict(event.metrics), step=event.step)
        elif isinstance(event, EvalEnded):
            name = f"eval/{event.name}"
            rates = {name: event.solve_rate, f"{name}_low": event.low, f"{name}_high": event.high}
            if event.k > 1:
                rates[f"{name}_pass_at_{event.k}"] = event.pass_at_k
            sink.log(rates, step=event.step)

    try:
        yield log
    finally:
        sink.finish()
