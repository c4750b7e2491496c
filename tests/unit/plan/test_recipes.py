"""Every recipe of the repository has a plan that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.cli._plan_view import advice
from swerl.plan.plan import RecipePlan, plan
from swerl.recipe.load import load

ROOT = Path(__file__).parents[3]
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
    assert low <= simulated.step_s / 60 <= high
    # A first call has time to compile its kernels.
    assert found.recipe.budgets.model_call_s >= 120
    assert not any("compare by hand" in note for note in found.notes)


def test_the_asynchronous_recipe_makes_thirty_rollouts_a_gpu_hour() -> None:
    simulated = planned(ROOT / "recipes" / "qwen35b_8node_async.toml").simulate()
    assert simulated is not None and simulated.rollouts_per_gpu_hour >= 30


def test_advice_names_other_values_than_those_of_the_recipe() -> None:
    found = planned(ROOT / "recipes" / "qwen35b_8node.toml")
    simulated = found.simulate()
    assert simulated is not None and simulated.gpu_busy < 0.3
    first, *_ = advice(found.recipe, simulated, found.suggestions(simulated))
    for text in ("schedule.mode = async (now sync)", "cluster.colocate = false (now true)"):
        assert text in first


def test_there_is_a_recipe_for_every_size() -> None:
    sizes = {planned(path).layout.num_gpus for path in GPU_RECIPES}
    assert sizes == {1, 8, 64}


def test_the_model_of_a_run_that_never_began_is_named_with_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    model, *_ = planned(ROOT / "recipes" / "sft_twin.toml").absent
    assert "runs/twin/initial_model is not a model folder" in str(model)
    assert "the run twin makes it" in model.hint
