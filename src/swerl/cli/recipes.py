"""`swerl recipes`: list the recipes that come with swerl."""

from __future__ import annotations

from itertools import takewhile

from swerl.cli._options import JsonOption
from swerl.cli._output import console, print_json, safe, simple_table
from swerl.recipe.load import load, shipped


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
