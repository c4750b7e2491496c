"""`swerl recipes` and `swerl plugins`: the recipes and the plug-ins that are installed."""

from __future__ import annotations

from itertools import takewhile

import typer

from swerl.cli._options import JsonOption
from swerl.cli._output import console, counted, print_json, safe, simple_table, with_docs
from swerl.core.plugins import found_plugins
from swerl.recipe.load import load, shipped
from swerl.tasks.datasets import built_in_names


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
