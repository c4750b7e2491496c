"""The 8-node recipe's plan, and every layout that must be refused before money is spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.cli._output import console
from swerl.cli._plan_view import show_plan
from swerl.errors import RecipeError, UnknownNameError
from swerl.recipe.check import check
from swerl.recipe.load import load
from swerl.recipe.schema import ModelSection, Recipe
from swerl.training.plan import Plan, plan
from swerl.training.shape import shape_of

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen35b_8node.toml"


def planned(*settings: str) -> Plan:
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


def test_8_node_plan_carries_its_bill() -> None:
    cost = planned().cost
    assert cost is not None
    assert [round(case.total_dollars, -2) for case in cost.cases] == [5600, 7300, 9400]


def test_8_node_memory_fits_an_h100_by_estimate() -> None:
    found = planned().memory
    assert found is not None
    assert found.weights == pytest.approx(9.8, abs=0.1)
    assert found.optimizer == 0
    assert 30 < found.training < 72
    assert not any("GiB a GPU" in note for note in planned().notes)


def test_memory_estimate_grows_without_its_savings() -> None:
    bare = planned("trainer.offload_optimizer=false", "trainer.recompute=false").memory
    saved = planned().memory
    assert bare is not None
    assert saved is not None
    assert bare.optimizer > 5
    assert bare.activations > 10 * saved.activations


def test_layout_that_needs_more_than_the_gpu_has_is_noted() -> None:
    assert any("of 80 GiB a GPU" in note for note in planned("trainer.expert_parallel=2").notes)


def test_8_node_plan_says_what_this_version_lacks() -> None:
    told = "\n".join(planned().obstacles)
    for lack in ("context_parallel", "expert_parallel", "linear attention", "on CPU"):
        assert lack in told


def test_launching_what_can_only_be_planned_is_refused() -> None:
    with pytest.raises((RecipeError, UnknownNameError)):
        check(load([RECIPE]))
    with pytest.raises(RecipeError, match="context_parallel"):
        check(Recipe.model_validate({"name": "r", "trainer": {"context_parallel": 2, "ranks": 2}}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["trainer.ranks=32"], "the cluster has 64 GPUs"),
        (["cluster.colocate=false"], "leave no GPU for an engine"),
        (["trainer.tensor_parallel=3"], "no multiple of tensor 3"),
        (["trainer.context_parallel=7"], "context 7"),
        (["trainer.pipeline_parallel=16", "trainer.context_parallel=1"], "layers: 40"),
        (["cluster.gpus_per_node=4", "cluster.nodes=16", "trainer.tensor_parallel=8"], "spans"),
        (["trainer.expert_parallel=3"], "experts: 256"),
        (["trainer.expert_parallel=128"], "no multiple of expert 128"),
        (["trainer.expert_tensor_parallel=3"], "expert's width: 512"),
        (["trainer.expert_parallel=1"], "trains wrong weights without an error"),
        (["cluster.gpus_per_engine=5"], "no multiple of cluster.gpus_per_engine"),
        (
            [
                "cluster.nodes=4",
                "cluster.gpus_per_node=6",
                "trainer.ranks=24",
                "trainer.context_parallel=4",
                "trainer.expert_parallel=4",
                "trainer.tokens_per_micro_batch=24000",
                "cluster.gpus_per_engine=4",
            ],
            "straddle nodes of 6",
        ),
        (["rollout.groups_per_step=1", "rollout.episodes_per_group=2"], "ranks idle"),
        (["trainer.tokens_per_micro_batch=11999"], "set trainer.tokens_per_micro_batch to 12000"),
        (["rollout.max_context_tokens=95000"], "does not divide the context: 95000"),
        (["rollout.max_new_tokens=96000"], "no room for a prompt"),
        (["budgets.tool_s=2000"], "must be below"),
    ],
)
def test_layout_that_cannot_run_is_one_clear_error(settings: list[str], words: str) -> None:
    assert words in refused(*settings)


def test_dense_model_with_expert_ranks_is_refused() -> None:
    assert "has no experts" in refused("model.path=Qwen3-8B")


def test_expert_tensor_equal_to_tensor_allows_one_expert_rank() -> None:
    found = planned("trainer.expert_parallel=1", "trainer.expert_tensor_parallel=2")
    assert found.layout.expert_data == 32


def test_engine_of_two_whole_nodes_is_fine() -> None:
    assert planned("cluster.gpus_per_engine=16").layout.num_engines == 4


def test_gpus_of_their_own_leave_engines_the_rest() -> None:
    found = planned("cluster.colocate=false", "cluster.nodes=12")
    assert (found.layout.ranks, found.layout.num_engines) == (64, 4)


def test_twin_recipe_has_a_plan_without_gpus() -> None:
    found = plan(Recipe(name="twin"))
    assert (found.layout.num_gpus, found.layout.data, found.memory) == (0, 1, None)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3-8B", 8.19, 8.19),
        ("Qwen3-32B", 32.76, 32.76),
        ("Qwen3-30B-A3B", 30.5, 3.35),
        ("Qwen3.6-35B-A3B", 34.7, 3.45),
    ],
)
def test_parameter_counts_match_the_published_ones(
    name: str, billions: float, active: float
) -> None:
    shape = shape_of(ModelSection(path=Path(name)))
    assert shape.params / 1e9 == pytest.approx(billions, abs=0.05)
    assert shape.active_params / 1e9 == pytest.approx(active, abs=0.01)


def test_shape_is_read_from_the_model_folder_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"text_config": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, '
        '"vocab_size": 100, "intermediate_size": 128, "tie_word_embeddings": true}}'
    )
    shape = shape_of(ModelSection(path=tmp_path))
    assert (shape.head_dim, shape.num_kv_heads) == (16, 4)
    assert shape.params == 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)


def test_unknown_model_names_the_nearest_and_the_way_out() -> None:
    with pytest.raises(UnknownNameError) as caught:
        planned("model.path=Qwen3.6-35B")
    assert "qwen3.6-35b-a3b" in caught.value.hint
    assert "config.json" in caught.value.hint


def test_plan_is_shown_with_layout_bill_and_obstacles() -> None:
    with console().capture() as capture:
        show_plan(load([RECIPE]))
    shown = " ".join(capture.get().split())
    for text in ("= 64 GPUs", "context 8 x data 4", "12,000 a GPU", "$9,413", "cannot launch it"):
        assert text in shown
