"""Pulse: how long this process's event loop keeps everybody waiting, told now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from swerl.core.events import GatewayLoad
from swerl.gateway.intake import Intake

OnLoad: TypeAlias = Callable[[GatewayLoad], None]

BEAT_S = 0.1
"""Seconds between two looks at the clock: shorter stalls are no trouble to anybody."""
TELL_S = 10.0
"""Seconds between two tellings."""


class Pulse:
    """Measures one loop between `start` and `stop`."""

    def __init__(
        self, intake: Intake, num_sessions: Callable[[], int], on_load: OnLoad, *, process: int = 0
    ) -> None:
        """Tell `on_load` while sessions are open."""
        self._intake = intake
        self._num_sessions = num_sessions
        self._on_load = on_load
        self._process = process
        self._lag_s = 0.0
        self._num_refused = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to measure."""
        self._task = asyncio.create_task(self._beat())

    async def stop(self) -> None:
        """Measure no more."""
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        told_s = expected_s = loop.time()
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = loop.time()
            expected_s += BEAT_S
            self._lag_s = max(self._lag_s, now_s - expected_s)
            expected_s = now_s
            if now_s - told_s >= TELL_S:
                told_s = now_s
                self._tell()

    def _tell(self) -> None:
        lag_s, self._lag_s = self._lag_s, 0.0
        refused = self._intake.num_refused - self._num_refused
        self._num_refused = self._intake.num_refused
        if num_sessions := self._num_sessions():
            load = GatewayLoad(
                process=self._process,
                lag_s=round(lag_s, 4),
                at_work=self._intake.num_at_work,
                waiting=self._intake.num_waiting,
                refused=refused,
                sessions=num_sessions,
            )
            self._on_load(load)
