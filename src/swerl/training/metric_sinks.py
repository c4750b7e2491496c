"""Send a run's metrics to Trackio, Weights & Biases or OpenTelemetry as its steps end."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from swerl.core.errors import RecipeError
from swerl.core.events import Emit, EvalEnded, Event, Notice, StepEnded, fan_out
from swerl.core.secrets import public
from swerl.recipe.check import SINK_MODULES
from swerl.recipe.schema import Recipe

_Send: TypeAlias = Callable[[Mapping[str, float], int], None]
_EXPORT_S = 5
"""Seconds between two exports to a collector; a step of a real run takes minutes."""
_SEND_S = 5
"""Seconds for a collector to take one export."""


@contextmanager
def open_sinks(recipe: Recipe, root: Path, emit: Emit) -> Iterator[Emit]:
    """Open every sink that the recipe names; yield one listener for all of them.

    A resumed run continues under the same name. A sink that fails later does not end the run: one
    Notice is emitted. Raises RecipeError if its package is not installed.
    """
    with ExitStack() as stack:
        names = recipe.metrics.sinks
        yield fan_out(*(stack.enter_context(_tolerant(n, recipe, root, emit)) for n in names))


@contextmanager
def _tolerant(name: str, recipe: Recipe, root: Path, emit: Emit) -> Iterator[Emit]:
    """Open a sink; the first error of a send, or of the last one at the end, is a Notice."""
    has_failed = False

    def attempt(work: Callable[[], None]) -> None:
        nonlocal has_failed
        try:
            work()
        except Exception as error:  # noqa: BLE001  # the boundary: a package may raise anything
            if not has_failed:
                has_failed = True
                emit(Notice(f"metrics: {name} failed; events.jsonl has all of them: {error!r}"))

    opened = ExitStack()
    log = opened.enter_context(_open(name, recipe, root))
    try:
        yield lambda event: attempt(lambda: log(event))
    finally:
        attempt(opened.close)


@contextmanager
def _open(name: str, recipe: Recipe, root: Path) -> Iterator[Emit]:
    try:
        module: Any = importlib.import_module(SINK_MODULES[name])
    except ImportError as error:
        raise RecipeError(
            f"metrics.sinks names {name!r}, which is not installed",
            hint=f"pip install 'swerl[{name}]'",
        ) from error
    opened = _collector(recipe) if name == "otel" else _tracker(name, module, recipe, root)
    with opened as send:

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
def _tracker(name: str, module: Any, recipe: Recipe, root: Path) -> Iterator[_Send]:
    """Open Trackio or Weights & Biases, whose interfaces are the same."""
    settings = {"project": recipe.metrics.project, "name": recipe.name, "resume": "allow"}
    if name == "wandb":
        settings |= {"id": recipe.name, "dir": str(root)}
    module.init(config=public(recipe.model_dump(mode="json")), **settings)
    try:
        yield lambda metrics, step: module.log(dict(metrics), step=step)
    finally:
        module.finish()


@contextmanager
def _collector(recipe: Recipe) -> Iterator[_Send]:
    """Open an OpenTelemetry collector: a gauge a metric, sent by a thread of its own.

    A slow collector delays no step. If it refuses, the next send and the end raise ConnectionError.
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    failed = False

    class Exporter(OTLPMetricExporter):
        def export(self, *args: Any, **kwargs: Any) -> MetricExportResult:
            nonlocal failed
            result = super().export(*args, **kwargs)
            failed = failed or result is not MetricExportResult.SUCCESS
            return result

    endpoint = f"{recipe.metrics.otlp_endpoint.rstrip('/')}/v1/metrics"
    reader = PeriodicExportingMetricReader(
        Exporter(endpoint=endpoint, timeout=_SEND_S), export_interval_millis=1000 * _EXPORT_S
    )
    about = {
        "service.name": "swerl",
        "service.namespace": recipe.metrics.project,
        "service.instance.id": recipe.name,
    }
    provider = MeterProvider([reader], Resource.create(about), shutdown_on_exit=False)
    meter = provider.get_meter("swerl")

    def send(metrics: Mapping[str, float], step: int) -> None:
        for name, value in {"step": step, **metrics}.items():
            meter.create_gauge(f"swerl.{name.replace('/', '.')}").set(value, {"run": recipe.name})
        require_taken()

    def require_taken() -> None:
        if failed:
            raise ConnectionError(f"{endpoint} did not take them")

    try:
        yield send
    finally:
        provider.shutdown(timeout_millis=1000 * _SEND_S)
        require_taken()
