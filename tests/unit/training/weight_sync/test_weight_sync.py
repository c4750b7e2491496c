"""Buckets, handles and checksums of weights on their way, and the choice of that way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from swerl.core.events import ignore
from swerl.core.learning import EngineTarget, Received
from swerl.recipe.schema import ClusterSection, Recipe
from swerl.training.train import _asleep
from swerl.training.weight_sync.checksum import ExpectedChecksums, hash_tensor
from swerl.training.weight_sync.send import RankHandle, handles_of
from swerl.training.weight_sync.sync import choose_way, make_room, sync
from swerl.training.weight_sync.transport import in_buckets


class Taking:
    """An engine that takes weights in every way, or by folder only; it confirms `received`."""

    version, targets = None, ()

    def __init__(self, *, streams: bool = True, received: Received | None = None) -> None:
        self.streams = streams
        self._received = received
        self.calls: list[str] = []

    @asynccontextmanager
    async def update(self, *, missed: bool = False) -> AsyncIterator[Any]:
        yield self

    async def finish(self, sent: object) -> Received:
        assert self._received
        self.calls.append("weights")
        return self._received

    async def await_missed(self) -> None:
        raise AssertionError

    async def sleep(self) -> None:
        self.calls.append("engine sleeps")


class Sending:
    """A trainer that has sent everything."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def send(self, targets: object, way: str, *, version: str | None = None) -> None: ...

    async def sleep(self) -> None:
        self.calls.append("trainer sleeps")

    async def wake(self) -> None:
        self.calls.append("trainer wakes")


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
def test_the_way_follows_from_the_placement_of_trainer_and_engine(
    settings: dict[str, Any], streams: bool, way: str
) -> None:
    notices: list[Any] = []
    engine: Any = Taking(streams=streams)
    assert choose_way(ClusterSection(**settings), engine, notices.append) == way
    assert len(notices) == (not streams)  # a fall back to the disk is reported


@pytest.mark.parametrize(
    ("confirmed", "is_first", "texts"),
    [
        (9, True, []),
        (4, True, ["checksums confirm 4 of 9 parameters that the engine holds"]),
        (4, False, []),
        (0, False, ["no checksum confirms weights 000001: the engine states none"]),
    ],
)
async def test_a_run_reports_parameters_without_a_checksum(
    confirmed: int, is_first: bool, texts: list[str]
) -> None:
    cluster, events = ClusterSection(weight_sync="tensor"), []
    engine = Taking(received=Received("000001", confirmed, 9))
    parts: Any = (Sending([]), engine, cluster, events.append)
    assert await sync(*parts, is_first=is_first) == "000001"
    assert [event.text for event in events] == texts


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
    expected = _expected({"model_type": "qwen3", "tie_word_embeddings": True}, names, 2)
    qkv, output = list(names.values())[:3], list(names.values())[3]
    for rank, found in enumerate(expected.checksums):
        rows = slice(2 * rank, 2 * rank + 2)
        fused = torch.cat([part[rows] for part in qkv])
        cut = output[:, rows].contiguous()
        for name, tensor in (("qkv_proj", fused), ("o_proj", cut)):
            allowed = found[f"model.layers.0.self_attn.{name}.weight"]
            assert allowed == (hash_tensor(tensor, "cpu"), hash_tensor(tensor.bfloat16(), "cpu"))


def test_no_checksum_is_certain_if_the_engines_layout_is_unknown() -> None:
    names = ("mlp.down_proj.weight", "mlp.experts.3.down_proj.weight")
    weights = {f"model.layers.0.{name}": torch.zeros(4, 4) for name in names}
    expected = _expected({"model_type": "a_new_one"}, weights)
    assert set(expected.checksums[0]) == {"model.layers.0.mlp.down_proj.weight"}
    assert not expected.certain


def test_ranks_that_share_a_key_head_are_expected_to_hold_the_same_rows() -> None:
    """Qwen3-30B-A3B has four key heads; an engine of eight ranks holds each of them twice."""
    config = {"model_type": "qwen3_moe", "num_key_value_heads": 2}
    parts = {each: torch.randn(rows, 8) for each, rows in (("q", 16), ("k", 8), ("v", 8))}
    found = _expected(config, {f"m.self_attn.{n}_proj.weight": t for n, t in parts.items()}, 4)
    for rank, sums in enumerate(found.checksums):
        head = slice(4 * (rank // 2), 4 * (rank // 2) + 4)
        held = [parts["q"][4 * rank : 4 * rank + 4], parts["k"][head], parts["v"][head]]
        assert hash_tensor(torch.cat(held), "cpu") in sums["m.self_attn.qkv_proj.weight"]


@pytest.mark.parametrize(("device", "width"), [("cuda", 3), ("cpu", 32)])
def test_experts_are_expected_stacked_whether_files_stack_them_or_not(
    device: str, width: int
) -> None:
    gate, up = torch.randn(2, 4, 3, 8)  # four experts, three wide
    down = torch.randn(4, 8, 3)
    apart = {
        f"m.experts.{n}.{part}_proj.weight": one[n]
        for n in range(4)
        for part, one in (("down", down), ("gate", gate), ("up", up))
    }
    stacked = {"m.experts.gate_up_proj": torch.cat([gate, up], 1), "m.experts.down_proj": down}
    config = {"model_type": "x", "num_local_experts": 4}  # as transformers 5 writes qwen3_moe's
    by_files = [_expected(config, weights, device=device) for weights in (apart, stacked)]
    assert by_files[0].checksums == by_files[1].checksums
    (sums,) = by_files[0].checksums
    wide, high = torch.zeros(4, 8, width), torch.zeros(4, 2 * width, 8)
    wide[:, :, :3], high[:, :3], high[:, width : width + 3] = down, gate, up
    assert hash_tensor(high, device) in sums["m.experts.w13_weight"]
    assert hash_tensor(wide, device) in sums["m.experts.w2_weight"]
    assert not by_files[0].certain  # kernels may lay them out again


def test_a_gated_delta_net_is_expected_under_the_engines_names() -> None:
    config = {
        "model_type": "qwen3_5_moe",
        "text_config": {"linear_num_key_heads": 2, "linear_key_head_dim": 2},
    }
    qkv, z, conv = torch.randn(4 + 4 + 8, 6), torch.randn(8, 6), torch.randn(16, 1, 4)
    net = "model.language_model.layers.0.linear_attn"
    found = _expected(
        config,
        {
            f"{net}.in_proj_qkv.weight": qkv,
            f"{net}.in_proj_z.weight": z,
            f"{net}.conv1d.weight": conv,
            "model.language_model.layers.1.self_attn.q_norm.weight": torch.ones(4),
        },
        2,
    )
    q, k, v = qkv.split([4, 4, 8])
    rank = found.checksums[1]
    held = torch.cat([q[2:], k[2:], v[4:], z[4:]])
    assert hash_tensor(held, "cpu") in rank["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    held = torch.cat([conv[2:4], conv[6:8], conv[12:]])
    assert hash_tensor(held, "cpu") in rank["model.layers.0.linear_attn.conv1d.weight"]
    assert "model.layers.1.q_norm.weight" in rank
    # Norms are kept as their difference from 1; the engine states the sum as well.
    two = torch.full((4,), 2.0, dtype=torch.bfloat16)
    assert hash_tensor(two, "cpu") in rank["model.layers.1.q_norm.gemma_weight"]


def _expected(
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    num_ranks: int = 1,
    *,
    device: str = "cpu",
) -> ExpectedChecksums:
    target = EngineTarget("http://127.0.0.1:1", num_ranks, "bfloat16", device)
    expected = ExpectedChecksums(target, config)
    for name, tensor in weights.items():
        expected.add(name, tensor)
    return expected


def _servers(*, known: bool) -> list[EngineTarget]:
    """Return two servers of four GPUs, the second in reversed order of its GPUs."""
    gpus = [("g0", "g1", "g2", "g3"), ("g7", "g6", "g5", "g4")] if known else [(), ()]
    return [
        EngineTarget(f"http://n{n}:1", 4, "bfloat16", "cuda", place=n, gpus=gpus[n])
        for n in range(2)
    ]


HANDLES = [RankHandle(f"memory of g{rank}", f"g{rank}") for rank in range(8)]


@pytest.mark.parametrize("known", [True, False], ids=["by uuid", "by place"])
def test_a_server_opens_the_memory_of_its_own_gpus_also_without_the_others(known: bool) -> None:
    """The second server alone: it restarted, or the first one is lost."""
    first, second = _servers(known=known)
    ranks = (7, 6, 5, 4) if known else (4, 5, 6, 7)
    assert handles_of(first, HANDLES) == [f"memory of g{rank}" for rank in range(4)]
    assert handles_of(second, HANDLES) == [f"memory of g{rank}" for rank in ranks]


def test_a_server_on_gpus_without_a_trainer_rank_gets_no_other_memory() -> None:
    first, second = _servers(known=True)
    assert handles_of(first, HANDLES[:4])
    with pytest.raises(LookupError, match="no trainer rank uses its GPU g7"):
        handles_of(second, HANDLES[:4])
    with pytest.raises(LookupError, match="no trainer rank shares the GPUs of server 2"):
        handles_of(_servers(known=False)[1], HANDLES[:4])


@pytest.mark.parametrize("colocate", [True, False])
async def test_the_trainer_sleeps_before_the_engine_takes_its_memory_back(colocate: bool) -> None:
    cluster = ClusterSection(gpus_per_node=8, colocate=colocate)
    engine: Any = Taking(received=Received("1", 1, 1))
    trainer: Any = Sending(engine.calls)
    await make_room(trainer, engine, cluster)
    await sync(trainer, engine, cluster, ignore)
    turns = ["engine sleeps", "trainer wakes", "trainer sleeps", "weights"]
    assert engine.calls == (turns if colocate else ["weights"])


async def test_an_engine_on_the_trainers_gpus_starts_while_the_trainer_sleeps() -> None:
    trainer: Any = Sending([])
    recipe = Recipe.model_validate({"name": "r", "cluster": {"gpus_per_node": 8}})
    async with _asleep(trainer, recipe):
        assert trainer.calls == ["trainer sleeps"]
    apart = recipe.model_copy(update={"cluster": ClusterSection(gpus_per_node=8, colocate=False)})
    async with _asleep(trainer, apart):
        assert trainer.calls == ["trainer sleeps"]
