"""`swerl serve` at work: engine, gateway and sessions, until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from swerl.cli._serve_desk import Desk, Plan, Totals, View
from swerl.core.contracts import EngineSetup
from swerl.core.files import disk_errors
from swerl.gateway.prompting import HistoryPolicy
from swerl.gateway.server import Gateway
from swerl.rollout import wiring

_LOOK_S = 1.0
"""Seconds between looks for idle sessions."""


async def serve(plan: Plan, view: View) -> Totals:
    """Serve until SIGINT or SIGTERM, then write what is left. Raises what an engine raises."""
    recipe = plan.recipe
    with disk_errors(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
    family = wiring.family_of(recipe, recipe.model.path)
    script = plan.script
    setup = EngineSetup(
        family=family,
        log_dir=plan.folder,
        model=recipe.model.path,
        script=None if script is None else lambda _: script,
    )
    async with (
        wiring.engine_of(recipe, setup) as engine,
        Gateway(
            engine=engine,
            family=family,
            model_name=recipe.name,
            host=recipe.gateway.bind,
            port=recipe.gateway.port,
            history=HistoryPolicy(recipe.gateway.history),
            on_refused=view.refused,
        ) as gateway,
    ):
        desk = Desk(gateway, plan, view)
        with _told_to_stop() as stop:
            view.started(gateway.url, desk.open(plan.keys))
            try:
                while not stop.is_set():
                    await desk.pass_on_idle()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await stop.wait()
            finally:
                await desk.close()
        desk.totals.interrupted = stop.interrupted
    with suppress(OSError):
        plan.folder.rmdir()  # where nobody came
    return desk.totals


class _Stop(asyncio.Event):
    interrupted = False


@contextmanager
def _told_to_stop() -> Iterator[_Stop]:
    """Yield what SIGTERM and the first SIGINT set; a second SIGINT interrupts as usual."""
    loop = asyncio.get_running_loop()
    stop = _Stop()

    def interrupt() -> None:
        stop.interrupted = True
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
