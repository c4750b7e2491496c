"""Rows that share prefixes: each token computed once, and the steps of separate rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts
from swerl.plan.parameters import RowCost
from swerl.training import batch as batches
from swerl.training.rank.attention import attend
from swerl.training.rank.context import Forest, RowShare, row_paths
from swerl.training.rank.microbatch import rank_micro_batches, to_tensors
from swerl.training.rank.packing import Prefixes, pack_forest
from tests.unit.engines.families.lines import BASE, build, write_model
from tests.unit.training.rank.family_ranks import job_of, largest_gaps, run_ranks

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
COST = RowCost(per_token=1000.0, per_token_pair=1.0)
STEPS = 3
PATHS = [(90, 0), (70, 60), (20, 130), (25, 95), (9, 2), (30, 1), (66, 31), (5, 0)]
"""(own positions, shared ones) of rows: branches before, at and after a chunk's end, near a root's
first position, and from a row that itself branches off."""


# Cutting a forest.


def forest_rows(rng: random.Random, num_rows: int, *, replay: bool = False) -> list[Sample]:
    """Draw rows that begin with a part of an earlier row, or with nothing in common."""
    rows: list[Sample] = []
    for number in range(num_rows):
        parent = rng.choice(rows) if rows and rng.random() < 0.8 else None
        depth = rng.choice([1, 2, 5, len(parent.ids) - 1, len(parent.ids)]) if parent else 0
        depth = rng.randint(0, min(depth, len(parent.ids))) if parent else 0
        start = list(parent.ids[:depth]) if parent else []
        ids = start + [rng.randrange(BASE["vocab_size"]) for _ in range(rng.choice([2, 9, 70]))]
        mask = [0] * max(depth, 1) + [int(rng.random() < 0.5) for _ in ids[max(depth, 1) :]]
        mask[-1] = 1
        row = Sample(
            f"episode-{number // 2}",
            "task",
            ids,
            mask,
            [-5.7 - rng.random() * 0.1 if on else 0.0 for on in mask],
            weight_versions=("000000",),
            # Of one sign: a loss whose parts cancel out has no relative error.
            advantage=rng.uniform(0.2, 1.5),
            routed=_records(rng, parent, depth, len(ids)) if replay else (),
        )
        rows.append(row)
    return rows


def _records(
    rng: random.Random, parent: Sample | None, depth: int, length: int
) -> tuple[RoutedExperts, ...]:
    """Return the parent's experts of the shared positions, and own ones of some others."""
    pieces = []
    for piece in parent.routed if parent else ():
        if (kept := min(piece.num_positions, depth - piece.start)) > 0:
            width = len(piece.data) // piece.num_positions
            pieces.append(replace(piece, data=piece.data[: kept * width]))
    if (end := rng.randint(depth, length - 1)) > depth:
        chosen = [rng.sample(range(4), 2) for _ in range(2 * (end - depth))]
        data = bytes(expert for pair in chosen for expert in pair)
        pieces.append(RoutedExperts(depth, 2, 2, 1, data))
    return tuple(pieces)


def forest_batch(
    rng: random.Random, num_rows: int, *, replay: bool = False, step: int = 0
) -> Batch:
    """Return a Batch of such rows; Episodes have one or two."""
    rows = forest_rows(rng, num_rows, replay=replay)
    totals: dict[str, int] = {}
    for row in rows:
        totals[row.episode] = totals.get(row.episode, 0) + row.num_trained_tokens
    shared = [replace(row, share=row.num_trained_tokens / totals[row.episode]) for row in rows]
    return Batch(step, tuple(shared), len(totals))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 4), st.booleans())
def test_a_forest_is_cut_into_packs_that_hold_each_row_once(
    seed: int, num_rows: int, num_ranks: int, replay: bool
) -> None:
    rng = random.Random(seed)
    batch = forest_batch(rng, num_rows, replay=replay)
    budget = max(len(row.ids) for row in batch.samples) + rng.choice([3, 40, 10**6])
    share = RowShare(context_ranks=rng.choice([1, 2]))
    budget = share.pad_row(budget)
    parts = [
        rank_micro_batches(
            batch,
            rank=rank,
            num_ranks=num_ranks,
            budget=budget,
            cost=COST,
            share=share,
            forest=True,
            replay=replay,
        )
        for rank in range(num_ranks)
    ]
    assert len({len(part) for part in parts}) == 1
    packs = [rows for part in parts for rows in part]
    trained = sorted(row.index for rows in packs for row in rows if row.weight)
    assert trained == list(range(num_rows))
    for rows in packs:
        assert sum(share.pad_row(len(row.sample.ids) - 1 - row.shared) for row in rows) <= budget
        micro = to_tensors(rows, all_tokens=True, device=CPU, replay=replay)
        # Every row finds its own tokens and labels, in order, and its own experts.
        labels = [i for row in rows for i in row.sample.ids[1:]]
        inputs = [i for row in rows for i in row.sample.ids[:-1]]
        assert micro.rows.labels_O.tolist() == labels
        assert micro.rows.ids_N[micro.rows.selected_O].tolist() == inputs
        if micro.rows.routed_NLK is not None:
            found = micro.rows.routed_NLK[micro.rows.selected_O]
            assert torch.equal(found, torch.cat([_experts(row.sample) for row in rows]))


def _experts(row: Sample) -> torch.Tensor:
    found = torch.full((len(row.ids) - 1, 2, 2), -1, dtype=torch.int16)
    for piece in row.routed:
        ids = torch.frombuffer(bytearray(piece.data), dtype=torch.uint8).to(torch.int16)
        found[piece.start : piece.start + piece.num_positions] = ids.view(-1, 2, 2)
    return found


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_one_pack_has_each_prefix_once(seed: int, num_rows: int) -> None:
    batch = forest_batch(random.Random(seed), num_rows)
    [rows] = rank_micro_batches(batch, rank=0, num_ranks=1, budget=10**6, cost=COST, forest=True)
    prefixes = {tuple(row.ids[: t + 1]) for row in batch.samples for t in range(len(row.ids) - 1)}
    packed = to_tensors(rows, all_tokens=False, device=CPU).rows
    pairs = sum(2 * len(prefix) - 1 for prefix in prefixes)
    assert len(packed.ids_N) == len(prefixes)
    assert packed.executed() == {"executed_tokens": len(prefixes), "executed_token_pairs": pairs}


def test_a_prefix_that_fills_a_pack_is_repeated_as_seldom_as_possible() -> None:
    # Twelve rows of 40 + 10 positions, and packs of 100: six rows fit.
    keys = [bytes(40) + bytes([row]) * 10 for row in range(1, 13)]
    packs = pack_forest([50] * 12, Prefixes.of(keys, 1), COST, num_ranks=1, budget=100)
    assert [len(places) for places in packs[0]] == [6, 6]


# The layers' parts.


def separate(x: torch.Tensor, forest: Forest) -> tuple[torch.Tensor, list[int]]:
    """Return whole rows of packed ones, end to end, and their bounds."""
    paths = row_paths(forest.lengths, forest.shared)
    bounds = [0]
    for path in paths:
        bounds.append(bounds[-1] + len(path))
    return x[torch.cat(paths)], bounds


def own(y: torch.Tensor, forest: Forest, bounds: list[int]) -> torch.Tensor:
    ends = zip(forest.lengths, bounds[1:], strict=True)
    return torch.cat([y[end - length : end] for length, end in ends])


FOREST = Forest(*map(tuple, zip(*PATHS, strict=True)))


def test_attention_without_copies_of_a_prefix_for_all_rows_at_once() -> None:
    from swerl.training.rank.attention import _pieces

    forest = Forest((64, *(2,) * 40), (0, *(60,) * 40))
    plan = _pieces(forest, 1, 0, CPU)
    limit = 2 * sum(forest.lengths)
    assert plan.again
    assert all(len(piece.keys) <= limit for piece in plan.pieces)
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(forest.lengths), 2, 8) for _ in range(3))
    (queries, bounds), (keys, _), (values, _) = (
        separate(each, forest) for each in (query, key, value)
    )
    lengths = tuple(b - a for a, b in pairwise(bounds))
    wanted = own(attend(queries, keys, values, lengths, lengths), forest, bounds)
    own_queries = query[plan.queries].split([sum(each.query_lengths) for each in plan.pieces])
    parts = [
        attend(own_query, key[each.keys], value[each.keys], each.query_lengths, each.key_lengths)
        for each, own_query in zip(plan.pieces, own_queries, strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts)[plan.order], wanted)


def test_keys_that_are_gathered_again_have_the_same_gradients() -> None:
    from swerl.training.rank.attention import PackedAttention, _pieces

    attention = PackedAttention(None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    query = torch.randn(sum(FOREST.lengths), 2, 8, requires_grad=True)
    inputs = query, torch.randn(sum(FOREST.lengths), 2, 2, 8, requires_grad=True)
    found = []
    for again in (False, True):
        plan = _pieces(FOREST, 1, 0, CPU)
        sizes = [sum(piece.query_lengths) for piece in plan.pieces]
        own_queries = query[plan.queries].split(sizes)
        outs = [
            attention._piece(piece, own_query, inputs[1], True, again)
            for piece, own_query in zip(plan.pieces, own_queries, strict=True)
        ]
        out = torch.cat(outs)[plan.order]
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# Whole steps.


@dataclass(frozen=True)
class Case:
    """A model line under a layout, with shared prefixes; it is compared with separate rows."""

    line: str
    ranks: int = 1
    replay: bool = False
    algorithm: str = "cispo"
    layout: Mapping[str, Any] = field(default_factory=dict)


TP, CP, PP = "tensor_parallel", "context_parallel", "pipeline_parallel"
EP = "expert_parallel"
CASES = {
    "dense": Case("qwen3"),
    "dense-recompute": Case("qwen3", layout={"recompute": True}),
    "dense-sft": Case("qwen3", algorithm="sft"),
    "dense-gspo": Case("qwen3", algorithm="gspo"),
    "dense-stages": Case("qwen3", 2, layout={PP: 2}),
    "dense-tensor-context": Case("qwen3", 4, layout={TP: 2, CP: 2}),
    "moe": Case("qwen3_moe"),
    "moe-replay": Case("qwen3_moe", replay=True, layout={"recompute": True}),
    "moe-all": Case("qwen3_moe", 4, replay=True, layout={TP: 2, CP: 2, EP: 2}),
    "delta": Case("qwen3_5_moe"),
    "delta-recompute": Case("qwen3_5_moe", 2, layout={TP: 2, "recompute": True}),
    "delta-context-4": Case("qwen3_5_moe", 4, layout={CP: 4}),
    "delta-all": Case("qwen3_5_moe", 4, layout={PP: 2, EP: 2}),
    "glm": Case("glm4_moe"),
    "glm-all": Case("glm4_moe", 4, layout={TP: 2, CP: 2, EP: 2}),
}
"""Each line alone and with several kinds of ranks at once."""


def wanted_name(case: Case) -> str:
    return f"separate-{case.line}-{case.algorithm}-{case.replay}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Reports of rank 0 after three steps, by case; `separate-*` without shared prefixes."""
    root = tmp_path_factory.mktemp("forest")
    for line in sorted({case.line for case in CASES.values()}):
        write_model(build(line), root / line)
    files: dict[bool, list[Path]] = {}
    for replay in (False, True):
        rng = random.Random(f"forest {replay}")
        for step in range(STEPS):
            path = root / f"{replay}-{step}.parquet"
            batches.write(path, forest_batch(rng, 14, replay=replay, step=step))
            files.setdefault(replay, []).append(path)
    every = {
        wanted_name(case): (replace(case, ranks=1, layout={}), False) for case in CASES.values()
    } | {name: (case, True) for name, case in CASES.items()}
    specs: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 4: []}
    for name, (case, shares) in every.items():
        options = {
            "tokens_per_micro_batch": 260,
            "ranks": case.ranks,
            "routing_replay": case.replay,
            "shared_prefixes": shares,
            **case.layout,
        }
        out = root / f"{name}.pt"
        job = job_of(root / case.line, files[case.replay], out, options, algorithm=case.algorithm)
        if case.algorithm == "sft":
            job["algorithm_options"] = {"context_weight": 0.1}
        specs[case.ranks].append(job)
    run_ranks(root / "jobs.json", specs)
    return {name: torch.load(root / f"{name}.pt", weights_only=False) for name in every}


@pytest.mark.parametrize("name", CASES)
def test_shared_prefixes_take_the_steps_of_separate_rows(
    found: dict[str, dict[str, Any]], name: str, record_property: Any
) -> None:
    got, wanted = found[name], found[wanted_name(CASES[name])]
    gaps = largest_gaps(got, wanted)
    names = sorted(wanted["weights"])
    assert names == sorted(got["weights"])
    gaps["weights"] = _gap(*([each["weights"][key] for key in names] for each in (got, wanted)))
    if CASES[name].ranks == 1:
        gaps["gradients"] = _gap(got["gradients"], wanted["gradients"])
    record_property("gaps", dict(gaps))
    assert got["agree"]
    # Absolute, of some 6: two units in the last place.
    assert gaps.pop("logprobs") <= 2e-6
    assert max(gaps.values()) <= 1e-6


def _gap(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference over the norm of all that is wanted."""
    pairs = zip(found, wanted, strict=True)
    apart = sum(float((one - other).double().square().sum()) for one, other in pairs)
    return float(apart / sum(float(each.double().square().sum()) for each in wanted)) ** 0.5
