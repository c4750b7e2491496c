"""`swerl reward`: try a reward, and a loss, on recorded Episodes, without sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli import _run
from swerl.cli._options import JsonOption, RunsOption
from swerl.cli._output import console, counted, print_json, safe, simple_table
from swerl.core import plugins
from swerl.core.errors import InputError, SwerlError
from swerl.core.files import read_json
from swerl.core.task import Task, read_tasks
from swerl.recipe.load import read_settings, recorded
from swerl.recipe.schema import Recipe
from swerl.recipe.sections import PluginSection
from swerl.rollout import rescore, wiring
from swerl.rollout.rescore import Comparison, Distribution
from swerl.rollout.reward import reward_of
from swerl.runs import history
from swerl.runs.index import RECIPE, FoundRun, run_at

_NUM_SHOWN = 10
_ROWS: tuple[tuple[str, Callable[[Distribution], float]], ...] = (
    ("mean", lambda rewards: rewards.mean),
    ("standard deviation", lambda rewards: rewards.deviation),
    ("lowest", lambda rewards: rewards.lowest),
    ("median", lambda rewards: rewards.median),
    ("highest", lambda rewards: rewards.highest),
    ("different values", lambda rewards: rewards.num_values),
    ("Groups with a signal", lambda rewards: rewards.groups_with_signal),
    ("correlation with length", lambda rewards: rewards.length_bias),
)


def reward(
    function: Annotated[
        str, typer.Argument(metavar="REWARD", help="A reward: my.py, my.py:function, or a name.")
    ],
    run: Annotated[str, typer.Argument(help="A run, an evaluation, or a folder of Episodes.")],
    tasks: Annotated[
        Path | None, typer.Option(help="Task file of the Episodes; by default that of the run.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Take a step of the run again: algorithm.type=mine.py, algorithm.KEY=VALUE.",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Step to take again; by default the last one possible.")
    ] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Compute a reward, or with --set a loss, over what a run recorded, and compare it.

    The loss is that of one recorded step, with the weights from before it and this reward.
    """
    places = (runs / run, Path(run))
    chosen = next((it for place in places if place.is_dir() and (it := run_at(place))), None)
    if chosen is None:
        raise InputError(
            f"{run} is no run and no folder of Episodes",
            hint="`swerl train status` lists the runs; `swerl rollout` prints its folder",
        )
    rule = reward_of(function)
    stored = chosen.root / RECIPE
    section = rescore.penalties(read_json(stored) if stored.is_file() else {})
    comparison = rescore.rescore(chosen, rule, _tasks_of(chosen, tasks), section)
    if as_json and not settings:
        print_json(comparison)
    elif not as_json:
        _show(comparison, chosen)
    if settings:
        _take_again(comparison, chosen, _with_algorithm(recorded(stored), settings), step, as_json)


def _with_algorithm(recipe: Recipe, settings: list[str]) -> Recipe:
    """Return the run's recipe with keys of its algorithm changed; a `type` replaces it whole."""
    given = read_settings(settings)
    keys = given.pop("algorithm", {})
    if given or not isinstance(keys, dict):
        raise InputError(
            f"--set takes keys of the algorithm here, not {' '.join(given) or keys}",
            hint="for example --set algorithm.type=gspo",
        )
    if "type" in keys:
        keys["type"] = plugins.absolute(keys["type"])
    else:
        keys = recipe.algorithm.model_dump() | keys
    return recipe.model_copy(update={"algorithm": PluginSection.model_validate(keys)})


def _take_again(
    comparison: Comparison, run: FoundRun, recipe: Recipe, step: int | None, as_json: bool
) -> None:
    from swerl.training import retake

    number = retake.step_to_retake(run.root, step)
    before = history.read(run.root / "events.jsonl").steps.get(number, {})
    with _run.waiting(f"taking step {number} again with {safe(recipe.algorithm.title)}"):
        after = _run.run(
            retake.retake(recipe, run.root, number, comparison.episodes),
            after="nothing was written",
        )
    if as_json:
        figures = {"step": number, "recorded": before, "retaken": after}
        print_json({"rewards": comparison, "loss": figures})
    else:
        _show_loss(number, before, after)


def _show_loss(step: int, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    numbers = ("recorded", "with this loss")
    table = simple_table("", *numbers, title=f"step {step} again", numbers=numbers)
    for name, value in after.items():
        table.add_row(name, f"{before[name]:.4g}" if name in before else "", f"{value:.4g}")
    console().print(table)


def _tasks_of(run: FoundRun, file: Path | None) -> Callable[[str], Task | None]:
    """Return a function that finds a Task by its id, in the given file or in the run's own."""

    @cache
    def known() -> dict[str, Task]:
        if file:
            return {task.id: task for task in read_tasks(file)}
        if not run.is_trained:
            return {}
        try:
            train, evals = wiring.tasks_of(recorded(run.root / RECIPE), run.root / "tasks")
        except SwerlError as error:
            hint = "name the Task file with --tasks FILE"
            raise InputError(
                f"the Tasks of {run.root} are not there: {error}", hint=hint
            ) from error
        return {task.id: task for task in chain(train, *evals.values())}

    return lambda name: known().get(name)


def _show(comparison: Comparison, run: FoundRun) -> None:
    out = console()
    num_episodes = counted(len(comparison.episodes), "Episode")
    title = f"{num_episodes} in {counted(comparison.num_groups, 'Group')}"
    numbers = ("recorded", "this reward")
    table = simple_table("", *numbers, title=title, numbers=numbers)
    for name, value in _ROWS:
        table.add_row(
            name, f"{value(comparison.recorded):.4g}", f"{value(comparison.rewarded):.4g}"
        )
    out.print(table)
    for reason, count in comparison.left_out.items():
        out.print(f"left out: {counted(count, 'Episode')}, {safe(reason)}")
    if reversed_groups := comparison.reversed_groups:
        groups = counted(len(reversed_groups), "Group")
        out.print(f"{groups} with an attempt whose advantage changes its sign")
    changed = comparison.most_changed(_NUM_SHOWN)
    if not changed:
        out.print("No Episode's reward changes.")
        return
    columns = ("recorded", "this reward", "tokens")
    table = simple_table("Episode", "verdict", *columns, numbers=columns, whole=columns)
    for episode in changed:
        rewards = (f"{episode.recorded:.4g}", f"{episode.reward:.4g}")
        name = safe(str(episode.folder.relative_to(run.root)))
        table.add_row(name, episode.verdict, *rewards, f"{episode.num_tokens:,}")
    out.print(table)
    out.print(f"next: swerl view {safe(str(changed[0].folder))}")
