"""The sessions of `swerl serve`: one open session per key, written when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import orjson

from swerl.core.chat import Message
from swerl.core.contracts import Family
from swerl.core.errors import RunError
from swerl.core.files import disk_errors
from swerl.core.learning import Batch
from swerl.core.sample import Sample, to_samples
from swerl.core.turn import Sampling, Trajectory, seed_of
from swerl.gateway.conversation import Conversation, TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from swerl.recipe.schema import Recipe
from swerl.rollout import record
from swerl.training import batch

_NO_CAP = 10**12
"""Limits for a person at a keyboard, who is no runaway agent; the loop breaker stays."""


class View(Protocol):
    """Prints what happens."""

    def started(self, url: str, keys: Sequence[str]) -> None:
        """Print the address of the gateway and the keys of its sessions."""

    def turn(self, session: str, record: TurnRecord) -> None:
        """Print one answered request."""

    def refused(self, session: str, error: Exception) -> None:
        """Print one failed request."""

    def kept(self, session: str, folder: Path) -> None:
        """Print the folder of an idle session that was written."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of the served gateway."""

    recipe: Recipe
    folder: Path
    keys: Sequence[str]
    """One session per key; empty: one new key."""
    script: Sequence[Message] | None
    """Replies of a scripted engine."""
    idle_s: float
    """Idle seconds after which a session is written; its key then starts a new one."""


@dataclass(slots=True)
class Totals:
    """Sums over all sessions."""

    turns: int = 0
    branches: int = 0
    samples: int = 0
    sampled: int = 0
    """Tokens of all Turns."""
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
    num_unwritten: int = 0
    """Sessions that could not be written."""
    interrupted: bool = False
    """Whether Ctrl-C ended it."""

    def add(self, trajectory: Trajectory, num_samples: int, num_trained: int) -> None:
        self.turns += len(trajectory.turns)
        self.branches += len(list(trajectory.leaves()))
        self.samples += num_samples
        self.sampled += trajectory.num_sampled_tokens
        self.trained += num_trained
        for reason, tokens in trajectory.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + tokens


@dataclass(slots=True)
class _Served:
    """An open session and its growing log."""

    session: Session
    conversation: Conversation
    folder: Path
    last_s: float
    """Time of its last Turn, or of its opening."""
    has_turns: bool = False


class ServeSessions:
    """Keeps one session open per key; an idle one is written and replaced."""

    def __init__(self, gateway: Gateway, plan: Plan, view: View, family: Family) -> None:
        self.totals = Totals()
        self._gateway = gateway
        self._family = family
        self._plan = plan
        self._view = view
        self._served: dict[str, _Served] = {}
        self._num_opened = 0

    def open(self, keys: Sequence[str]) -> list[str]:
        """Open a session per key, or one with a new key, and return the keys."""
        fresh: list[str | None] = [None]
        for key in keys or fresh:
            self._open(key)
        return list(self._served)

    async def pass_on_idle(self) -> None:
        """Write each idle session and open a new one for its key."""
        now = time.monotonic()
        for key, served in list(self._served.items()):
            is_idle = now - served.last_s >= self._plan.idle_s
            if is_idle and served.has_turns and not served.conversation.answers:
                self._open(key)
                if await self._keep(served):
                    self._view.kept(served.session.id, served.folder)

    async def close(self) -> None:
        """End and write every session."""
        while self._served:
            _, served = self._served.popitem()
            await self._keep(served)
        self.totals.folders.sort(key=lambda folder: int(folder.name))

    def _open(self, key: str | None) -> None:
        recipe = self._plan.recipe
        self._num_opened += 1
        session_id = str(self._num_opened)
        session = self._gateway.open(
            session_id,
            sampling=Sampling(
                max_new_tokens=recipe.rollout.max_new_tokens,
                temperature=recipe.rollout.temperature,
                seed=seed_of(recipe.seed, session_id),
            ),
            limits=SessionLimits(
                max_turns=_NO_CAP,
                max_sampled_tokens=_NO_CAP,
                max_context_tokens=recipe.rollout.max_context_tokens,
                model_call_s=recipe.budgets.model_call_s,
            ),
            on_turn=lambda turn: self._note(served, turn),
            key=key,
        )
        folder = self._plan.folder / session_id
        served = _Served(session, session.conversation, folder, time.monotonic())
        self._served[session.key] = served

    def _note(self, served: _Served, turn: TurnRecord) -> None:
        """Write a Turn's text at once, so it survives a crash; then print it."""
        served.last_s = time.monotonic()
        served.has_turns = True
        try:
            with disk_errors(served.folder):
                served.folder.mkdir(parents=True, exist_ok=True)
                with (served.folder / "transcript.jsonl").open("ab") as file:
                    file.write(orjson.dumps(record.transcript_turn(turn, self._family)) + b"\n")
        except RunError as error:  # the client has its reply, and the tree its Turn
            self._view.refused(served.session.id, error)
        self._view.turn(served.session.id, turn)

    async def _keep(self, served: _Served) -> bool:
        """End a session and return whether it was written; an unused one needs no folder."""
        trajectory = await served.session.close()
        name = served.session.id
        samples = _samples(trajectory)
        trained = sum(sample.num_trained_tokens for sample in samples)
        self.totals.add(trajectory, len(samples), trained)
        if not trajectory.turns:
            return False
        try:
            await asyncio.to_thread(_write, served.folder, trajectory)
        except RunError as error:
            self.totals.num_unwritten += 1
            self._view.refused(name, error)
            return False
        self.totals.folders.append(served.folder)
        return True


def _write(folder: Path, trajectory: Trajectory) -> None:
    """Write a session's tokens and rows. Raises RunError."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    kept = record.write_trajectory(folder, trajectory)
    if samples := _samples(kept):
        whole = Batch(step=0, samples=tuple(samples), num_episodes=1)
        batch.write(folder / "samples.parquet", whole)


def _samples(trajectory: Trajectory) -> list[Sample]:
    return to_samples(trajectory, episode=trajectory.session, task="serve")
