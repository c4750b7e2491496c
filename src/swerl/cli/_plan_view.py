"""What `swerl train RECIPE --dry-run` shows: the plan, its costs, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from swerl.cli._output import console
from swerl.recipe.schema import Recipe

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swerl.plan.plan import Plan
    from swerl.plan.simulation.simulate import Simulation


def show_plan(recipe: Recipe) -> None:
    """Print the plan of a recipe. Raises RecipeError where it contradicts itself."""
    from swerl.plan.plan import plan

    found = plan(recipe)
    for part in plan_parts(found, found.simulate()):
        console().print(part)
    _show_ending(found)


def plan_parts(found: Plan, simulated: Simulation | None) -> Iterator[RenderableType]:
    """Yield the plan's tables and lines, but for what this version lacks."""
    from rich.box import SIMPLE
    from rich.table import Table

    from swerl.cli._memory_view import host_and_cache, memory_table
    from swerl.cli.cost import cases_table

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
        yield "no dollars: the price book lacks a price; say it in cost.prices"
    elif any(case.total_dollars for case in found.cost.cases):
        yield cases_table(found.cost)
        if simulated:
            yield _dollars_by(found.recipe, simulated)
    for note in found.notes:
        yield f"[yellow]note:[/] {note}"


def _time(recipe: Recipe, found: Simulation) -> Iterator[RenderableType]:
    from swerl.cli._simulation_view import outcome_table, remarks

    yield outcome_table(recipe, found)
    for remark in remarks(recipe, found):
        yield f"- {remark}"
    yield (
        f"these rest on {len(found.assumptions)} assumptions: `swerl cost simulate` lists them, "
        "with sources, and changes them by --set; with --from RUN it takes a real run's episodes"
    )


def _dollars_by(recipe: Recipe, found: Simulation) -> str:
    """Return what the run costs by the simulation, which knows neither low nor high case."""
    from swerl.plan.cost import estimate, from_recipe

    minutes, seconds = found.own.step_s / 60, found.own.sandbox_s
    settings = (f"step_minutes={minutes}", f"sandbox_seconds={seconds}")
    middle = estimate(from_recipe(recipe), settings).cases[1]
    return (
        f"by the simulation: {middle.hours:.1f} hours and {seconds:,.0f} sandbox-seconds an "
        f"episode, ${middle.total_dollars:,.0f} together"
    )


def _show_ending(plan: Plan) -> None:
    out = console()
    out.print(
        "checked: every key, time budgets inside each other, the parallel layout against the "
        "model's sizes, memory of every phase against the GPU, engines against nodes"
    )
    if not plan.obstacles:
        out.print("next: the same command without --dry-run")
        return
    out.print("[yellow]the recipe is consistent, but this version cannot launch it:[/]")
    for obstacle in plan.obstacles:
        out.print(f"- {obstacle}")


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "model", _model(plan)
    yield from _machines(plan)
    yield "parallel layout", _parallel(plan)
    yield "engines", _engines(plan)
    yield from _work(plan)
    yield "budgets", _budgets(plan.recipe)
    yield "disk", _disk(plan)


def _model(plan: Plan) -> str:
    from swerl.plan.parameters import active_params, model_params

    shape = plan.shape
    text = f"{shape.name}: {_count(model_params(shape).total)} parameters"
    if shape.num_experts:
        text += f", {_count(active_params(shape))} active, {shape.num_experts} experts a layer"
    return text


def _machines(plan: Plan) -> Iterator[tuple[str, str]]:
    layout = plan.layout
    if layout.num_gpus:
        gpu = plan.recipe.cluster.gpu
        nodes = "1 node" if layout.num_nodes == 1 else f"{layout.num_nodes} nodes"
        text = f"{nodes} x {layout.gpus_per_node} {gpu} = {_gpus(layout.num_gpus)}"
        yield "machines", text
    yield "trainer", f"{layout.ranks} {'rank' if layout.ranks == 1 else 'ranks'}"


def _parallel(plan: Plan) -> str:
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
    return text


def _engines(plan: Plan) -> str:
    layout = plan.layout
    kind = plan.recipe.engine.type
    if not layout.num_gpus:
        return f"{layout.num_engines} {kind} on CPU"
    place = "on the trainer's GPUs, in turn" if layout.colocated else "on GPUs of their own"
    return f"{layout.num_engines} {kind} of {_gpus(layout.gpus_per_engine)}, {place}"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _work(plan: Plan) -> Iterator[tuple[str, str]]:
    recipe, rollout = plan.recipe, plan.recipe.rollout
    part = "GPU" if plan.layout.num_gpus else "rank"
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


def _disk(plan: Plan) -> str:
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
