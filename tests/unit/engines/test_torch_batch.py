"""Continuous batching: each request gets the same reply in every batch as alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swerl.core.errors import EngineError
from swerl.engines import _torch_batch
from swerl.engines._sglang_wire import PauseMode
from swerl.engines._torch_batch import FinishedReply, ReplyRequest, RunningBatch
from swerl.engines._torch_model import DenseModel, read_shape, read_weights

CONTEXT = 300


def new_batch(folder: Path, *, num_rows: int = 8, max_running: int = 4) -> RunningBatch:
    shape = read_shape(folder)
    model = DenseModel(shape, read_weights(folder, shape), CONTEXT + 1)
    return RunningBatch(model, num_rows=num_rows, max_running=max_running, context=CONTEXT)


def ask(rid: str, length: int, max_new: int = 12, **settings: Any) -> ReplyRequest:
    rng = random.Random(rid)
    ids = tuple(rng.randrange(512) for _ in range(length))
    return ReplyRequest(rid, ids, max_new, seed=rng.randrange(2**32), **settings)


def run(batch: RunningBatch) -> dict[str, FinishedReply]:
    """Step until nothing is left."""
    ended = []
    while batch.has_work:
        ended += batch.step()
    return {one.request.rid: one for one in ended}


def alone(folder: Path, request: ReplyRequest) -> FinishedReply:
    batch = new_batch(folder)
    batch.add(request)
    return run(batch)[request.rid]


@pytest.mark.parametrize("chunk", [_torch_batch.PREFILL_TOKENS, 32])
def test_a_request_gets_the_same_reply_in_any_company(
    tiny_model: Path, reference: Any, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Also a request whose prompt is longer than a chunk, and is prefilled in pieces."""
    monkeypatch.setattr(_torch_batch, "PREFILL_TOKENS", chunk)
    batch = new_batch(tiny_model)
    requests = [ask(f"r{n}", length) for n, length in enumerate((1, 80, 7, 200, 33, 2, 150, 60))]
    ended = []
    for request in requests:  # they join while others decode, more of them than may run at once
        batch.add(request)
        ended += batch.step()
    found = {one.request.rid: one for one in ended} | run(batch)
    for request in requests:
        reply = found[request.rid]
        assert reply.output_ids == alone(tiny_model, request).output_ids
        expected = reference.logprobs(tiny_model, list(request.ids), reply.output_ids)
        assert (expected - torch.tensor(reply.logprobs)).abs().max() < 1e-4


def test_equal_prompts_are_prefilled_once(tiny_model: Path) -> None:
    batch = new_batch(tiny_model)
    ids = ask("group", 100).ids
    for n in range(4):
        batch.add(ReplyRequest(f"r{n}", ids, 5, seed=n))
    found = run(batch)
    assert batch.counters.num_prefilled_tokens == 100 + 3
    assert sorted(one.cached_tokens for one in found.values()) == [0, 99, 99, 99]
    assert len({tuple(one.output_ids) for one in found.values()}) > 1


def test_a_prefix_survives_until_its_row_is_the_oldest(tiny_model: Path) -> None:
    batch = new_batch(tiny_model, num_rows=3, max_running=1)
    first = alone_in(batch, ask("a", 40))
    follow = ReplyRequest("a2", (*first.request.ids, *first.output_ids, 9), 2)
    for rid in ("b", "c"):
        alone_in(batch, ask(rid, 40))
    assert alone_in(batch, follow).cached_tokens == 40 + len(first.output_ids) - 1
    for rid in ("d", "e", "f"):
        alone_in(batch, ask(rid, 40))
    assert alone_in(batch, ReplyRequest("a3", follow.ids, 2)).cached_tokens == 0


def test_abort_takes_running_and_waiting_requests_and_no_other(tiny_model: Path) -> None:
    batch = new_batch(tiny_model, max_running=3)
    requests = [ask(f"r{n}", 20 + n) for n in range(5)]
    for request in requests:
        batch.add(request)
    for _ in range(3):
        batch.step()
    ended = batch.abort(lambda request: request.rid in {"r0", "r4"})
    assert {one.request.rid: one.reason for one in ended} == {"r0": "abort", "r4": "abort"}
    assert sorted(len(one.output_ids) for one in ended)[0] == 0
    found = run(batch)
    assert set(found) == {"r1", "r2", "r3"}
    for rid, reply in found.items():
        assert reply.output_ids == alone(tiny_model, requests[int(rid[1])]).output_ids


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_a_pause_changes_no_reply(tiny_model: Path, mode: PauseMode) -> None:
    batch = new_batch(tiny_model)
    requests = [ask(f"r{n}", 30 + n) for n in range(6)]
    for request in requests:
        batch.add(request)
    for _ in range(4):
        batch.step()
    assert batch.pause(mode) == []
    assert not batch.has_work
    if mode is PauseMode.RETRACT:
        batch.flush()
    batch.resume()
    found = run(batch)
    for request in requests:
        assert found[request.rid].output_ids == alone(tiny_model, request).output_ids


def test_weights_change_only_when_no_row_holds_old_keys(
    tiny_model: Path, other_model: Path
) -> None:
    batch = new_batch(tiny_model)
    weights = read_weights(other_model, batch.model.shape)
    batch.add(ask("r", 30))
    batch.step()
    batch.pause(PauseMode.IN_PLACE)
    with pytest.raises(EngineError, match="running"):
        batch.set_weights(weights, "v1")
    batch.pause(PauseMode.RETRACT)
    batch.set_weights(weights, "v1")
    batch.resume()
    ended = run(batch)["r"]
    assert [version for version, _ in ended.versions] == ["default", "v1"]
    assert 0 < ended.versions[1][1] < 12


def alone_in(batch: RunningBatch, request: ReplyRequest) -> FinishedReply:
    batch.add(request)
    return run(batch)[request.rid]
