"""Buckets, handles and checksums of weights on their way, and the choice of that way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swerl.errors import RecipeError
from swerl.learning import EngineTarget
from swerl.recipe.schema import ClusterSection
from swerl.training.weight_sync import choose_way
from swerl.training.weight_sync_buckets import Bucket, handle, in_buckets
from swerl.training.weight_sync_checksum import Expectation, hash_tensor
from swerl.training.weight_sync_send import stored_dtypes

ONE = EngineTarget("http://127.0.0.1:1", 1, "float32", "cpu")
QWEN3 = {"model_type": "qwen3", "tie_word_embeddings": True}


class Taking:
    """An engine that takes weights in every way, or by folder only."""

    def __init__(self, *, streams: bool = True) -> None:
        self.streams = streams

    async def receive(self, source: object) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("settings", "streams", "way"),
    [
        ({}, True, "disk"),
        ({"gpus_per_node": 8}, True, "tensor"),
        ({"gpus_per_node": 8, "colocate": False}, True, "distributed"),
        ({"gpus_per_node": 8}, False, "disk"),
        ({"weight_sync": "distributed"}, True, "distributed"),
        ({"weight_sync": "disk", "gpus_per_node": 8}, True, "disk"),
    ],
)
def test_the_way_follows_from_where_trainer_and_engine_are(
    settings: dict[str, Any], streams: bool, way: str
) -> None:
    told: list[Any] = []
    engine: Any = Taking(streams=streams)
    assert choose_way(ClusterSection(**settings), engine, told.append) == way
    assert len(told) == (not streams)  # falling back to the disk is told


def test_a_way_that_the_engine_does_not_take_is_refused() -> None:
    engine: Any = Taking(streams=False)
    with pytest.raises(RecipeError, match='weight_sync = "tensor"'):
        choose_way(ClusterSection(weight_sync="tensor"), engine, lambda event: None)


def test_buckets_hold_one_type_and_no_more_than_they_may() -> None:
    tensors = [
        *((f"w{n}", torch.full((25,), n, dtype=torch.float32)) for n in range(5)),
        ("odd", torch.ones(3, dtype=torch.bfloat16)),
        ("large", torch.zeros(1000)),
    ]
    buckets = list(in_buckets(iter(tensors), 250))
    assert sorted(name for one in buckets for name in one.names) == sorted(n for n, _ in tensors)
    assert all(len({each.dtype for each in one.tensors}) == 1 for one in buckets)
    sizes = {one.names: one.flat().numel() for one in buckets}
    assert sizes.pop(("large",)) == 4000
    assert max(sizes.values()) <= 250


def test_another_process_opens_a_bucket_without_swerl_or_sglang() -> None:
    bucket = Bucket(("a", "b"), (torch.arange(6.0).view(2, 3), torch.tensor([7.0])))
    flat = bucket.flat()
    read = """
import base64, pickle, sys
told = pickle.loads(base64.b64decode(sys.stdin.read()))
for one in told["metadata"]:
    part = told["flattened_tensor"][one.start_idx:one.end_idx]
    print(one.name, part.view(one.dtype).reshape(one.shape).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", read], input=handle(bucket, flat), capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["a [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]", "b [7.0]"]


@pytest.mark.parametrize(
    ("count", "dtype", "known"),
    [
        (5, torch.float32, "c8156191cad821b3"),
        (33, torch.bfloat16, "2e908b56269b1e45"),
        (20000, torch.float32, "15aaf62a6b611bcb"),
        (40001, torch.bfloat16, "15533dfa90bedecc"),
    ],
)
def test_the_checksum_of_gpus_is_that_of_sglangs_kernel(
    count: int, dtype: torch.dtype, known: str
) -> None:
    """`known` is what SGLang 0.5.21's Triton kernel gives in Triton's interpreter."""
    assert hash_tensor((torch.arange(count) * 0.37).to(dtype), "cuda") == known


def test_each_rank_of_an_engine_is_expected_to_hold_its_own_cut() -> None:
    torch.manual_seed(0)
    names = {f"model.layers.0.self_attn.{x}_proj.weight": torch.randn(4, 8) for x in "qkv"}
    names["model.layers.0.self_attn.o_proj.weight"] = torch.randn(8, 4)
    expected = Expectation(EngineTarget("http://127.0.0.1:1", 2, "bfloat16", "cpu"), QWEN3)
    for name, tensor in names.items():
        expected.add(name, tensor)
    qkv, output = list(names.values())[:3], list(names.values())[3]
    for rank, found in enumerate(expected.checksums):
        rows = slice(2 * rank, 2 * rank + 2)
        fused = torch.cat([part[rows] for part in qkv])
        cut = output[:, rows].contiguous()
        for name, tensor in (("qkv_proj", fused), ("o_proj", cut)):
            allowed = found[f"model.layers.0.self_attn.{name}.weight"]
            assert allowed == (hash_tensor(tensor, "cpu"), hash_tensor(tensor.bfloat16(), "cpu"))


def test_no_checksum_is_expected_where_the_engines_layout_is_not_known() -> None:
    expected = Expectation(ONE, {"model_type": "a_new_one"})
    expected.add("model.layers.0.mlp.down_proj.weight", torch.zeros(4, 4))
    expected.add("model.layers.0.mlp.experts.3.down_proj.weight", torch.zeros(4, 4))
    assert expected.checksums == ({},)


def test_tensors_are_sent_in_the_type_of_the_models_own_files(tiny_model: Path) -> None:
    found = stored_dtypes(tiny_model)
    assert found["model.norm.weight"] is torch.float32
