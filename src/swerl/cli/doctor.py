"""`swerl doctor | recipes | plugins`: check this machine; list recipes and plug-ins."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from pathlib import Path

import typer
from rich.markup import escape

from swerl.checks.doctor import Check, examine, twin_runs
from swerl.cli._options import JsonOption, RunsOption
from swerl.cli._output import console, counted, print_json, safe, simple_table, with_docs
from swerl.cli._run import NARROW, waiting
from swerl.core.plugins import found_plugins
from swerl.recipe.load import load, shipped
from swerl.tasks.datasets import built_in_names

_COLOURS = {"ok": "green", "warn": "yellow", "missing": "red"}


def doctor(
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Check this machine and print what to fix; exit code 1 if the twin cannot run."""
    with waiting("opening a sandbox, importing torch"):
        checks = asyncio.run(examine(runs))
    good = twin_runs(checks)
    if as_json:
        print_json({"twin_runs": good, "checks": checks})
    else:
        _show(checks, good)
    if not good:
        raise typer.Exit(1)


def _show(checks: list[Check], good: bool) -> None:
    table = simple_table("", "check", "found", "enables", whole=("", "check"))
    for check in checks:
        state = f"[{_COLOURS[check.state]}]{check.state}[/]"
        table.add_row(state, check.name, escape(check.found), check.enables)
        if console().width < NARROW:  # a table would break words
            console().print(f"{state} {check.name}: {escape(check.found)}; for {check.enables}")
    if console().width >= NARROW:
        console().print(table)
    for check in checks:
        if check.fix:
            colour = _COLOURS[check.state]
            console().print(f"[{colour}]{check.name}[/]: {escape(check.fix)}", soft_wrap=True)
    if good:
        console().print("next: swerl train twin_cpu")
    else:
        console().print("[red]the twin cannot run here[/]: fix the missing parts first")


def recipes(as_json: JsonOption = False) -> None:
    """List the recipes that come with swerl; `swerl train NAME` runs one."""
    rows = []
    for path in shipped():
        recipe = load([path])
        lines = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
        sentence = " ".join(line.lstrip("# ") for line in lines).partition(". ")[0]
        gpus = recipe.cluster.nodes * recipe.cluster.gpus_per_node
        rows.append({"name": path.stem, "gpus": gpus, "about": sentence, "file": str(path)})
    if as_json:
        print_json(rows)
        return
    table = simple_table("recipe", "GPUs", "for", whole=("recipe",))
    for row in rows:
        table.add_row(str(row["name"]), str(row["gpus"] or "none"), safe(str(row["about"])))
    console().print(table)
    console().print("next: swerl train twin_cpu --dry-run")


def plugins(as_json: JsonOption = False) -> None:
    """List the parts that other packages add to swerl; exit code 1 if one cannot be used."""
    found = found_plugins({"converters": built_in_names()})
    if as_json:
        print_json(found)
    else:
        table = simple_table("kind", "name", "package", "entry point", whole=("name",))
        for each in found:
            package = f"{each.package} {each.version}"
            table.add_row(each.kind, safe(each.name), safe(package), safe(each.value))
        if found:
            console().print(table)
        console().print(f"{counted(len(found), 'plug-in')} found")
        for each in found:
            if each.problem:
                console().print(f"[red]not usable:[/] {safe(each.problem)}", soft_wrap=True)
        console().print(with_docs("next: docs/guides/plug-ins.md explains how to write one"))
    if any(each.problem for each in found):
        raise typer.Exit(1)
