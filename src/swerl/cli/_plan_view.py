"""Print the plan of `swerl train RECIPE --dry-run`, its cost, obstacles, and a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from swerl.cli._output import console, print_json, simple_table
from swerl.engines.sglang import server_command
from swerl.plan.cost import Assumption, Estimate, estimate, from_recipe
from swerl.plan.layout import crossing
from swerl.plan.memory import MemoryPlan
from swerl.plan.parameters import active_params, model_params
from swerl.plan.plan import RecipePlan
from swerl.plan.simulation.schedule import SimulatedRun
from swerl.plan.simulation.simulate import Simulation
from swerl.recipe.schema import Recipe
from swerl.rollout.wiring import sglang_launch

_FIGURES = ("layout", "memory", "disk", "cost", "notes", "obstacles")


def show_plan(recipe: Recipe, *, as_json: bool = False) -> bool:
    """Print the plan of a recipe; return whether it can be launched here.

    Raises RecipeError if it contradicts itself.
    """
    from swerl.plan.plan import plan

    found = plan(recipe)
    if as_json:
        shown = {name: getattr(found, name) for name in _FIGURES}
        rows = {name.replace(" ", "_"): text for name, text in _rows(found)}
        print_json({"recipe": recipe.name, **rows, **shown, "simulation": found.simulate()})
        return not found.obstacles
    for part in plan_parts(found, found.simulate()):
        console().print(part)
    _show_ending(found)
    return not found.obstacles


def plan_parts(found: RecipePlan, simulated: Simulation | None) -> Iterator[RenderableType]:
    """Yield the plan's tables and lines, without the obstacles."""
    title = f"Plan of {found.recipe.name}"
    table = Table("", "", title=title, title_justify="left", box=SIMPLE, show_header=False)
    table.columns[0].no_wrap = True
    table.columns[0].style = "bold"
    for name, text in _rows(found):
        table.add_row(name, text)
    yield table
    if found.memory:
        yield memory_table(found.memory)
        yield from host_and_cache(found.memory)
    if simulated:
        yield ""
        yield from _time(found.recipe, simulated)
        yield ""
    if found.cost is None:
        yield "no dollars: the price book lacks a price; set it in cost.prices"
    elif any(case.total_dollars for case in found.cost.cases):
        yield cases_table(found.cost)
        if simulated:
            yield _dollars_by(found.recipe, simulated)
    for note in found.notes:
        yield f"[yellow]note:[/] {note}"


def _time(recipe: Recipe, found: Simulation) -> Iterator[RenderableType]:
    yield outcome_table(recipe, found)
    for remark in remarks(recipe, found):
        yield f"- {remark}"
    yield (
        f"these rest on {len(found.assumptions)} assumptions: `swerl cost simulate` lists them, "
        "with sources, and changes them by --assume; with --from RUN it takes a real run's episodes"
    )


def _dollars_by(recipe: Recipe, found: Simulation) -> str:
    """Return the cost by the simulation, which has no low and high case."""
    minutes, seconds = found.own.step_s / 60, found.own.sandbox_s
    settings = (f"step_minutes={minutes}", f"sandbox_seconds={seconds}")
    middle = estimate(from_recipe(recipe), settings).cases[1]
    return (
        f"by the simulation: {middle.hours:.1f} hours and {seconds:,.0f} sandbox-seconds an "
        f"episode, ${middle.total_dollars:,.0f} together"
    )


def _show_ending(plan: RecipePlan) -> None:
    out = console()
    checked = (
        "every key and name, nested time budgets, the parallel layout against the model's sizes"
    )
    if plan.memory and plan.memory.capacity:
        checked += ", memory of every phase against the GPU, engines against nodes"
    out.print(f"checked: {checked}")
    if not plan.obstacles:
        out.print("next: the same command without --dry-run")
        return
    out.print("[yellow]the recipe cannot be launched here:[/]")
    for obstacle in plan.obstacles:
        out.print(f"- {escape(obstacle.explained())}", soft_wrap=True)


def _rows(plan: RecipePlan) -> Iterator[tuple[str, str]]:
    yield "model", _model(plan)
    yield from _machines(plan)
    yield "parallel layout", _parallel(plan)
    samples = not plan.recipe.sft.sources
    if samples or plan.recipe.sft.evaluate:
        yield "engines", _engines(plan)
    yield from _work(plan) if samples else _recorded(plan)
    if samples or plan.recipe.sft.evaluate:
        yield "budgets", _budgets(plan.recipe)
    yield "disk", _disk(plan)


def _model(plan: RecipePlan) -> str:
    shape = plan.shape
    text = f"{shape.name}: {_count(model_params(shape).total)} parameters"
    if shape.num_experts:
        text += f", {_count(active_params(shape))} active, {shape.num_experts} experts a layer"
    return text


def _machines(plan: RecipePlan) -> Iterator[tuple[str, str]]:
    layout = plan.layout
    if layout.num_gpus:
        gpu = plan.recipe.cluster.gpu
        nodes = "1 node" if layout.num_nodes == 1 else f"{layout.num_nodes} nodes"
        text = f"{nodes} x {layout.gpus_per_node} {gpu} = {_gpus(layout.num_gpus)}"
        yield "machines", text
    yield "trainer", f"{layout.ranks} {'rank' if layout.ranks == 1 else 'ranks'}"


def _parallel(plan: RecipePlan) -> str:
    layout = plan.layout
    sizes = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "data": layout.data,
    }
    text = " x ".join(f"{name} {size}" for name, size in sizes.items()) + f" = {layout.ranks}"
    if layout.sequence_parallel:
        text += "; sequence parallel with tensor"
    if plan.shape.num_experts:
        text += (
            f"\nexperts: expert {layout.expert} x expert tensor {layout.expert_tensor} x "
            f"pipeline {layout.pipeline} x expert data {layout.expert_data} = {layout.ranks}"
        )
    if layout.num_nodes > 1:
        crossed = [f"{name} {size}" for name, size in crossing(layout).items()]
        text += f"\ngroups over several nodes: {', '.join(crossed) or 'none'}"
    return text


def _engines(plan: RecipePlan) -> str:
    layout = plan.layout
    kind = plan.recipe.engine.type
    if not layout.num_gpus:
        return f"{layout.num_engines} {kind} on CPU"
    place = "on the trainer's GPUs, in turn" if layout.colocated else "on GPUs of their own"
    text = f"{layout.num_engines} {kind} of {_gpus(layout.gpus_per_engine)}, {place}"
    return f"{text}\nstarted with {_flags(plan)}" if kind == "sglang" else text


def _flags(plan: RecipePlan) -> str:
    """Return the flags of a server's command, without its model and address."""
    options, planned = sglang_launch(plan.recipe)
    given = options.model_copy(update={"flags": (*planned, *options.flags)})
    size, saver = plan.layout.gpus_per_engine, plan.layout.colocated
    command = server_command(given, Path(), host="", port=0, num_gpus=size, saver=saver)
    addresses = ("--model-path", "--host", "--port")
    return " ".join(each for each in command[3:] if not each.startswith(addresses))


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _work(plan: RecipePlan) -> Iterator[tuple[str, str]]:
    recipe, rollout = plan.recipe, plan.recipe.rollout
    part = "GPU" if plan.layout.num_gpus else "rank"
    if len(recipe.agents) > 1:
        pairs = zip(recipe.agents, recipe.agent_shares, strict=True)
        shares = {agent.title: f"{share:.0%}" if share else "held out" for agent, share in pairs}
        shown = ", ".join(f"{agent} {share}" for agent, share in shares.items())
        yield "agents", f"{shown}; a group has one, and an evaluation runs each"
    yield (
        "a step",
        f"{rollout.groups_per_step} tasks x {rollout.episodes_per_group} attempts = "
        f"{plan.episodes_per_step} episodes",
    )
    if round(plan.episodes_begun) > plan.episodes_per_step:
        yield (
            "begun",
            f"{plan.episodes_begun:.0f} episodes a step on average: others replace the groups that "
            f"{rollout.group_filter} leaves out",
        )
    yield "the run", f"{recipe.steps} steps, {plan.num_episodes:,} trained episodes"
    yield (
        "tokens",
        f"{rollout.max_context_tokens:,} of context / {plan.layout.context} context ranks = "
        f"{plan.tokens_per_gpu:,} a {part}; "
        f"{recipe.trainer.tokens_per_micro_batch:,} a micro-batch",
    )
    limits = recipe.limits
    yield (
        "sandboxes",
        f"{plan.sandboxes_at_once} {recipe.sandbox.type} at once, each {limits.num_cpus:g} vCPU "
        f"and {limits.memory_mib / 1024:g} GiB",
    )


def _recorded(plan: RecipePlan) -> Iterator[tuple[str, str]]:
    """Yield the work of a run on recorded Episodes."""
    recipe, sft = plan.recipe, plan.recipe.sft
    yield "episodes from", "\n".join(map(str, sft.sources))
    yield "a step", f"{plan.episodes_per_step} recorded episodes ({', '.join(sft.verdicts)})"
    yield "the run", f"{recipe.steps} steps, {plan.num_episodes:,} trained episodes"
    if not sft.evaluate:
        yield "evaluation", "none (sft.evaluate): neither an engine nor a sandbox starts"


def _budgets(recipe: Recipe) -> str:
    budgets = recipe.budgets
    chain = {
        "model call": budgets.model_call_s,
        "tool": budgets.tool_s,
        "agent": budgets.agent_s,
        "grading": budgets.grading_s,
        "episode": budgets.episode_s,
        "sandbox": budgets.sandbox_s,
    }
    return " < ".join(f"{name} {seconds:g} s" for name, seconds in chain.items())


def _disk(plan: RecipePlan) -> str:
    disk, trainer = plan.disk, plan.recipe.trainer
    when = "step" if trainer.save_every == 1 else f"{trainer.save_every} steps"
    shared = ", on a disk that all nodes share" if plan.layout.num_nodes > 1 else ""
    return (
        f"a checkpoint of {_bytes(disk.checkpoint)} every {when}, {disk.kept} kept; published "
        f"weights of {_bytes(disk.weights)}, 2 kept; episodes of "
        f"{_bytes(disk.episodes)} a step; {_bytes(disk.most)} at most{shared}"
    )


def _bytes(number: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,.0f} bytes"


def _count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)


def memory_table(planned: MemoryPlan) -> Table:
    """Return the memory of one GPU in each phase, in GiB."""
    names = [phase.name for phase in planned.phases]
    table = simple_table("part", *names, numbers=names, title="Memory of a GPU, GiB")
    longest_first = sorted(planned.phases, key=lambda phase: -len(phase.parts))
    for name in dict.fromkeys(name for phase in longest_first for name in phase.parts):
        parts = [phase.parts.get(name) for phase in planned.phases]
        if any(parts):
            table.add_row(name, *(f"{part:.1f}" if part else "" for part in parts))
    table.add_section()
    totals = [f"{phase.total:.1f}" for phase in planned.phases]
    table.add_row("together", *totals, style="bold")
    if planned.capacity is not None:
        table.add_row("of", *(f"{planned.capacity:.1f}" for _ in totals))
    return table


def host_and_cache(planned: MemoryPlan) -> Iterator[str]:
    """Yield the capacity of the engine's cache, and the use of host memory."""
    cache = planned.cache
    yield (
        f"an engine's cache: {cache.tokens:,} tokens = {cache.contexts:.1f} full contexts, for "
        f"{cache.sequences} episodes at once"
    )
    if planned.host:
        yield f"a node's host memory: {planned.host:.0f} GiB for what leaves the GPUs"


def show_simulation(recipe: Recipe, found: Simulation) -> None:
    """Print the assumptions and the result of a simulated run."""
    out = console()
    out.print(assumptions_table(found.assumptions))
    out.print(outcome_table(recipe, found))
    for line in remarks(recipe, found):
        out.print(f"- {line}", soft_wrap=True)
    out.print("next: swerl train RECIPE --dry-run")


def outcome_table(recipe: Recipe, found: Simulation) -> Table:
    """Return hours and their shares, the recipe's own schedule first."""
    runs = (found.own, *found.others)
    modes = [run.mode + ("*" if number and found.split else "") for number, run in enumerate(runs)]
    title = f"A simulation of {len(found.own.steps)} steps"
    table = simple_table("", *modes, numbers=modes, title=title)
    for name, texts in _simulation_rows(recipe, runs):
        table.add_row(name, *texts, style="bold" if name.startswith("hours") else "")
    return table


def remarks(recipe: Recipe, found: Simulation) -> Iterator[str]:
    """Yield one sentence per finding."""
    own = found.own
    name, share = next(iter(own.parts.items()))
    yield f"the run waits longest for {name}: {share:.0%} of its time"
    if (busy := _gpus_busy(recipe, own)) < 0.5:
        yield f"GPUs are idle {1 - busy:.0%} of the time: {_idle_keys(recipe)} would change that"
    if own.tail_share > 0.25:
        yield (
            f"for {own.tail_share:.0%} of the time fewer than one in ten episodes of a step are "
            "under way: a shorter budgets.agent_s or another schedule.mode would shorten it"
        )
    if own.tokens_again > 0.1:
        yield f"{own.tokens_again:.0%} of prompt tokens are computed again: the cache is too small"
    low, _, high = recipe.cost.step_minutes
    minutes = own.step_s / 60
    if not low <= minutes <= high:
        yield (
            f"a step takes {minutes:.1f} minutes, and cost.step_minutes says {low:g} to {high:g}"
        )
    if found.split and found.others:
        yield "* half of the GPUs for engines, half for the trainer: these schedules need both"
    yield "evaluations and saving are not simulated"


def _gpus_busy(recipe: Recipe, run: SimulatedRun) -> float:
    """Return the fraction of all GPUs' time in which they sample or train."""
    if recipe.cluster.colocate:
        return run.engine_busy + run.trainer_busy
    training = recipe.trainer.ranks / _num_gpus(recipe)
    return training * run.trainer_busy + (1 - training) * run.engine_busy


def _num_gpus(recipe: Recipe) -> int:
    return recipe.cluster.nodes * recipe.cluster.gpus_per_node


def _idle_keys(recipe: Recipe) -> str:
    """Return the three keys that decide how busy GPUs are, with their values."""
    rollout, schedule = recipe.rollout, recipe.schedule
    keys = f"rollout.concurrency = {rollout.concurrency}"
    if schedule.mode == "async":
        return f"{keys}, schedule.pool = {schedule.pool:g}, trainer.ranks = {recipe.trainer.ranks}"
    return (
        f"{keys}, rollout.groups_per_step = {rollout.groups_per_step}, "
        f"schedule.mode = {schedule.mode}"
    )


def _simulation_rows(
    recipe: Recipe, runs: tuple[SimulatedRun, ...]
) -> Iterator[tuple[str, list[str]]]:
    yield "minutes a step", [f"{run.step_s / 60:.1f}" for run in runs]
    yield "  rollout, minutes", [f"{run.mean('rollout_s') / 60:.1f}" for run in runs]
    yield "  training, seconds", [f"{run.mean('train_s'):.0f}" for run in runs]
    yield f"hours of {recipe.steps} steps", [f"{run.hours(recipe.steps):.1f}" for run in runs]
    for name in runs[0].parts:
        shares = [run.parts.get(name, 0.0) for run in runs]
        if max(shares) >= 0.005:
            yield (
                f"  waiting for {name}",
                [f"{share:.0%}" for share in shares],
            )
    episodes = recipe.rollout.groups_per_step * recipe.rollout.episodes_per_group
    each = 3600 * episodes / _num_gpus(recipe)
    yield "rollouts a GPU-hour", [f"{each / run.step_s:.1f}" for run in runs]
    yield "engines busy", [f"{run.engine_busy:.0%}" for run in runs]
    yield "trainer busy", [f"{run.trainer_busy:.0%}" for run in runs]
    yield "replies at once, an engine", [f"{run.replies_at_once:.1f}" for run in runs]
    yield "last tenth of episodes alone", [f"{run.tail_share:.0%}" for run in runs]
    yield "agents stopped by their budget", [f"{run.timed_out:.1%}" for run in runs]
    yield "tokens an episode", [f"{run.row_tokens:,.0f}" for run in runs]
    yield "tokens a step", [f"{run.mean('row_tokens') / 1e6:.2f}M" for run in runs]
    yield "sandbox-seconds an episode", [f"{run.sandbox_s:,.0f}" for run in runs]
    turns = [run.turns_per_s() for run in runs]
    yield "gateway turns/s, mean and most", [f"{mean:.1f}, {most:.1f}" for mean, most in turns]


def assumptions_table(
    rows: Iterable[Assumption], shown: Callable[[float], str] = "{:,.6g}".format
) -> Table:
    """Return a table of assumptions; `shown` formats their values."""
    title = "Assumptions: override one with --assume KEY=VALUE"
    whole = ("key", "value")
    table = simple_table(*whole, "unit", "from", whole=whole, numbers={"value"}, title=title)
    for row in rows:
        table.add_row(row.key, shown(row.value), row.unit, row.source)
    return table


def cases_table(result: Estimate) -> Table:
    """Return a table of the low, middle and high case."""
    names = [case.name for case in result.cases]
    table = simple_table("", *names, numbers=names, title="What the run costs")
    rows = {
        "sandbox-seconds an episode": [f"{c.episode_sandbox_seconds:,.0f}" for c in result.cases],
        "sandbox dollars an episode": [f"${c.episode_sandbox_dollars:.3f}" for c in result.cases],
        "sandbox dollars": [f"${c.sandbox_dollars:,.0f}" for c in result.cases],
        "hours": [f"{c.hours:,.1f}" if c.hours else "-" for c in result.cases],
        "GPU-hours": [f"{c.gpu_hours:,.0f}" for c in result.cases],
        "GPU dollars": [f"${c.gpu_dollars:,.0f}" for c in result.cases],
        "total dollars": [f"${c.total_dollars:,.0f}" for c in result.cases],
    }
    for name, texts in rows.items():
        style = "bold" if name.startswith("total") else ""
        table.add_row(name, *texts, style=style)
    return table
