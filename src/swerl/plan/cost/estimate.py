"""What a run will cost: assumptions with their sources, and the low, middle and high case."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from swerl.core.errors import InputError, unknown
from swerl.plan.cost import arithmetic

CASES = ("low", "mid", "high")


@dataclass(frozen=True, slots=True)
class Assumption:
    """One number that an estimate rests on. `key` is what `--set` calls it."""

    key: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Case:
    """What a run costs in one case. Dollars and hours of the whole run unless named per Episode."""

    name: str
    episode_sandbox_seconds: float
    episode_sandbox_dollars: float
    sandbox_dollars: float
    hours: float
    gpu_hours: float
    gpu_dollars: float

    @property
    def total_dollars(self) -> float:
        """Sandboxes and GPUs together."""
        return self.sandbox_dollars + self.gpu_dollars


@dataclass(frozen=True, slots=True)
class Estimate:
    """A whole estimate."""

    assumptions: tuple[Assumption, ...]
    num_episodes: int
    """Episodes that are trained, left out by a filter, or evaluated."""
    num_sandboxes: int
    sandbox_dollars_per_second: float
    cases: tuple[Case, ...]


def estimate(assumptions: Iterable[Assumption], settings: Iterable[str] = ()) -> Estimate:
    """Work out what a run costs; `settings` are `key=value` texts that override assumptions.

    Raises InputError on a setting that cannot be read and on a price that is not known,
    UnknownNameError on an unknown key.
    """
    rows = override(tuple(assumptions), settings)
    _refuse_unknown(rows)
    value = {row.key: row.value for row in rows}
    groups = value["steps"] * value["groups_per_step"] * value["group_factor"]
    episodes = groups * value["episodes_per_group"] + value["eval_episodes"]
    tried = episodes * value["attempts"]
    per_second = arithmetic.sandbox_dollars_per_second(
        vcpus=value["vcpus"],
        memory_gib=value["memory_gib"],
        vcpu_second=value["vcpu_second"],
        gib_second=value["gib_second"],
    )
    return Estimate(
        assumptions=rows,
        num_episodes=round(episodes),
        num_sandboxes=round(tried * value["sandboxes_per_episode"]),
        sandbox_dollars_per_second=per_second,
        cases=tuple(_case(name, value, per_second, tried) for name in CASES),
    )


def override(
    assumptions: tuple[Assumption, ...], settings: Iterable[str]
) -> tuple[Assumption, ...]:
    """Replace values by `key=value` texts; a key without `.low`, `.mid`, `.high` sets all three."""
    rows = {row.key: row for row in assumptions}
    for setting in settings:
        key, value = _parse(setting)
        keys = [key] if key in rows else [f"{key}.{case}" for case in CASES]
        if keys[0] not in rows:
            raise unknown("assumption", key, rows)
        for found in keys:
            rows[found] = replace(rows[found], value=value, source="--set")
    return tuple(rows.values())


def _case(name: str, value: Mapping[str, float], per_second: float, episodes: float) -> Case:
    seconds = value[f"sandbox_seconds.{name}"]
    per_episode = arithmetic.episode_dollars(per_second, seconds)
    hours = arithmetic.wall_hours(value["steps"], value[f"step_minutes.{name}"])
    gpu_hours = arithmetic.gpu_hours(value["gpus"], hours)
    return Case(
        name=name,
        episode_sandbox_seconds=seconds,
        episode_sandbox_dollars=per_episode,
        sandbox_dollars=arithmetic.sandbox_dollars(
            per_episode, episodes, factor=value["sandbox_factor"]
        ),
        hours=hours,
        gpu_hours=gpu_hours,
        gpu_dollars=gpu_hours * value["gpu_hour"],
    )


def _refuse_unknown(rows: Iterable[Assumption]) -> None:
    for row in rows:
        if math.isnan(row.value):
            raise InputError(
                f"nobody said what {row.key} is: {row.source}",
                hint=f"say it with --set {row.key}=DOLLARS",
            )


def _parse(setting: str) -> tuple[str, float]:
    key, _, text = setting.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise InputError(
            f"--set {setting!r} is not key=number",
            hint="for example --set vcpus=2 or --set sandbox_seconds.low=300",
        )
    return key.strip(), value
