"""`swerl train tune`: search the plan that makes the most Episodes an hour."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swerl.cli._options import ForceOption, JsonOption, RecipeSettingsOption, require_new
from swerl.cli._output import console, print_json, simple_table
from swerl.core.errors import InputError, RecipeError

if TYPE_CHECKING:
    from swerl.plan.tune import TunedPlan
    from swerl.recipe.schema import Recipe

_WHY = {
    "cluster.colocate": "apart, engines and trainer work at the same time",
    "cluster.gpus_per_engine": "few make many engines, many a large cache",
    "trainer.ranks": "the other GPUs sample",
    "schedule.mode": "async: a slow Episode delays no other Group",
    "schedule.pool": "Groups under way keep engines busy during a step",
    "rollout.groups_per_step": "a large batch shares the fixed seconds of a step",
    "rollout.concurrency": "Episodes, and so sandboxes, at once",
}
_RESULTS = {
    "rollouts an hour": "{:,.0f}",
    "seconds a step": "{:,.1f}",
    "dollars of 1,000 rollouts": "{:,.0f}",
    "waits longest for": "{}",
    "engines busy": "{:.0%}",
    "trainer busy": "{:.0%}",
}


def tune(
    recipes: Annotated[
        list[Path], typer.Argument(help="Recipe files; later ones override earlier ones.")
    ],
    settings: RecipeSettingsOption = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="GPUs; default: the recipe's. 0: a new run on CPU, with --from."),
    ] = None,
    dollars: Annotated[float | None, typer.Option(help="Dollars of the whole run.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Fit to a run; without --gpus, for its next start."
        ),
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A recipe key that stays as it is.")
    ] = None,
    sandboxes: Annotated[
        int | None, typer.Option(min=1, help="Most Episodes at once; default: 4 x if rented.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", help="File for the best plan's keys, a recipe.")
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Search layout, batch, schedule and concurrency for the most Episodes an hour."""
    from swerl.plan.tune import PlanSearch
    from swerl.recipe.load import load, read_settings, written

    if out:
        require_new(out, force=force)
    given = load(recipes, settings or ())
    recipe = _on_gpus(given, gpus, fits=run is not None)
    fitted = _fit(str(run)) if run else {}
    search = PlanSearch(
        recipe, keep or (), sandboxes, resumed=run is not None and gpus is None, **fitted
    )
    sets = dict(_leaves(read_settings(settings or ())))
    before = _Before(given, sets, dict(_leaves(written(recipes))))
    best = search.best()
    plans = [_facts(each, before, dollars) for each in best]
    own = _facts(search.own, before, dollars) if search.own else None
    if plans[0]["changes"].get("steps") == 0:
        raise InputError(f"--dollars {dollars:g} does not pay one step", hint="give more")
    if as_json:
        fit = fitted.get("settings", ())
        print_json({"recipe": given.name, "own": own, "plans": plans, "fit": fit, "file": out})
    _show(before, own, plans)
    _propose(best[0], search.shorter(best[0]))
    if out:
        out.write_text(_overlay(before, recipes, plans[0]))
    files = " ".join(map(str, (*recipes, *([out] if out else ()))))
    after = f"swerl train {files} --dry-run" if out else "the same command with -o FILE"
    console().print(f"next: {after}", soft_wrap=True)


def _on_gpus(given: Recipe, gpus: int | None, *, fits: bool) -> Recipe:
    from swerl.plan.tune import changed

    node = given.cluster.gpus_per_node
    if given.sft.sources or not (node or (fits and not gpus)):
        raise RecipeError(
            f"{given.name} has no GPUs to sample on, so its speed is unknown",
            hint="name a recipe with cluster.gpus_per_node, or a run with --from",
        )
    size = min(node, gpus or node) or 1
    if gpus is not None and (gpus < (1 if node else 0) or gpus % size):
        raise InputError(
            f"--gpus {gpus} is no number of nodes of {node} GPUs",
            hint="give a multiple, or --set cluster.gpus_per_node",
        )
    nodes = {"cluster.nodes": (gpus or 0) // size, "cluster.gpus_per_node": size}
    return changed(given, nodes) if gpus and node else given


def _fit(run: str) -> dict[str, Any]:
    """Return the Episodes and assumptions of a run, given its name or folder."""
    from swerl.cli.train_status import find_run, stored_recipe
    from swerl.plan.plan import plan
    from swerl.plan.simulation.fit import fit_run, measured

    root = find_run(run, Path("runs"))
    source, value = fit_run(root, plan(stored_recipe(root)))
    settings = tuple(f"{key}={number:.4g}" for key, number in value.items())
    kept = ", ".join(each for each in settings if not each.endswith(("=0", "e+30")))
    console().print(f"fitted to {run}, whose step took {measured(root)['step_s']:.1f} s: {kept}")
    return {"source": source, "settings": settings}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


@dataclass(frozen=True, slots=True)
class _Before:
    """The recipe files' values, which alone need not be a recipe: a `--set` may complete them."""

    given: Recipe
    """With `--set`."""
    sets: Mapping[str, Any]
    files: Mapping[str, Any]

    def of(self, key: str) -> Any:
        """Return a key's value; empty text if only `--set` gives it."""
        from swerl.plan.tune import value_of

        return self.files.get(key, "") if key in self.sets else value_of(self.given, key)


def _facts(tuned: TunedPlan, before: _Before, dollars: float | None) -> dict[str, Any]:
    """Return a plan's changes to the recipe files, `--set` included, and its results."""
    from swerl.plan.tune import value_of

    try:
        each = tuned.dollars_per_step
    except InputError:
        if dollars is not None:
            raise
        each = None
    keys = ("cluster.nodes", "cluster.gpus_per_node", *tuned.changes)
    values = {**before.sets, **{key: value_of(tuned.recipe, key) for key in keys}}
    changes = {key: value for key, value in values.items() if value != before.of(key)}
    if dollars is not None and each:
        steps = min(tuned.recipe.steps, int(dollars / each))
        changes |= {"cost.max_dollars": dollars, "steps": steps}
    run, rate, step_s = tuned.run, tuned.episodes_per_hour, tuned.step_s
    thousand = each and 1000 * each / (rate * step_s / 3600)
    waits = f"{run.bottleneck}, {run.parts[run.bottleneck]:.0%}"
    shown = (rate, step_s, thousand, waits, run.engine_busy, run.trainer_busy)
    return {"changes": changes, **dict(zip(_RESULTS, shown, strict=True))}


def _show(before: _Before, own: Mapping[str, Any] | None, plans: Sequence[dict[str, Any]]) -> None:
    names = ("recipe", *map(str, range(1, len(plans) + 1)))
    table = simple_table("", *names, numbers=names, title=f"The best plans of {before.given.name}")
    for key in sorted({key for each in plans for key in each["changes"]}):
        cells = (_text(each["changes"].get(key, "")) for each in plans)
        table.add_row(key, _text(before.of(key)), *cells)
    table.add_section()
    for name, form in _RESULTS.items():
        values = [each and each[name] for each in (own, *plans)]
        table.add_row(name, *("-" if value is None else form.format(value) for value in values))
    console().print(table)
    if own:
        times = plans[0]["rollouts an hour"] / own["rollouts an hour"]
        console().print(f"- plan 1 makes {times:.2f} x the recipe's rollouts an hour")
    console().print("- simulated from assumptions: `swerl cost simulate` lists them")


def _propose(best: TunedPlan, shorter: TunedPlan | None) -> None:
    """Print the gain of a shorter budget, which is never searched: it changes the result."""
    if shorter is None:
        return
    now, then = best.recipe.budgets.agent_s, shorter.recipe.budgets.agent_s
    gain, few, many = best.step_s / shorter.step_s, best.run.timed_out, shorter.run.timed_out
    console().print(
        f"- not applied: budgets.agent_s = {then:g} (now {now:g}) makes plan 1 {gain:.2f} x as "
        f"fast and stops {many:.0%} of the rollouts (now {few:.0%}), so it changes what is learned",
        soft_wrap=True,
    )


def _text(value: Any) -> str:
    """Return a value as in a recipe."""
    return "" if value == "" else "none" if value is None else json.dumps(value)


def _overlay(before: _Before, recipes: Sequence[Path], best: Mapping[str, Any]) -> str:
    """Return the changed keys as a recipe file, each with its value before and a reason."""
    lines = [
        "# Keys that `swerl train tune` changed in " + " ".join(map(str, recipes)) + ".",
        f"# Simulated: {best['rollouts an hour']:,.0f} rollouts an hour; the run waits longest for",
        f"# {best['waits longest for']} of its time.",
    ]
    last = ""
    for key, value in sorted(best["changes"].items(), key=lambda item: ("." in item[0], item[0])):
        section, _, name = key.rpartition(".")
        lines += ["", f"[{section}]"] if section != last else []
        last = section
        why = _WHY.get(key, "paid for" if section in ("", "cost") else "fits and is fastest")
        lines.append(f"{name} = {_text(value)}  # was {_text(before.of(key)) or 'not set'}: {why}")
    return "\n".join(lines) + "\n"
