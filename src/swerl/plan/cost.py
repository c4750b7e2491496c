"""The cost of a run before it starts: prices, assumptions with sources, low to high estimates.

Dollars are US dollars. The simulation has assumptions of its own, which `override` changes too.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

from swerl.core.episode import REFILLS
from swerl.core.errors import InputError, unknown
from swerl.recipe.schema import Recipe, RolloutSection

CASES = ("low", "mid", "high")
PUBLISHED_AGENT_S = 1800
"""Agent budget to which the published sandbox-seconds belong."""
PUBLISHED_SANDBOX_SECONDS = (520.0, 1140.0, 2400.0)
"""Both sandboxes of one Episode together. The high case is the whole agent budget of 1,800 s and
the whole test budget of 600 s; low and middle are those of the published estimate."""
PASSING_SHARE = 0.6
"""Fraction of Groups that a filter passes. Assumed: for tasks that are solved one time in ten to
nine in ten, eight attempts usually differ, and not all tasks are such."""
LOST_SHARE = 0.02
"""Fraction of attempts lost to infrastructure. Assumed; above a quarter a run stops."""


@dataclass(frozen=True, slots=True)
class Price:
    """One entry of the price book."""

    name: str
    value: float
    """US dollars per `unit`."""
    unit: str
    source: str
    date: str
    """Year and month in which the source was read."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """One number that an estimate rests on; `key` is its name for `--assume`."""

    key: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class CostCase:
    """The cost of a run in one case. Dollars and hours are of the whole run unless named."""

    name: str
    episode_sandbox_seconds: float
    episode_sandbox_dollars: float
    sandbox_dollars: float
    hours: float
    gpu_hours: float
    gpu_dollars: float

    @property
    def total_dollars(self) -> float:
        return self.sandbox_dollars + self.gpu_dollars


@dataclass(frozen=True, slots=True)
class Estimate:
    assumptions: tuple[Assumption, ...]
    num_episodes: int
    """Episodes that are trained, rejected by a filter, or evaluated."""
    num_sandboxes: int
    sandbox_dollars_per_second: float
    cases: tuple[CostCase, ...]


def estimate(assumptions: Iterable[Assumption], settings: Iterable[str] = ()) -> Estimate:
    """Estimate the cost of a run; `settings` are `key=value` overrides of assumptions.

    Raises InputError on an unreadable setting or an unknown price, UnknownNameError on an unknown
    key.
    """
    rows = override(assumptions, settings)
    for row in rows:
        if math.isnan(row.value):
            raise InputError(
                f"no price is set for {row.key}: {row.source}",
                hint=f"give it with --assume {row.key}=DOLLARS",
            )
    value = {row.key: row.value for row in rows}
    groups = value["steps"] * value["groups_per_step"] * value["group_factor"]
    episodes = groups * value["episodes_per_group"] + value["eval_episodes"]
    tried = episodes * value["attempts"]
    per_second = sandbox_dollars_per_second(
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


def _case(name: str, value: Mapping[str, float], per_second: float, episodes: float) -> CostCase:
    seconds = value[f"sandbox_seconds.{name}"]
    per_episode = per_second * seconds
    hours = value["steps"] * value[f"step_minutes.{name}"] / 60
    gpu_hours = value["gpus"] * hours  # A run holds its GPUs from start to end.
    return CostCase(
        name=name,
        episode_sandbox_seconds=seconds,
        episode_sandbox_dollars=per_episode,
        sandbox_dollars=per_episode * episodes * value["sandbox_factor"],
        hours=hours,
        gpu_hours=gpu_hours,
        gpu_dollars=gpu_hours * value["gpu_hour"],
    )


def sandbox_dollars_per_second(
    *, vcpus: float, memory_gib: float, vcpu_second: float, gib_second: float
) -> float:
    """Return the cost per second of one running sandbox; prices are per unit and second."""
    return vcpus * vcpu_second + memory_gib * gib_second


def override(rows: Iterable[Assumption], settings: Iterable[str]) -> tuple[Assumption, ...]:
    """Replace values by `key=value` texts; a key without `.low`, `.mid`, `.high` sets all three.

    Raises InputError, UnknownNameError.
    """
    assumptions = {row.key: row for row in rows}
    for setting in settings:
        key, value = _parse(setting)
        keys = [key] if key in assumptions else [f"{key}.{case}" for case in CASES]
        if keys[0] not in assumptions:
            raise unknown("assumption", key, assumptions)
        for name in keys:
            assumptions[name] = replace(assumptions[name], value=value, source="--assume")
    return tuple(assumptions.values())


def _parse(setting: str) -> tuple[str, float]:
    key, _, text = setting.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise InputError(
            f"--assume {setting!r} is not key=number",
            hint="for example --assume vcpus=2 or --assume train_mfu=0.3",
        )
    return key.strip(), value


def from_recipe(recipe: Recipe) -> tuple[Assumption, ...]:
    """Return the assumptions of a recipe; a price that is not in the book is NaN."""
    seconds_from = "recipe: cost.sandbox_seconds"
    if recipe.cost.sandbox_seconds is None:
        budget = f"budgets.agent_s = {recipe.budgets.agent_s:g}"
        seconds_from = f"a published estimate for 8 nodes, scaled to {budget}"
    minutes_from = "recipe: cost.step_minutes"
    if "step_minutes" not in recipe.cost.model_fields_set:
        minutes_from = "a published estimate for 8 nodes"
        if not recipe.cluster.gpus_per_node:
            minutes_from = "a run on CPU: set cost.step_minutes to see its hours"
    run, limits, cluster, rollout = "recipe", recipe.limits, recipe.cluster, recipe.rollout
    filtered = "no rollout.group_filter"
    if rollout.group_filter != "none":
        passing = f"{PASSING_SHARE:.0%} pass rollout.group_filter"
        filtered = f"assumed: {passing} = {rollout.group_filter}"
    rows = [
        Assumption("steps", recipe.steps, "optimizer steps", run),
        Assumption("groups_per_step", rollout.groups_per_step, "tasks a step", run),
        Assumption("episodes_per_group", rollout.episodes_per_group, "episodes a task", run),
        Assumption("group_factor", group_factor(rollout), "groups begun a group", filtered),
        Assumption("eval_episodes", *_evaluations(recipe)),
        Assumption(
            "attempts", attempts(), "attempts an episode", f"assumed: {LOST_SHARE:.0%} lost"
        ),
        Assumption("sandboxes_per_episode", 2, "sandboxes", "one for the agent, one for grading"),
        Assumption("vcpus", limits.num_cpus, "vCPU a sandbox", run),
        Assumption("memory_gib", limits.memory_mib / 1024, "GiB a sandbox", run),
        _priced(recipe, "vcpu_second", f"{recipe.sandbox.type}_vcpu_second"),
        _priced(recipe, "gib_second", f"{recipe.sandbox.type}_gib_second"),
        *_cases("sandbox_seconds", _seconds(recipe), "s an episode, both sandboxes", seconds_from),
        Assumption("sandbox_factor", 1.0, "times", "no leaks; one published bill needed 4"),
        Assumption("gpus", cluster.nodes * cluster.gpus_per_node, "GPUs", run),
    ]
    if cluster.gpus_per_node:
        rows.append(_priced(recipe, "gpu_hour", f"{cluster.gpu}_hour"))
    else:
        rows.append(Assumption("gpu_hour", 0.0, "$ per GPU-hour", "no GPU in this run"))
    return (*rows, *_cases("step_minutes", _minutes(recipe), "minutes a step", minutes_from))


def _cases(
    key: str, values: tuple[float, float, float], unit: str, source: str
) -> Iterator[Assumption]:
    for name, value in zip(CASES, values, strict=True):
        yield Assumption(f"{key}.{name}", value, unit, source)


def _priced(recipe: Recipe, key: str, name: str) -> Assumption:
    price = price_book(recipe.cost.prices).get(name)
    if price is None:
        return Assumption(key, math.nan, "$", f"no {name} in the price book or cost.prices")
    return Assumption(key, price.value, price.unit, f"{price.source}, {price.date}")


def _seconds(recipe: Recipe) -> tuple[float, float, float]:
    if recipe.cost.sandbox_seconds is not None:
        return recipe.cost.sandbox_seconds
    scale = recipe.budgets.agent_s / PUBLISHED_AGENT_S
    low, mid, high = PUBLISHED_SANDBOX_SECONDS
    return low * scale, mid * scale, high * scale


def _minutes(recipe: Recipe) -> tuple[float, float, float]:
    has_hours = recipe.cluster.gpus_per_node or "step_minutes" in recipe.cost.model_fields_set
    return recipe.cost.step_minutes if has_hours else (0.0, 0.0, 0.0)


def _evaluations(recipe: Recipe) -> tuple[float, str, str]:
    tasks, every, agents = recipe.tasks, recipe.eval.every, len(recipe.agents)
    times = 2 + ((recipe.steps - 1) // every if every else 0)
    if tasks.source == "twin":
        num, k = tasks.num_heldout + tasks.num_unseen, recipe.eval.attempts
        of = f"{times} evaluations of {num} tasks"
        of += f", {k} attempts each" if k > 1 else ""
        of += f", by {agents} agents" if agents > 1 else ""
        return times * num * k * agents, "episodes", of
    return 0.0, "episodes", "not counted for a task file: set it"


def price_book(prices: Mapping[str, float] | None = None) -> Mapping[str, Price]:
    """Return the entries of prices.toml by name; `prices` (a recipe's `cost.prices`) overrides."""
    text = (files("swerl.plan") / "prices.toml").read_text(encoding="utf-8")
    book = {name: Price(name, **entry) for name, entry in tomllib.loads(text).items()}
    for name, value in (prices or {}).items():
        unit = f"$ per {name.rpartition('_')[2]}"
        book[name] = Price(name, value, unit, "recipe: cost.prices", "yours")
    return book


def used_prices(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of a run's prices: those of its sandboxes, and of its GPUs if any."""
    kind, cluster = recipe.sandbox.type, recipe.cluster
    gpus = (f"{cluster.gpu}_hour",) if cluster.gpus_per_node else ()
    return (f"{kind}_vcpu_second", f"{kind}_gib_second", *gpus)


def group_factor(rollout: RolloutSection) -> float:
    """Return the mean number of Groups that a step starts for each that it trains.

    Groups pass the filter independently; missing ones are replaced in up to `refill_rounds` rounds.
    """
    if rollout.group_filter == "none":
        return 1.0
    return float(sum((1 - PASSING_SHARE) ** number for number in range(1 + rollout.refill_rounds)))


def attempts(lost: float = LOST_SHARE) -> float:
    """Return the mean number of attempts at an Episode, with up to REFILLS retries."""
    return float(sum(lost**number for number in range(1 + REFILLS)))
