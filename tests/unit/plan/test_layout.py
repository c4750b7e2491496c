"""Layouts that must be refused before money is spent, and the nearest legal ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.errors import RecipeError
from swerl.plan.layout import Layout, crossing, layout
from swerl.plan.plan import plan
from swerl.plan.shape import shape_of
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen35b_8node.toml"


def laid_out(*settings: str) -> Layout:
    recipe = load([RECIPE], settings)
    return layout(recipe, shape_of(recipe.model))


def refused(*settings: str) -> str:
    with pytest.raises(RecipeError) as caught:
        plan(load([RECIPE], settings))
    assert caught.value.hint
    return f"{caught.value} | {caught.value.hint}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["trainer.ranks=32"], "the cluster has 64 GPUs"),
        (["cluster.colocate=false"], "leaves none of"),
        (["trainer.tensor_parallel=3"], "not a multiple of tensor 3"),
        (["trainer.context_parallel=7"], "context 7"),
        (["trainer.pipeline_parallel=16", "trainer.context_parallel=1"], "layers: 40"),
        (["cluster.gpus_per_node=4", "cluster.nodes=16", "trainer.tensor_parallel=8"], "spans"),
        (["model.path=Qwen3-8B"], "has no experts"),
        (["trainer.expert_parallel=3"], "experts: 256"),
        (["trainer.expert_parallel=3"], "layout that fits: trainer.expert_parallel = 4"),
        (["trainer.expert_parallel=128"], "not a multiple of expert 128"),
        (["cluster.gpus_per_engine=5"], "not a multiple of cluster.gpus_per_engine"),
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
        (["rollout.max_context_tokens=95000"], "set rollout.max_context_tokens = 94976"),
        (["rollout.max_new_tokens=96000"], "no room for a prompt"),
    ],
)
def test_layout_that_cannot_run_is_one_clear_error(settings: list[str], words: str) -> None:
    assert words in refused(*settings)


def test_ranks_that_experts_and_engines_leave_are_counted() -> None:
    assert laid_out("trainer.expert_parallel=1").expert_data == 32
    apart = laid_out("cluster.colocate=false", "cluster.nodes=12")
    assert (apart.ranks, apart.num_engines) == (64, 4)


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.tensor_parallel=3",
        "trainer.tensor_parallel=32",
        "trainer.context_parallel=7",
        "trainer.expert_parallel=128",
        "trainer.pipeline_parallel=16",
        "trainer.tokens_per_micro_batch=11999",
    ],
)
def test_nearest_layout_that_an_error_names_is_legal(setting: str) -> None:
    told = refused(setting)
    assert "The nearest layout that fits: " in told
    sizes = re.findall(r"(trainer\.\w+) = (\d+)", told.rpartition("The nearest layout")[2])
    laid_out(setting, *(f"{key}={size}" for key, size in sizes))
    assert "nearest" not in refused("cluster.gpus_per_engine=5")


@pytest.mark.parametrize(
    ("tensor", "heads", "message"),
    [
        (3, {"num_heads": 3, "num_kv_heads": 3, "linear_num_value_heads": 8}, "linear attention's"),
        (4, {"num_heads": 8, "num_kv_heads": 2}, "does not divide the key-value heads: 2"),
    ],
)
def test_heads_are_split_whole(tensor: int, heads: dict[str, int], message: str) -> None:
    trainer = {"ranks": tensor, "tensor_parallel": tensor}
    config = Recipe.model_validate({"name": "r", "trainer": trainer})
    shape = replace(shape_of(config.model), hidden_size=192, vocab_size=1200, ffn_size=384, **heads)
    with pytest.raises(RecipeError, match=message):
        layout(config, shape)


GROUPS = """
import json, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from swerl.training.rank import megatron_cpu
megatron_cpu.install()
from megatron.core import parallel_state as state
made, new_group = {}, dist.new_group
dist.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})
sizes = json.loads(sys.argv[1])
for rank in (0, 15, 41, 63):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
    state.initialize_model_parallel(**sizes)
    for name, group in {
        "tensor": state.get_tensor_model_parallel_group(),
        "context": state.get_context_parallel_group(),
        "data": state.get_data_parallel_group(),
        "pipeline": state.get_pipeline_model_parallel_group(),
        "expert tensor": state.get_expert_tensor_parallel_group(),
        "expert": state.get_expert_model_parallel_group(),
    }.items():
        made.setdefault(name, []).append(dist.get_process_group_ranks(group))
    state.destroy_model_parallel()
    dist.destroy_process_group()
print(json.dumps(made))
"""


@pytest.mark.integration
@pytest.mark.parametrize("sizes", [(2, 8, 1, 8, 1), (4, 2, 2, 16, 1)])
def test_groups_that_cross_nodes_are_those_of_megatron_on_64_ranks(sizes: tuple[int, ...]) -> None:
    tensor, context, pipeline, expert, expert_tensor = sizes
    given = {
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
    }
    command = [sys.executable, "-c", GROUPS, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    groups = json.loads(done.stdout.splitlines()[-1])
    found = replace(
        laid_out(),
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
    )
    crossed = {
        name for name, made in groups.items() if any(len({r // 8 for r in g}) > 1 for g in made)
    }
    assert set(crossing(found)) == crossed
    assert "tensor" not in crossed
    assert ("context" in crossed) == (tensor * context > 8)


def test_a_layout_inside_a_node_is_named() -> None:
    (note,) = [each for each in plan(load([RECIPE])).notes if "spans nodes" in each]
    assert "context_parallel = 4 with tokens_per_micro_batch = 24000 stays inside" in note
    inside = ["trainer.context_parallel=4", "trainer.tokens_per_micro_batch=24000"]
    inside.append("trainer.recompute=true")
    assert not any("spans nodes" in each for each in plan(load([RECIPE], inside)).notes)
