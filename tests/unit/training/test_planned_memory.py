"""The memory plan: parameters to the last one, bytes by hand, and a real Megatron model's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swerl.core.errors import RecipeError
from swerl.core.learning import Batch
from swerl.plan.activations import Splits, activation_bytes, layer_bytes
from swerl.plan.layout import Layout, layout
from swerl.plan.memory import (
    kv_cache,
    plan_memory,
    token_bytes,
    training_state,
)
from swerl.plan.parameters import active_params, model_params, rank_params
from swerl.plan.plan import plan
from swerl.plan.shape import Shape, shape_from_config, shape_of
from swerl.recipe.load import load
from swerl.recipe.schema import ModelSection, Recipe
from tests.unit.training.rank.activation_rank import CONFIGS

pytestmark = pytest.mark.integration

MakeBatch = Callable[..., Batch]
RECIPE = Path(__file__).parents[3] / "recipes" / "qwen35b_8node.toml"
ONE_NODE = {
    "name": "dense",
    "model": {"path": "Qwen3-8B", "family": "qwen3"},
    "trainer": {
        "ranks": 8,
        "tensor_parallel": 2,
        "dtype": "bf16",
        "recompute": True,
        "tokens_per_micro_batch": 32768,
    },
    "rollout": {"max_context_tokens": 32768, "max_new_tokens": 8192},
    "cluster": {"gpus_per_node": 8, "gpus_per_engine": 2},
    "engine": {"type": "sglang"},
}
GIB = 2**30


def eight_nodes(*settings: str) -> tuple[Recipe, Shape, Layout]:
    recipe = load([RECIPE], settings)
    shape = shape_of(recipe.model)
    return recipe, shape, layout(recipe, shape)


@pytest.mark.parametrize(
    ("name", "params", "active"),
    [
        ("Qwen3-0.6B", 596_049_920, 0.60),
        ("Qwen3-4B", 4_022_468_096, 4.02),
        ("Qwen3-8B", 8_190_735_360, 8.19),
        ("Qwen3-30B-A3B", 30_532_122_624, 3.35),
        ("Qwen3.6-35B-A3B", 34_660_610_688, 3.45),
        ("GLM-4.5-Air", 106_852_245_504, 13.42),
        ("GLM-4.6", 352_797_814_784, 33.63),
    ],
)
def test_parameter_counts_are_those_of_transformers_models(
    name: str, params: int, active: float
) -> None:
    shape = shape_of(ModelSection(path=Path(name)))
    assert model_params(shape).total == params
    assert active_params(shape) / 1e9 == pytest.approx(active, abs=0.01)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_5_moe_text", "glm4_moe"])
def test_any_config_counts_as_transformers_builds_it(kind: str) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[kind](
        num_hidden_layers=8, hidden_size=96, intermediate_size=80, moe_intermediate_size=24
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(kind, config.to_dict())
    assert model_params(shape).total == sum(each.numel() for each in model.parameters())


def test_ranks_of_all_stages_hold_the_whole_model_once() -> None:
    _, shape, found = eight_nodes()
    rank = rank_params(shape, found)
    params = model_params(shape)
    split = 2 * (rank.dense - params.whole - params.key_value // 2) + params.key_value
    assert split + params.whole + 8 * rank.expert == params.total


@pytest.mark.parametrize("kind", ["delta", "attention", "dense"])
def test_the_real_layer_keeps_the_planned_bytes(kind: str) -> None:
    """Within 5 %: the layer of Qwen3.6-35B-A3B or Qwen3-4B on one rank, in bf16 on a CPU."""
    command = [sys.executable, "-m", "tests.unit.training.rank.activation_rank", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    shape = shape_from_config(kind, CONFIGS[kind])
    planned = layer_bytes(shape, Splits(tensor=1, sequence=1, expert_tensor=1), 0)
    assert found["held"] == pytest.approx(planned, rel=0.05)


def test_dense_models_plan_is_the_one_computed_by_hand() -> None:
    recipe = Recipe.model_validate(ONE_NODE)
    shape = shape_of(recipe.model)
    found = layout(recipe, shape)
    # 36 layers of 192,937,984 split and 8,448 whole; two embeddings; key-value heads split too.
    dense = (36 * 192_937_984 + 2 * 151_936 * 4096) // 2 + 36 * 8_448 + 4096
    assert rank_params(shape, found).dense == dense
    state = training_state(rank_params(shape, found), found)
    assert state.weights == dense * 2
    assert state.gradients == dense * 4
    assert state.optimizer == dense / 4 * 12
    queries, keys, width = 2048, 512, 6144
    # Norms: input and output; the projection, copied queries, both rotated; the output.
    kept = 2 * 2048 * 4 + (queries + 2 * keys) * 2 + queries * 2 + (queries + keys) * 2
    kept += queries * 2 + 16 * 4 + 3 * width * 2
    assert layer_bytes(shape, Splits.of(found), 0) == kept
    whole = activation_bytes(shape, found, positions=1, recompute=False)
    assert whole == 36 * kept + 4096 + (2048 + 2 * width) * 2
    assert token_bytes(shape, 2) == 2 * 36 * 4 * 128 * 2
    cache = kv_cache(recipe, shape, found, gpu_gib=80)
    # Contexts of both processes, and the groups of all, tensor and data.
    free = 80 - 6
    assert cache.pool == pytest.approx(cache.share * free - 8_190_735_360 * 2 / 2 / GIB)
    assert cache.running is None


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("trainer.recompute=false", "activations"),
        ("trainer.offload_optimizer=false", "optimizer"),
        ("trainer.expert_parallel=4", "weights"),
        ("trainer.tokens_per_micro_batch=24000", "activations"),
    ],
)
def test_each_memory_saving_setting_lowers_its_own_part(setting: str, part: str) -> None:
    saving = plan_memory(*eight_nodes("trainer.recompute=true"))
    recipe, shape, found = eight_nodes("trainer.recompute=true", setting)
    changed = plan_memory(recipe, shape, found)
    assert changed.train.parts[part] > 1.5 * saving.train.parts[part]


@pytest.mark.parametrize(
    "flags", ['["--mem-fraction-static","0.5"]', '["--mem-fraction-static=0.5"]']
)
def test_engines_own_flag_sets_its_share(flags: str) -> None:
    recipe, shape, found = eight_nodes(f"engine.flags={flags}")
    cache = kv_cache(recipe, shape, found, gpu_gib=80)
    # Of the memory that is free when the engine starts, beside the sleeping trainer.
    assert cache.weights + cache.pool == pytest.approx(0.5 * (80 - 11))


@pytest.mark.parametrize(
    ("share", "message", "hint"),
    [
        (0.11, "less than one context", "gpus_per_engine"),
        (0.97, "rollout needs", "raise cluster.gpus_per_engine"),
    ],
    ids=["too small for a context", "no room for the trainer's"],
)
def test_a_share_that_leaves_no_room_is_refused(share: float, message: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        plan(load([RECIPE], [f'engine.flags=["--mem-fraction-static={share}"]']))
    assert hint in caught.value.hint


def test_a_plan_that_no_change_can_fit_is_reported() -> None:
    changes = {
        "model": {"path": "GLM-4.6", "family": "glm4"},
        "trainer": ONE_NODE["trainer"] | {"expert_parallel": 8},
        "cluster": {"gpus_per_node": 8, "gpus_per_engine": 8, "gpu": "b200"},
        "algorithm": {"type": "gspo", "mismatch": "token-tis"},
    }
    with pytest.raises(RecipeError, match="train needs") as caught:
        plan(Recipe.model_validate(ONE_NODE | changes))
    assert "more or larger GPUs" in caught.value.hint
