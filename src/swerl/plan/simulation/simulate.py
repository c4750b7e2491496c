"""Simulate a recipe's run with its own schedule, and with the others for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import cpu_count

from swerl.plan.cost import LOST_SHARE, PASSING_SHARE, Assumption, override
from swerl.plan.layout import Layout
from swerl.plan.memory import KvCache
from swerl.plan.shape import Shape, shape_of
from swerl.plan.simulation.episodes import DrawnLoads, LoadLimits, LoadSource
from swerl.plan.simulation.machine import SimulatedMachine, machine
from swerl.plan.simulation.schedule import MODES, ScheduleSimulation, SimulatedRun
from swerl.recipe.schema import Recipe

DEFAULT_STEPS = 10
"""Enough steps for stable means; takes about a second."""
_HERE = ("local", "docker")
"""Sandboxes that share the machine's cores."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation and its assumptions."""

    assumptions: tuple[Assumption, ...]
    own: SimulatedRun
    """With the recipe's own schedule."""
    others: tuple[SimulatedRun, ...]
    split: bool
    """True if the recipe is colocated; the others then split the GPUs in half."""


def simulate(
    recipe: Recipe,
    shape: Shape,
    layout: Layout,
    cache: KvCache | None,
    *,
    settings: Iterable[str] = (),
    recorded: LoadSource | None = None,
    num_steps: int = DEFAULT_STEPS,
    compare: bool = False,
) -> Simulation:
    """Simulate some steps of a GPU recipe; `recorded` replays the Episodes of a real run.

    Raises RecipeError if the speed of its GPUs is unknown.
    """
    rows = override(assumptions(recipe), settings)
    value = values(rows)
    made = machine(recipe, shape, layout, cache, value)
    source = recorded or load_source(recipe, value)

    def run(mode: str, on: SimulatedMachine) -> SimulatedRun:
        schedule = ScheduleSimulation(
            machine=on,
            rollout=recipe.rollout,
            source=source,
            agent_s=recipe.budgets.agent_s,
            passing_share=value["passing_share"],
            section=recipe.schedule,
            seed=recipe.seed,
        )
        return schedule.run(mode, min(num_steps, recipe.steps))

    own = run(recipe.schedule.mode, made)
    others = tuple(run(mode, on) for mode, on in _others(recipe, made, layout)) if compare else ()
    return Simulation(rows, own, others, split=layout.colocated)


def load_source(recipe: Recipe, value: Mapping[str, float]) -> LoadSource:
    """Return the assumed Episodes of a recipe."""
    return DrawnLoads(value, _limits(recipe), refills=recipe.rollout.refills)


def _limits(recipe: Recipe) -> LoadLimits:
    own = (each.options.get("tool_timeout_s") for each in recipe.agents)
    tool_s = max(float(each or recipe.budgets.tool_s) for each in own)
    return LoadLimits(
        max_turns=recipe.rollout.max_turns,
        max_new_tokens=recipe.rollout.max_new_tokens,
        max_context_tokens=recipe.rollout.max_context_tokens,
        tool_s=min(tool_s, recipe.budgets.tool_s),
        grading_s=recipe.budgets.grading_s,
    )


def _others(
    recipe: Recipe, made: SimulatedMachine, layout: Layout
) -> Iterator[tuple[str, SimulatedMachine]]:
    if layout.colocated and made.num_engines < 2:
        return
    for mode in MODES:
        if mode != recipe.schedule.mode:
            yield mode, made.halved() if layout.colocated else made


_BOOT_S = {"e2b": 1.0, "docker": 2.0, "local": 0.1}
"""Seconds from the request for a sandbox to its first command, if its image is present."""
_FIRST_PROMPT = {"claude-code": 11_000, "codex": 9_000, "opencode": 8_000, "qwen-code": 20_000}
"""Tokens of an agent's first request; those of other agents are short."""
_SMALL_PROMPT = 1_500


def assumptions(recipe: Recipe) -> tuple[Assumption, ...]:
    """Return every number that a recipe does not set."""
    return (*_episode_assumptions(recipe), *_machine_assumptions(recipe))


def values(rows: Iterable[Assumption]) -> Mapping[str, float]:
    return {row.key: row.value for row in rows}


def _episode_assumptions(recipe: Recipe) -> Iterator[Assumption]:
    sandbox, shares = recipe.sandbox.type, zip(recipe.agents, recipe.agent_shares, strict=True)
    trained = [(agent.type, share) for agent, share in shares if share]
    prompt = sum(share * _FIRST_PROMPT.get(agent, _SMALL_PROMPT) for agent, share in trained)
    agents = " and ".join(f"{agent}'s" for agent in dict(trained))
    mean = ", mean by weight" if len(trained) > 1 else ""
    told = f"{agents} first request, measured to a few thousand{mean}"
    yield Assumption("first_prompt", round(prompt), "tokens", told)
    yield from _generated() if recipe.tasks.source == "twin" else _repositories()
    boot = _BOOT_S.get(sandbox, 5.0)
    yield from _spread("boot_s", boot, 0.5, "s", f"{sandbox}'s start with the image at hand")
    yield Assumption(
        "lost_share", LOST_SHARE, "of episodes", "assumed: lost to infrastructure, run again"
    )
    passing = "assumed: groups with solved and unsolved episodes, of all"
    yield Assumption("passing_share", PASSING_SHARE, "of groups", passing)


def _repositories() -> Iterator[Assumption]:
    """Yield the work on real repositories."""
    yield from _spread("turns", 30, 0.6, "turns", "assumed; published SWE runs cap at 100 to 200")
    length = "gives a mean row of about 31k tokens, as in NVIDIA's SWE runs (31.6k)"
    yield from _spread("reply_tokens", 150, 1.1, "tokens a turn", length)
    yield from _spread("result_tokens", 180, 1.0, "tokens a turn", length)
    seconds = "assumed: gives sandbox-seconds near the published low case, 520"
    yield from _spread("tool_s", 2.5, 1.5, "s a turn", seconds)
    yield from _spread("grading_s", 150, 0.6, "s", "assumed: a second start and the tests")


def _generated() -> Iterator[Assumption]:
    """Yield the work on the twin's small repositories, for a model that explains itself."""
    yield from _spread("turns", 5, 0.4, "turns", "assumed: look, edit, test, submit")
    yield from _spread("reply_tokens", 150, 0.8, "tokens a turn", "assumed")
    yield from _spread("result_tokens", 100, 0.5, "tokens a turn", "the twin's files")
    yield from _spread("tool_s", 0.3, 0.5, "s a turn", "docs/start/twin.md: a local sandbox")
    yield from _spread("grading_s", 1.0, 0.3, "s", "docs/start/twin.md: local, a few tests")


def _spread(
    key: str, median: float, spread: float, unit: str, source: str
) -> tuple[Assumption, Assumption]:
    return (
        Assumption(f"{key}.median", median, unit, source),
        Assumption(f"{key}.spread", spread, "of its logarithm", "assumed"),
    )


def _machine_assumptions(recipe: Recipe) -> Iterator[Assumption]:
    has_experts = bool(shape_of(recipe.model).num_experts)
    yield Assumption(
        "train_mfu",
        0.05 if has_experts else 0.30,
        "of the GPU's peak",
        "assumed: 0.3 dense, 0.05 with experts; a published run at 64k has 0.033",
    )
    yield Assumption(
        "train_layer_s", 0.0015, "s a layer", "assumed: start of 400 kernels, each micro-batch"
    )
    yield Assumption("link_share", 0.8, "of a link", "assumed: exchanges between ranks")
    yield Assumption(
        "network_bytes_per_s", 50e9, "bytes/s a GPU", "one 400 Gb/s card a GPU, one direction"
    )
    yield Assumption("imbalance", 0.03, "of a step", "docs/design/trainer.md: at most, measured")
    yield Assumption(
        "prompt_mfu",
        0.20 if has_experts else 0.40,
        "of the GPU's peak",
        "assumed: reading prompts",
    )
    yield Assumption("bandwidth_share", 0.6, "of the GPU's peak", "assumed: decoding")
    yield Assumption("layer_s", 0.0001, "s a layer", "assumed: its kernels' start and all-reduce")
    yield Assumption("host_bytes_per_s", 25e9, "bytes/s a GPU", "assumed: PCIe 5, half of its peak")
    yield Assumption("host_adam_per_s", 2e9, "parameters/s a node", "assumed: offloaded optimizer")
    yield Assumption("update_bytes_per_s", 10e9, "bytes/s a GPU", "assumed: weights to engines")
    yield Assumption("update_fixed_s", 3.0, "s", "assumed: pause, names, checksum, resume")
    yield Assumption("switch_fixed_s", 5.0, "s a step", "assumed: memory released and resumed")
    yield Assumption("step_fixed_s", 5.0, "s a step", "assumed: batch, hand-over, commit")
    yield from _core_assumptions(recipe)
    yield Assumption("gateway_s", 0.02, "s a turn", "docs/measurements/gateway.md, on a busy core")


def _core_assumptions(recipe: Recipe) -> Iterator[Assumption]:
    shares = not recipe.cluster.gpus_per_node and recipe.sandbox.type in _HERE
    cores = (cpu_count() or 1) * recipe.cluster.nodes if shares else 0
    told = "this machine's, shared by sandboxes, engine and trainer" if shares else "not shared"
    yield Assumption("cores", cores, "CPU cores", told)
    yield Assumption("sandbox_cores", 1.0, "CPU cores", "assumed: of a sandbox that works")
