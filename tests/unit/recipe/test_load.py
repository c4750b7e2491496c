from pathlib import Path

import pytest

from swerl.core.errors import RecipeError
from swerl.recipe.check import check, check_replay
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_later_files_and_settings_override_earlier_ones(tmp_path: Path) -> None:
    first = _write(tmp_path, "a.toml", 'name = "a"\nsteps = 3\n[trainer]\nlr = 1e-3\nranks = 2\n')
    second = _write(tmp_path, "b.toml", "[trainer]\nlr = 2e-3\n")
    recipe = load([first, second], ["steps=7", "name=c"])
    assert (recipe.name, recipe.steps, recipe.trainer.lr, recipe.trainer.ranks) == ("c", 7, 2e-3, 2)


def test_a_plug_in_section_keeps_its_own_settings(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.toml", 'name = "a"\n[engine]\ntype = "sglang"\nurl = "http://x"\n')
    assert load([path]).engine.options == {"url": "http://x"}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('name = "a"\nstesp = 3\n', "unknown recipe key 'stesp'", "steps"),
        ('name = "a"\n[trainer]\nlearning = 1\n', "unknown recipe key 'trainer.learning'", "lr"),
        ('name = "a"\n[rollout]\ngroups_per_stp = 1\n', "groups_per_stp", "groups_per_step"),
        ("steps = 3\n", "has no 'name'", "name ="),
        ('name = "a"\nsteps = 0\n', "steps = 0", "docs/reference/recipe.md"),
        ('name = "a"\n[sandbox]\n', "has no 'sandbox.type'", "add"),
        ("name = [", "is not TOML", ""),
    ],
)
def test_a_wrong_key_is_named_with_what_to_do(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load([_write(tmp_path, "a.toml", text)])
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_a_missing_file_names_the_nearest_recipe(tmp_path: Path) -> None:
    _write(tmp_path, "twin_cpu.toml", 'name = "a"\n')
    with pytest.raises(RecipeError) as caught:
        load([tmp_path / "twin_cp.toml"])
    assert "twin_cpu.toml" in caught.value.hint


@pytest.mark.parametrize("setting", ["steps", "=3", "a..b=1"])
def test_a_setting_that_is_no_assignment_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(RecipeError, match="is not key=value"):
        load([_write(tmp_path, "a.toml", 'name = "a"\n')], [setting])


def test_experts_that_nobody_records_cannot_be_replayed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    replay = {
        "name": "x",
        "trainer": {"routing_replay": True},
        "engine": {"type": "sglang", "routed_experts": True},
        "model": {"family": "qwen3", "path": str(tmp_path)},
    }
    with pytest.raises(RecipeError, match="has no experts"):
        check(Recipe.model_validate(replay))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_experts": 8}')
    check_replay(Recipe.model_validate(replay))
