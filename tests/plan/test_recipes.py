"""Every recipe of the repository has a plan that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.plan.plan import RecipePlan, plan
from swerl.recipe.load import load

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
GPU_RECIPES = [path for path in RECIPES if load([path]).cluster.gpus_per_node]


def planned(path: Path) -> RecipePlan:
    return plan(load([path]))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_and_nothing_that_is_the_default(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    recipe = load([path])
    assert recipe.name.replace("-", "_") == path.stem or path.stem == "twin_cpu"


@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_a_gpu_recipe_fits_and_lasts_as_long_as_it_assumes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found = planned(path)
    simulated = found.simulate()
    assert simulated is not None and found.memory is not None
    assert found.memory.fits
    low, _, high = found.recipe.cost.step_minutes
    assert low <= simulated.own.step_s / 60 <= high
    assert not any("compare by hand" in note for note in found.notes)


def test_there_is_a_recipe_for_every_size() -> None:
    sizes = {planned(path).layout.num_gpus for path in GPU_RECIPES}
    assert sizes == {1, 8, 64}
