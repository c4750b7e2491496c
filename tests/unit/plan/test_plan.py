"""The 8-node recipe's plan: layout, memory, cost, and obstacles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swerl.cli._output import console
from swerl.cli._plan_view import show_plan
from swerl.core.errors import RecipeError, UnknownNameError
from swerl.core.task import write_tasks
from swerl.plan.parameters import model_params
from swerl.plan.plan import RecipePlan, kernel_modules, plan
from swerl.plan.shape import shape_of
from swerl.recipe.load import load
from swerl.recipe.schema import ModelSection, Recipe
from swerl.tasks import twin

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen35b_8node.toml"


def planned(*settings: str) -> RecipePlan:
    return plan(load([RECIPE], settings))


def refused(*settings: str) -> str:
    with pytest.raises(RecipeError) as caught:
        planned(*settings)
    assert caught.value.hint
    return f"{caught.value} | {caught.value.hint}"


def test_8_node_layout_is_the_published_one() -> None:
    found = planned()
    layout = found.layout
    assert layout.num_gpus == layout.ranks == 64
    assert (layout.tensor, layout.context, layout.data) == (2, 8, 4)
    assert (layout.expert, layout.expert_tensor, layout.expert_data) == (8, 1, 8)
    assert (layout.num_engines, layout.gpus_per_engine) == (8, 8)
    assert found.tokens_per_gpu == 12000
    assert (found.episodes_per_step, found.num_episodes) == (64, 6400)
    assert found.sandboxes_at_once == 64
    assert found.memory is not None and found.memory.fits
    assert [phase.name for phase in found.memory.phases] == ["rollout", "train", "update"]
    assert not any("of a GPU" in note for note in found.notes)


def test_a_layout_that_exceeds_the_gpu_is_refused_with_keys_that_save_memory() -> None:
    settings = ("trainer.expert_parallel=2", "trainer.offload_optimizer=false")
    message = refused(*settings, "trainer.recompute=true")
    assert "train needs" in message
    assert "of the 79.1 GiB of an H100" in message
    assert "raise trainer.expert_parallel" in message
    planned("trainer.expert_parallel=4", *settings[1:], "trainer.recompute=true")


def test_a_gpu_that_the_plan_does_not_know_is_noted_and_has_no_hours() -> None:
    found = planned("cluster.gpu=mi355x")
    assert any("compare by hand" in note for note in found.notes)
    assert found.simulate() is None


def test_plan_counts_a_runs_disk() -> None:
    disk = planned("eval.every=10").disk
    params = model_params(planned().shape).total
    assert (disk.checkpoint, disk.weights) == (12 * params, 2 * params)
    assert disk.checkpoints == 2 + 1
    tokens = 64 * 96_000
    assert disk.episodes == pytest.approx(tokens * (60 + 40 * 8), abs=1)
    assert disk.most == 4 * disk.checkpoint + 3 * disk.weights + 100 * disk.episodes


def test_plan_counts_groups_that_a_filter_leaves_out() -> None:
    found = planned("rollout.group_filter=zero-variance")
    assert found.episodes_begun > 1.5 * found.episodes_per_step
    assert found.sandboxes_at_once == 64


def test_fp32_on_gpus_is_planned_as_such_and_noted() -> None:
    settings = ("trainer.expert_parallel=64", "trainer.recompute=true")
    found = planned("trainer.dtype=fp32", *settings)
    assert found.memory is not None
    assert found.memory.train.parts["weights"] == pytest.approx(
        2 * planned(*settings).memory.train.parts["weights"]  # type: ignore[union-attr]
    )
    assert any("bf16 halves" in note for note in found.notes)


def test_twin_recipe_has_a_plan_without_gpus() -> None:
    found = plan(Recipe(name="twin"))
    assert (found.layout.num_gpus, found.layout.data, found.memory) == (0, 1, None)


def test_the_shape_is_read_from_the_model_folder_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"text_config": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, '
        '"vocab_size": 100, "intermediate_size": 128, "tie_word_embeddings": true}}'
    )
    shape = shape_of(ModelSection(path=tmp_path))
    assert (shape.head_dim, shape.num_kv_heads) == (16, 4)
    norms = 2 * (2 * 64 + 2 * 16) + 64
    matrices = 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert model_params(shape).total == matrices + norms


def test_unknown_model_names_the_nearest_and_the_way_out() -> None:
    with pytest.raises(UnknownNameError) as caught:
        planned("model.path=Qwen3.6-35B")
    assert "qwen3.6-35b-a3b" in caught.value.hint
    assert "config.json" in caught.value.hint


def test_only_gpus_for_linear_attention_require_its_kernels() -> None:
    def needed(name: str, *settings: str) -> tuple[str, ...]:
        recipe = load([RECIPE.with_name(f"{name}.toml")], settings)
        return kernel_modules(recipe, shape_of(recipe.model))

    assert needed("qwen35b_8node") == ("fla",)
    assert needed("qwen4b_1node") == needed("twin_cpu") == ()


def test_adapters_take_a_fraction_of_the_memory_of_all_weights() -> None:
    whole, lora = planned(), planned("trainer.lora.rank=8")
    assert whole.memory is not None and lora.memory is not None
    for part, most in (("gradients", 0.02), ("optimizer", 0.02), ("weights", 1.02)):
        assert lora.memory.train.parts[part] < most * whole.memory.train.parts[part]
    assert lora.disk.checkpoint < 0.02 * whole.disk.checkpoint


def test_adapters_of_no_layer_are_refused() -> None:
    dense = RECIPE.with_name("qwen4b_1gpu_lora.toml")
    with pytest.raises(RecipeError, match="Qwen3-4B has no layer"):
        plan(load([dense], ['trainer.lora.targets=["experts"]']))


def test_a_contradiction_is_refused_before_the_plan() -> None:
    assert "needs engines beside the trainer" in refused("schedule.mode=async")


def test_a_laptop_is_shown_layout_hours_bill_and_what_to_provide() -> None:
    found = planned()
    assert not found.obstacles
    texts = [str(error) for error in found.absent]
    assert len(texts) == 2
    assert "model.path = /models/Qwen3.6-35B-A3B is not a model folder" in texts[0]
    assert "cannot read task file tasks.certified.jsonl" in texts[1]
    with console().capture() as capture:
        assert show_plan(found.recipe)
    shown = " ".join(capture.get().split())
    wanted = ("= 64 GPUs", "context 8 x data 4", "12,000 a GPU", "$9,442", "Memory of a GPU, GiB")
    for text in (*wanted, "26.5 full contexts", "waiting for tools", "before the launch"):
        assert text in shown


def test_more_ranks_than_cores_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    (error,) = plan(load([RECIPE.with_name("twin_cpu.toml")], ["trainer.ranks=2"])).obstacles
    assert str(error) == "trainer.ranks = 2, but this machine has 1 cores"


def test_tasks_without_certificates_are_a_fault(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, twin.make_tasks(tmp_path / "twin", split="heldout", count=2, seed=0))
    few = (f"tasks.source={tasks}", "rollout.groups_per_step=2")
    (error,) = planned(*few).obstacles
    assert "2 of 2 tasks" in str(error) and "swerl tasks vet" in error.hint
    assert not planned(*few, "tasks.uncertified=true").obstacles


def test_every_missing_package_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swerl.plan.plan.find_spec", lambda name: None)
    hints = " ".join(error.hint for error in planned().obstacles)
    assert all(f"[{extra}]" in hints for extra in ("twin", "e2b", "cluster"))
