"""Running replies when weights change: kept, finished or retried; on a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from swerl.core.chat import Finish
from swerl.core.contracts import EngineSetup
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling
from swerl.engines import torch_cpu
from swerl.engines._sglang_client import HttpEngine
from swerl.engines._weights import checksum
from swerl.rollout.draining import DrainingEngine
from tests.unit.engines.conftest import save_tiny

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = Sampling(900, temperature=1.0, seed=3)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WeightRef]:
    """Two models without an end token, as versions `a` and `b`."""
    found = {}
    for seed, version in enumerate("ab"):
        folder = save_tiny(tmp_path_factory.mktemp(version), seed=seed)
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": None}))
        found[version] = WeightRef(folder, version, checksum(folder))
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, weights: dict[str, WeightRef]
) -> AsyncIterator[HttpEngine]:
    no_family: Any = None
    setup = EngineSetup(no_family, tmp_path_factory.mktemp("log"), weights["a"].path)
    async with torch_cpu.open(torch_cpu.Options(), setup) as engine:
        yield engine


async def mid_reply(engine: HttpEngine) -> None:
    """Return once the engine has sampled some tokens of what is under way."""
    began = (await info(engine))["num_generated_tokens"]
    async with asyncio.timeout(60):
        # Another process cannot be awaited, only asked again.
        while (await info(engine))["num_generated_tokens"] < began + 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def info(engine: HttpEngine) -> dict[str, Any]:
    async with aiohttp.ClientSession() as client, client.get(f"{engine.url}/server_info") as got:
        answer: dict[str, Any] = await got.json()
        return answer


def begin(engine: HttpEngine | DrainingEngine, session: str = "s") -> asyncio.Task[Completion]:
    return asyncio.create_task(engine.generate(PROMPT, LONG, session))


def versions(completion: Completion) -> list[str]:
    return [completion.weight_version, *(each.version for each in completion.weight_changes)]


async def test_kept_replies_continue_on_the_new_weights_and_record_the_position(
    engine: HttpEngine, weights: dict[str, WeightRef]
) -> None:
    await engine.load(weights["a"])
    reply = begin(engine)
    await mid_reply(engine)
    await engine.load(weights["b"])
    completion = await reply
    assert versions(completion) == ["a", "b"]
    assert 0 < completion.weight_changes[0].at < len(completion.ids) == 900


async def test_finished_first_no_reply_mixes_weights_and_later_ones_wait(
    engine: HttpEngine, weights: dict[str, WeightRef]
) -> None:
    await engine.load(weights["a"])
    draining = DrainingEngine(engine, "finish")
    before = begin(draining)
    await mid_reply(engine)
    shutting = asyncio.create_task(_load_shut(draining, engine, weights["b"]))
    await asyncio.sleep(0)
    after = begin(draining, "other")
    await shutting
    assert before.done()
    assert (versions(await before), len((await before).ids)) == (["a"], 900)
    assert versions(await after) == ["b"]
    assert draining.num_retried == 0


async def test_retried_replies_are_whole_ones_of_the_new_weights(
    engine: HttpEngine, weights: dict[str, WeightRef]
) -> None:
    await engine.load(weights["a"])
    draining = DrainingEngine(engine, "retry")
    reply = begin(draining)
    await mid_reply(engine)
    await _load_shut(draining, engine, weights["b"])
    completion = await reply
    assert (versions(completion), len(completion.ids)) == (["b"], 900)
    assert draining.num_retried == 1
    assert 0 < draining.num_lost_tokens < 900


async def test_a_reply_aborted_by_its_client_is_not_retried(
    engine: HttpEngine, weights: dict[str, WeightRef]
) -> None:
    draining = DrainingEngine(engine, "retry")
    reply = begin(draining)
    await mid_reply(engine)
    await draining.abort("s")
    completion = await reply
    assert completion.finish is Finish.ABORT
    assert draining.num_retried == 0


async def _load_shut(draining: DrainingEngine, engine: HttpEngine, weights: WeightRef) -> None:
    async with draining.drained():
        await engine.load(weights)
