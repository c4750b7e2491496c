from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import RecipeError, UnknownNameError
from swerl.recipe.check import check, check_replay, check_schedule
from swerl.recipe.load import load
from swerl.recipe.schema import BudgetsSection, PluginSection, Recipe, ScheduleSection


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


def test_text_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is not TOML"):
        load([_write(tmp_path, "a.toml", "name = [")])


@pytest.mark.parametrize("setting", ["steps", "=3", "a..b=1"])
def test_a_setting_that_is_no_assignment_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(RecipeError, match="is not key=value"):
        load([_write(tmp_path, "a.toml", 'name = "a"\n')], [setting])


@pytest.mark.parametrize(
    ("budgets", "inner", "outer"),
    [
        ({"tool_s": 500}, "tool_s", "agent_s"),
        ({"model_call_s": 60}, "model_call_s", "tool_s"),
        ({"sandbox_s": 100}, "episode_s", "sandbox_s"),
        ({"episode_s": 200}, "agent_s + grading_s", "episode_s"),
    ],
)
def test_budgets_that_do_not_nest_are_refused(
    budgets: dict[str, float], inner: str, outer: str
) -> None:
    recipe = Recipe(name="a", budgets=BudgetsSection.model_validate(budgets))
    with pytest.raises(RecipeError) as caught:
        check(recipe)
    assert inner in str(caught.value)
    assert outer in f"{caught.value} {caught.value.hint}"


def test_an_unknown_plug_in_names_the_nearest() -> None:
    recipe = Recipe(name="a", algorithm=PluginSection(type="gsp"))
    with pytest.raises(UnknownNameError) as caught:
        check(recipe)
    assert "gspo" in caught.value.hint


def test_an_unknown_plug_in_setting_names_the_nearest() -> None:
    section = PluginSection.model_validate({"type": "gspo", "clip_hgih": 1.0})
    with pytest.raises(RecipeError) as caught:
        check(Recipe(name="a", algorithm=section))
    assert "clip_high" in caught.value.hint


def test_sandboxes_need_machines_to_be_spread_over() -> None:
    spread = {"name": "x", "cluster": {"sandbox_cpus": 4}}
    with pytest.raises(RecipeError, match="sandbox_cpus = 4 with "):
        check(Recipe.model_validate(spread))
    spread["cluster"] = {"sandbox_cpus": 4, "launcher": "ray"}
    check(Recipe.model_validate(spread))
    with pytest.raises(RecipeError, match="'e2b' run elsewhere"):
        check(Recipe.model_validate({**spread, "sandbox": {"type": "e2b"}}))


def test_experts_that_nobody_records_cannot_be_replayed(tmp_path: Path) -> None:
    replay = {"name": "x", "trainer": {"routing_replay": True}}
    with pytest.raises(RecipeError, match="does not record its experts"):
        check(Recipe.model_validate(replay))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    replay |= {
        "engine": {"type": "sglang", "routed_experts": True},
        "model": {"family": "qwen3", "path": str(tmp_path)},
    }
    with pytest.raises(RecipeError, match="has no experts"):
        check(Recipe.model_validate(replay))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_experts": 8}')
    check_replay(Recipe.model_validate(replay))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cluster": {"gpus_per_node": 8}}, "needs engines beside the trainer"),
        ({"engine": {"type": "sglang", "pause_mode": "abort"}}, "would cut off replies"),
        (
            {"engine": {"type": "vllm"}, "cluster": {"gpus_per_node": 8, "colocate": False}},
            "uses no GPUs of the run",
        ),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(keys: dict[str, Any], message: str) -> None:
    recipe = Recipe.model_validate({"name": "a", "schedule": {"mode": "async"}, **keys})
    with pytest.raises(RecipeError, match=message):
        check_schedule(recipe)
    update: dict[str, Any] = {"schedule": ScheduleSection(), "engine": PluginSection(type="sglang")}
    check_schedule(recipe.model_copy(update=update))
