"""Every recipe has a plan, and the docs show it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.cli import _plan_pages
from swerl.plan.plan import Plan, plan
from swerl.recipe.load import load

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
GPU_RECIPES = [path for path in RECIPES if load([path]).cluster.gpus_per_node]


@pytest.mark.parametrize("name", [_plan_pages.INDEX, *(f"plan-{p.stem}" for p in GPU_RECIPES)])
def test_the_page_of_a_plan_is_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / f"{name}.md").read_text()
    command = f"python -m swerl.cli._plan_pages {name} > docs/{name}.md"
    assert page == _plan_pages.as_markdown(name), f"run: {command}"


def planned(path: Path) -> Plan:
    return plan(load([path]))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_and_nothing_that_is_the_default(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    recipe = load([path])
    assert recipe.name.replace("-", "_") == path.stem or path.stem == "twin_cpu"


@pytest.mark.parametrize("name", [path.stem for path in GPU_RECIPES])
def test_a_gpu_recipe_fits_and_lasts_as_long_as_it_assumes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found, simulated = _plan_pages.planned(name)
    assert found.memory is not None
    assert found.memory.fits
    low, _, high = found.recipe.cost.step_minutes
    assert low <= simulated.own.step_s / 60 <= high
    assert not any("compare by hand" in note for note in found.notes)


def test_there_is_a_recipe_for_every_size() -> None:
    sizes = {planned(path).layout.num_gpus for path in GPU_RECIPES}
    assert sizes == {1, 8, 64}
