"""`swerl reward`: try a reward on recorded Episodes, without sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import JsonOption, RunsOption
from swerl.cli._output import console, counted, print_json, safe, simple_table
from swerl.core.errors import InputError, SwerlError
from swerl.core.files import read_json
from swerl.core.task import Task, read_tasks
from swerl.recipe.load import recorded
from swerl.rollout import rescore, wiring
from swerl.rollout.rescore import Comparison, Distribution
from swerl.rollout.reward import reward_of
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
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Compute a reward over recorded Episodes, and compare it with the recorded one."""
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
    if as_json:
        print_json(comparison)
    else:
        _show(comparison, chosen)


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
