"""Print the plan of `swerl train RECIPE --dry-run`: layout, memory, speed, cost, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from swerl.cli._output import console, print_json, simple_table
from swerl.core.errors import InputError
from swerl.engines.sglang import server_command
from swerl.plan.cost import Assumption, Estimate
from swerl.plan.layout import crossing
from swerl.plan.memory import MemoryPlan
from swerl.plan.parameters import active_params, model_params
from swerl.plan.plan import RecipePlan
from swerl.plan.simulation import Simulation
from swerl.plan.suggestions import Suggestion
from swerl.recipe.schema import Recipe
from swerl.rollout.wiring import sglang_launch

_FIGURES = ("layout", "memory", "disk", "cost", "notes", "obstacles", "absent")


def show_plan(recipe: Recipe, *, as_json: bool = False) -> bool:
    """Print the plan of a recipe; return whether the recipe has no fault.

    Raises RecipeError if it contradicts itself.
    """
    from swerl.plan.plan import plan

    planned = plan(recipe)
    simulated = planned.simulate()
    suggestions = planned.suggestions(simulated) if simulated else []
    if as_json:
        shown = {name: getattr(planned, name) for name in _FIGURES}
        rows = {name.replace(" ", "_"): text for name, text in _rows(planned)}
        speed = {"simulation": simulated, "suggestions": suggestions}
        print_json({"recipe": recipe.name, **rows, **shown, **speed})
        return not planned.obstacles
    for part in plan_parts(planned, simulated, suggestions):
        console().print(part)
    _show_ending(planned)
    return not planned.obstacles


def plan_parts(
    planned: RecipePlan, simulated: Simulation | None, suggestions: Sequence[Suggestion] = ()
) -> Iterator[RenderableType]:
    """Yield the plan's tables and lines, without faults and preparations."""
    title = f"Plan of {planned.recipe.name}"
    table = Table("", "", title=title, title_justify="left", box=SIMPLE, show_header=False)
    table.columns[0].no_wrap = True
    table.columns[0].style = "bold"
    for name, text in _rows(planned):
        table.add_row(name, text)
    yield table
    if planned.memory:
        yield memory_table(planned.memory)
        yield from host_and_cache(planned.memory)
    if simulated:
        yield ""
        yield simulation_table(planned.recipe, simulated)
        yield from (f"- {line}" for line in advice(planned.recipe, simulated, suggestions))
        yield (
            f"simulated by {len(simulated.assumptions)} assumptions, without evaluations and "
            "saving: `swerl cost estimate` lists them and changes them by --assume\n"
        )
    if planned.cost is None:
        yield "no dollars: the price book lacks a price; set it in cost.prices"
    elif any(case.total_dollars for case in planned.cost.cases):
        yield cases_table(planned.cost)
    for note in planned.notes:
        yield f"[yellow]note:[/] {note}"


def _show_ending(plan: RecipePlan) -> None:
    out = console()
    if plan.obstacles:
        _list_errors("[red]the recipe cannot be launched here:[/]", plan.obstacles)
    if plan.absent:
        _list_errors("[yellow]before the launch, on the machine that runs it:[/]", plan.absent)
    if not plan.obstacles:
        out.print("next: swerl doctor RECIPE on that machine, then the command without --dry-run")


def _list_errors(title: str, errors: Iterable[InputError]) -> None:
    console().print(title)
    for error in errors:
        console().print(f"- {escape(error.explained())}", soft_wrap=True)


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
    options = options.model_copy(update={"flags": (*planned, *options.flags)})
    size, saver = plan.layout.gpus_per_engine, plan.layout.colocated
    command = server_command(options, Path(), host="", port=0, num_gpus=size, saver=saver)
    addresses = ("--model-path", "--host", "--port")
    return " ".join(argument for argument in command[3:] if not argument.startswith(addresses))


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
        f"a checkpoint of {_bytes(disk.checkpoint)} every {when}, {disk.checkpoints} kept; "
        f"published weights of {_bytes(disk.weights)}, 2 kept; episodes of "
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


def simulation_table(recipe: Recipe, simulated: Simulation) -> Table:
    """Return the simulated speed of a run and what its steps wait for."""
    table = simple_table("", "value", numbers=["value"], title="The simulated run")
    hours = simulated.step_s * recipe.steps / 3600
    rows = {
        "minutes a step": f"{simulated.step_s / 60:.1f}",
        f"hours of {recipe.steps} steps": f"{hours:.1f}",
        **{
            f"  waiting for {name}": f"{share:.0%}"
            for name, share in simulated.waits.items()
            if share >= 0.005
        },
        "training, seconds a step": f"{simulated.train_s:.0f}",
        "rollouts a GPU-hour": f"{simulated.rollouts_per_gpu_hour:.1f}",
        "GPUs idle": f"{1 - simulated.gpu_busy:.0%}",
        "engines busy": f"{simulated.engine_busy:.0%}",
        "agents stopped by their budget": f"{simulated.timed_out:.1%}",
        "tokens an episode": f"{simulated.row_tokens:,.0f}",
        "sandbox-seconds an episode": f"{simulated.sandbox_s:,.0f}",
    }
    for name, text in rows.items():
        table.add_row(name, text, style="bold" if name.startswith("minutes") else "")
    return table


def advice(
    recipe: Recipe, simulated: Simulation, suggestions: Iterable[Suggestion]
) -> Iterator[str]:
    """Yield a line for each change that makes the run faster, and for a wrong cost section."""
    for suggestion in suggestions:
        changes = ", ".join(
            f"{key} = {_toml(value)} (now {_toml(now)})"
            for key, (value, now) in suggestion.changes.items()
        )
        note = f"; {suggestion.note}" if suggestion.note else ""
        yield f"{suggestion.gain:.1f} x the rollouts an hour: {changes}{note}"
    low, _, high = recipe.cost.step_minutes
    minutes = simulated.step_s / 60
    if not low <= minutes <= high:
        yield f"a step takes {minutes:.1f} minutes, and cost.step_minutes says {low:g} to {high:g}"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
