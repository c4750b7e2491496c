"""What a run will cost: assumptions with their sources, and the low, middle and high case."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import ceil, comb

from swerl.core.errors import InputError, unknown
from swerl.recipe.schema import Recipe, RolloutSection

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
    per_episode = episode_dollars(per_second, seconds)
    hours = wall_hours(value["steps"], value[f"step_minutes.{name}"])
    held_hours = gpu_hours(value["gpus"], hours)
    return Case(
        name=name,
        episode_sandbox_seconds=seconds,
        episode_sandbox_dollars=per_episode,
        sandbox_dollars=sandbox_dollars(per_episode, episodes, factor=value["sandbox_factor"]),
        hours=hours,
        gpu_hours=held_hours,
        gpu_dollars=held_hours * value["gpu_hour"],
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


EXAMPLE_AGENT_S = 1800
"""Agent budget that the sandbox-seconds of the example belong to."""
EXAMPLE_SANDBOX_SECONDS = (520.0, 1140.0, 2400.0)
"""Of one Episode's two sandboxes together. The high case is the whole agent budget of 1,800 s and
the whole test budget of 600 s; low and middle are the published estimate's."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the numbers come from, in words."""

    run: str
    seconds: str
    minutes: str


def example() -> tuple[Assumption, ...]:
    """Return the assumptions of the 8-node example: 64 H100, E2B, 100 steps of 64 Episodes."""
    recipe = Recipe.model_validate(
        {
            "name": "example",
            "steps": 100,
            "rollout": {"groups_per_step": 8, "episodes_per_group": 8},
            "limits": {"num_cpus": 4, "memory_mib": 8192},
            "sandbox": {"type": "e2b"},
            "tasks": {"source": "tasks.jsonl"},
            "cluster": {"nodes": 8, "gpus_per_node": 8, "gpu": "h100"},
            "cost": {"sandbox_seconds": EXAMPLE_SANDBOX_SECONDS},
        }
    )
    published = "the example's published estimate"
    return _assumptions(recipe, _Source("8-node example", published, published))


def from_recipe(recipe: Recipe) -> tuple[Assumption, ...]:
    """Return the assumptions of a recipe; a price that is not in the book is NaN."""
    given = recipe.cost.model_fields_set
    seconds = "recipe: cost.sandbox_seconds"
    if recipe.cost.sandbox_seconds is None:
        seconds = f"the 8-node example's, scaled to budgets.agent_s = {recipe.budgets.agent_s:g}"
    minutes = "recipe: cost.step_minutes"
    if "step_minutes" not in given:
        minutes = "the 8-node example's published estimate"
        if not recipe.cluster.gpus_per_node:
            minutes = "a run on CPU: set cost.step_minutes to see its hours"
    return _assumptions(recipe, _Source("recipe", seconds, minutes))


def _assumptions(recipe: Recipe, source: _Source) -> tuple[Assumption, ...]:
    run = source.run
    limits, cluster, rollout = recipe.limits, recipe.cluster, recipe.rollout
    rows = [
        Assumption("steps", recipe.steps, "optimizer steps", run),
        Assumption("groups_per_step", rollout.groups_per_step, "tasks a step", run),
        Assumption("episodes_per_group", rollout.episodes_per_group, "episodes a task", run),
        Assumption("group_factor", group_factor(rollout), "groups begun a group", _filter(recipe)),
        Assumption("eval_episodes", *_evaluations(recipe)),
        Assumption(
            "attempts", attempts(rollout), "attempts an episode", f"assumed: {LOST_SHARE:.0%} lost"
        ),
        Assumption("sandboxes_per_episode", 2, "sandboxes", "one for the agent, one for grading"),
        Assumption("vcpus", limits.num_cpus, "vCPU a sandbox", run),
        Assumption("memory_gib", limits.memory_mib / 1024, "GiB a sandbox", run),
        _priced(recipe, "vcpu_second", f"{recipe.sandbox.type}_vcpu_second"),
        _priced(recipe, "gib_second", f"{recipe.sandbox.type}_gib_second"),
        *_cases(
            "sandbox_seconds", _seconds(recipe), "s an episode, both sandboxes", source.seconds
        ),
        Assumption("sandbox_factor", 1.0, "times", "no leaks; one published bill needed 4"),
        Assumption("gpus", cluster.nodes * cluster.gpus_per_node, "GPUs", run),
    ]
    if cluster.gpus_per_node:
        rows.append(_priced(recipe, "gpu_hour", f"{cluster.gpu}_hour"))
    else:
        rows.append(Assumption("gpu_hour", 0.0, "$ per GPU-hour", "no GPU in this run"))
    return (*rows, *_cases("step_minutes", _minutes(recipe), "minutes a step", source.minutes))


def _cases(
    key: str, values: tuple[float, float, float], unit: str, source: str
) -> Iterator[Assumption]:
    for name, value in zip(CASES, values, strict=True):
        yield Assumption(f"{key}.{name}", value, unit, source)


def _priced(recipe: Recipe, key: str, name: str) -> Assumption:
    found = price_book(recipe.cost.prices).get(name)
    if found is None:
        return Assumption(key, math.nan, "$", f"no {name} in the price book or cost.prices")
    return Assumption(key, found.value, found.unit, f"{found.source}, {found.date}")


def _seconds(recipe: Recipe) -> tuple[float, float, float]:
    if recipe.cost.sandbox_seconds is not None:
        return recipe.cost.sandbox_seconds
    scale = recipe.budgets.agent_s / EXAMPLE_AGENT_S
    low, mid, high = EXAMPLE_SANDBOX_SECONDS
    return low * scale, mid * scale, high * scale


def _minutes(recipe: Recipe) -> tuple[float, float, float]:
    known = recipe.cluster.gpus_per_node or "step_minutes" in recipe.cost.model_fields_set
    return recipe.cost.step_minutes if known else (0.0, 0.0, 0.0)


def _filter(recipe: Recipe) -> str:
    chosen = recipe.rollout.group_filter
    if chosen == "none":
        return "no rollout.group_filter"
    return f"assumed: {PASSING_SHARE:.0%} pass rollout.group_filter = {chosen}"


def _evaluations(recipe: Recipe) -> tuple[float, str, str]:
    tasks, every = recipe.tasks, recipe.eval.every
    times = 2 + ((recipe.steps - 1) // every if every else 0)
    if tasks.source == "twin":
        num = tasks.num_heldout + tasks.num_unseen
        return times * num, "episodes", f"{times} evaluations of {num} tasks"
    return 0.0, "episodes", "not counted for a task file: set it"


def sandbox_dollars_per_second(
    *, vcpus: float, memory_gib: float, vcpu_second: float, gib_second: float
) -> float:
    """Return what one running sandbox costs a second; prices in dollars per unit and second."""
    return vcpus * vcpu_second + memory_gib * gib_second


def episode_dollars(dollars_per_second: float, sandbox_seconds: float) -> float:
    """Return what the sandboxes of one Episode cost.

    `sandbox_seconds` are those of all its sandboxes together: the agent's and the grading one.
    """
    return dollars_per_second * sandbox_seconds


def sandbox_dollars(dollars_per_episode: float, num_episodes: float, *, factor: float) -> float:
    """Return what a run's sandboxes cost; `factor` covers leaks and idle ones."""
    return dollars_per_episode * num_episodes * factor


def wall_hours(num_steps: float, step_minutes: float) -> float:
    """Return the hours of a run."""
    return num_steps * step_minutes / 60


def gpu_hours(num_gpus: float, hours: float) -> float:
    """Return the GPU-hours of a run that holds its GPUs from start to end."""
    return num_gpus * hours


@dataclass(frozen=True, slots=True)
class Price:
    """One entry of the price book."""

    name: str
    value: float
    """US dollars per `unit`."""
    unit: str
    source: str
    date: str
    """When the source was read, as year and month."""


def price_book(own: Mapping[str, float] | None = None) -> Mapping[str, Price]:
    """Return every entry of prices.toml by name; `own` are a recipe's `cost.prices`, on top."""
    text = (files("swerl.plan") / "prices.toml").read_text(encoding="utf-8")
    book = {name: Price(name, **entry) for name, entry in tomllib.loads(text).items()}
    return book | {name: _own(name, value) for name, value in (own or {}).items()}


def used_prices(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the prices that a run has: of its sandboxes, and of its GPUs if any."""
    kind, cluster = recipe.sandbox.type, recipe.cluster
    gpus = (f"{cluster.gpu}_hour",) if cluster.gpus_per_node else ()
    return (f"{kind}_vcpu_second", f"{kind}_gib_second", *gpus)


def _own(name: str, value: float) -> Price:
    return Price(name, value, f"$ per {name.rpartition('_')[2]}", "recipe: cost.prices", "yours")


PASSING_SHARE = 0.6
"""Share of Groups that a filter lets through. Assumed: of tasks that are solved one time in ten to
nine in ten, eight attempts differ more often than not, and not all tasks are such."""
LOST_SHARE = 0.02
"""Share of attempts that the machinery loses. Assumed; `rollout.max_infra_rate` bounds it."""


def group_factor(rollout: RolloutSection, passing: float = PASSING_SHARE) -> float:
    """Return how many Groups a step begins on average for each that it wants.

    Groups pass the filter independently of each other. Those missing are begun anew, each time
    `oversample` times as many, at most `refill_rounds` times.
    """
    if rollout.group_filter == "none":
        return 1.0

    @cache
    def begun(missing: int, rounds: int) -> float:
        if not missing or rounds < 0:
            return 0.0
        size = ceil(missing * rollout.oversample)
        more = sum(
            _binomial(size, passed, passing) * begun(max(missing - passed, 0), rounds - 1)
            for passed in range(size + 1)
        )
        return size + more

    return begun(rollout.groups_per_step, rollout.refill_rounds) / rollout.groups_per_step


def attempts(rollout: RolloutSection, lost: float = LOST_SHARE) -> float:
    """Return how often an Episode is tried on average, at most `refills` times more than once."""
    return float(sum(lost**number for number in range(1 + rollout.refills)))


def _binomial(size: int, passed: int, share: float) -> float:
    return comb(size, passed) * share**passed * (1 - share) ** (size - passed)
