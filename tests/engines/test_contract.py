"""The contract of every engine behind HTTP, run on torch-cpu and on real SGLang where it is.

Set SWERL_SGLANG_PYTHON to an interpreter with SGLang (docs/engines.md) to run both.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from swerl.chat import Finish
from swerl.engines import sglang, torch_cpu
from swerl.engines._sglang_http import HttpEngine
from swerl.engines._weights import checksum
from swerl.errors import EngineError
from swerl.interfaces import EngineSetup
from swerl.learning import WeightRef
from swerl.turn import Completion, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Served:
    """A live engine and the two model folders that it can serve."""

    engine: HttpEngine
    model: Path
    other: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["torch-cpu", "sglang"])
async def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    other_model: Path,
) -> AsyncIterator[Served]:
    setup: Any = EngineSetup(
        family=None,  # type: ignore[arg-type]
        log_dir=tmp_path_factory.mktemp("log"),
        model=tiny_model,
    )
    if request.param == "torch-cpu":
        opened = torch_cpu.open(torch_cpu.Options(), setup)
    else:
        python = os.environ.get("SWERL_SGLANG_PYTHON")
        if not python:
            pytest.skip("SWERL_SGLANG_PYTHON names no interpreter with SGLang")
        opened = sglang.open(sglang.Options(cpu=True, python=Path(python)), setup)
    async with opened as engine:
        yield Served(engine, tiny_model, other_model)


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(served: Served) -> Served:
    """The served engine with the first model loaded as version `v0`."""
    await served.engine.load(ref(served.model, "v0"))
    return served


def ref(folder: Path, version: str) -> WeightRef:
    return WeightRef(folder, version, checksum(folder))


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(512) for _ in range(length)]


async def test_logprobs_agree_with_transformers_in_a_ragged_batch(
    fresh: Served, reference: Any
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 3, 50, 117, 200))]
    replies = await asyncio.gather(
        *(fresh.engine.generate(ids, Sampling(24), f"s{n}") for n, ids in enumerate(prompts))
    )
    for ids, reply in zip(prompts, replies, strict=True):
        assert_agrees(reference.logprobs(fresh.model, ids, list(reply.ids)), reply)


async def test_logprobs_are_of_the_temperature_scaled_distribution(
    fresh: Served, reference: Any
) -> None:
    sampling = Sampling(16, temperature=0.5, top_p=0.9, top_k=20)
    reply = await fresh.engine.generate(prompt(30), sampling, "s")
    expected = reference.logprobs(fresh.model, prompt(30), list(reply.ids), temperature=0.5)
    assert_agrees(expected, reply)


async def test_temperature_zero_takes_the_most_likely_token(fresh: Served, reference: Any) -> None:
    reply = await fresh.engine.generate(prompt(20), Sampling(8, temperature=0.0), "s")
    logits = reference.logits(fresh.model, prompt(20) + list(reply.ids))
    assert list(reply.ids) == logits[19:-1].argmax(-1).tolist()


async def test_a_next_turn_reuses_what_the_session_already_computed(
    fresh: Served, reference: Any
) -> None:
    first = await fresh.engine.generate(prompt(60), Sampling(20), "s")
    ids = prompt(60) + list(first.ids) + prompt(7, seed=9)
    second = await fresh.engine.generate(ids, Sampling(10), "s")
    assert second.cached_tokens == 60 + len(first.ids) - 1
    assert second.prompt_tokens == len(ids)
    assert_agrees(reference.logprobs(fresh.model, ids, list(second.ids)), second)


async def test_a_stop_id_ends_the_reply_and_belongs_to_it(fresh: Served) -> None:
    sampling = Sampling(200, stop_token_ids=tuple(range(3, 16)))
    reply = await fresh.engine.generate(prompt(20), sampling, "s")
    assert reply.finish is Finish.STOP
    assert reply.ids[-1] in {2, *range(3, 16)}
    assert not set(reply.ids[:-1]) & {2, *range(3, 16)}


async def test_the_token_limit_is_exact(fresh: Served) -> None:
    sampling = Sampling(3, temperature=0.0)
    reply = await fresh.engine.generate(prompt(20), sampling, "s")
    assert (reply.finish, len(reply.ids)) == (Finish.LENGTH, 3)


async def test_abort_ends_only_its_session_and_returns_its_tokens(fresh: Served) -> None:
    ids, sampling = await endless(fresh, at_least=300)
    aborted = asyncio.create_task(fresh.engine.generate(ids, sampling, "gone"))
    kept = asyncio.create_task(fresh.engine.generate(prompt(5), Sampling(40, seed=1), "kept"))
    await asyncio.sleep(0.02)
    await fresh.engine.abort("gone")
    reply = await aborted
    assert reply.finish is Finish.ABORT
    assert len(reply.ids) < sampling.max_new_tokens
    assert (await kept).finish in {Finish.LENGTH, Finish.STOP}


async def test_pause_holds_requests_until_resume(fresh: Served) -> None:
    await fresh.engine.pause()
    task = asyncio.create_task(fresh.engine.generate(prompt(5), Sampling(4), "s"))
    done, _ = await asyncio.wait([task], timeout=0.15)
    assert not done
    await fresh.engine.resume()
    assert (await task).ids


async def test_loaded_weights_are_the_ones_that_answer(fresh: Served, reference: Any) -> None:
    before = await fresh.engine.generate(prompt(40), Sampling(10), "s")
    assert await fresh.engine.load(ref(fresh.other, "v1")) == "v1"
    after = await fresh.engine.generate(prompt(40), Sampling(10), "s")
    assert (before.weight_version, after.weight_version) == ("v0", "v1")
    assert after.cached_tokens == 0
    assert_agrees(reference.logprobs(fresh.other, prompt(40), list(after.ids)), after)


async def test_a_reply_that_spans_an_update_counts_as_the_older_version(
    fresh: Served, reference: Any
) -> None:
    ids, sampling = await endless(fresh, at_least=300)
    task = asyncio.create_task(fresh.engine.generate(ids, sampling, "s"))
    await asyncio.sleep(0.03)
    await fresh.engine.load(ref(fresh.other, "v1"))
    reply = await task
    assert reply.weight_version == "v0"
    assert len(reply.ids) == sampling.max_new_tokens
    old = reference.logprobs(fresh.model, ids, list(reply.ids))
    new = reference.logprobs(fresh.other, ids, list(reply.ids))
    found = torch.tensor(reply.logprobs)
    num_old = int(((found - old).abs() < TOLERANCE).long().cumprod(0).sum())
    assert 0 < num_old < len(found)
    assert (found[num_old:] - new[num_old:]).abs().max() < TOLERANCE


async def test_a_folder_that_is_not_there_leaves_the_old_weights_serving(fresh: Served) -> None:
    with pytest.raises(EngineError):
        await fresh.engine.load(WeightRef(fresh.model / "missing", "v9", "0"))
    reply = await fresh.engine.generate(prompt(5), Sampling(2), "s")
    assert reply.weight_version == "v0"


@pytest.mark.parametrize(
    ("ids", "sampling", "told"),
    [
        (prompt(1025), Sampling(1), "context"),
        (prompt(1000), Sampling(100), "context"),
        ([5, 512], Sampling(1), "vocabulary"),
        ([], Sampling(1), "input_ids"),
    ],
    ids=["prompt too long", "no room for the reply", "unknown id", "empty prompt"],
)
async def test_bad_requests_are_refused_and_the_engine_lives_on(
    fresh: Served, ids: list[int], sampling: Sampling, told: str
) -> None:
    with pytest.raises(EngineError, match=told):
        await fresh.engine.generate(ids, sampling, "s")
    assert (await fresh.engine.generate([5], Sampling(1), "s")).ids


async def test_usage_counts_what_was_sampled(fresh: Served) -> None:
    before = await fresh.engine.usage()
    reply = await fresh.engine.generate(prompt(20), Sampling(5), "s")
    after = await fresh.engine.usage()
    assert after.num_requests == before.num_requests + 1
    assert after.num_prompt_tokens == before.num_prompt_tokens + 20
    assert after.num_output_tokens == before.num_output_tokens + len(reply.ids)
    assert after.busy_s > before.busy_s


async def endless(served: Served, *, at_least: int) -> tuple[list[int], Sampling]:
    """Return a request that is known to run for many tokens: a greedy one without a stop."""
    for seed in range(20):
        ids = prompt(10, seed)
        reply = await served.engine.generate(ids, Sampling(at_least, temperature=0.0), "probe")
        if len(reply.ids) == at_least:
            return ids, Sampling(at_least, temperature=0.0)
    pytest.fail("every greedy continuation stops early")


def assert_agrees(expected: torch.Tensor, reply: Completion) -> None:
    found: Sequence[float] = reply.logprobs
    assert (expected - torch.tensor(found)).abs().max() < TOLERANCE
