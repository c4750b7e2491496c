"""vLLM's servers behind SGLang's calls; test_contract.py tests the rest on the same stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, EngineLostError
from swerl.core.learning import WeightRef
from swerl.core.turn import Sampling
from swerl.engines import vllm
from swerl.engines._sglang_client import HttpEngine
from tests.unit.engines._fake_sglang import fakes
from tests.unit.engines._fake_vllm import FakeVllm


@pytest.fixture
async def server(tiny_model: Path) -> AsyncIterator[FakeVllm]:
    async with fakes(tiny_model, 1, FakeVllm) as servers:
        assert isinstance(servers[0], FakeVllm)
        yield servers[0]


@pytest.fixture
async def engine(server: FakeVllm) -> AsyncIterator[HttpEngine]:
    async with connect(server) as opened:
        yield opened


def connect(server: FakeVllm) -> AbstractAsyncContextManager[HttpEngine]:
    setup = EngineSetup(family=None, log_dir=Path(), model=server.model)  # type: ignore[arg-type]
    return vllm.open(vllm.Options(url=server.url), setup)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("release", "0.31.2", f"0.31.2; tested: {vllm.TESTED}"),
        ("logprobs_mode", "raw_logprobs", "reports raw_logprobs"),
    ],
)
async def test_a_server_with_other_answers_is_refused_at_the_start(
    attribute: str, value: str, message: str, server: FakeVllm
) -> None:
    setattr(server, attribute, value)
    with pytest.raises(EngineError, match=message):
        await connect(server).__aenter__()


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}])
async def test_a_cut_distribution_is_refused(cut: dict[str, float], engine: HttpEngine) -> None:
    with pytest.raises(EngineError, match="after top-k and top-p"):
        await engine.generate([5], replace(Sampling(2), **cut), "s")


async def test_a_token_without_a_log_probability_is_an_error(
    server: FakeVllm, engine: HttpEngine
) -> None:
    def lose_one(answer: dict) -> dict:  # type: ignore[type-arg]
        answer["choices"][0]["logprobs"]["content"][0]["logprob"] = vllm.NO_LOGPROB
        return answer

    server.fault = lose_one
    with pytest.raises(EngineError, match="log-probability nan"):
        await engine.generate([5], Sampling(2), "s")


async def test_a_tied_head_is_not_reloaded_on_a_cpu(
    server: FakeVllm, tiny_model: Path, untied_model: Path
) -> None:
    server.device = "cpu"
    async with connect(server) as engine:
        with pytest.raises(EngineError, match="does not reload the head"):
            await engine.load(WeightRef(tiny_model, "v1", ""))
        assert (await engine.generate([5], Sampling(1), "s")).weight_version == "default"
        assert await engine.load(WeightRef(untied_model, "v2", "")) == "v2"


async def test_weights_that_fail_in_the_middle_are_replaced_by_the_old_ones(
    server: FakeVllm, engine: HttpEngine, tiny_model: Path, other_model: Path
) -> None:
    await engine.load(WeightRef(tiny_model, "v1", ""))
    server.refuses_reload = {str(other_model)}
    with pytest.raises(EngineError, match="size mismatch"):
        await engine.load(WeightRef(other_model, "v2", ""))
    assert (server.model, server.version) == (tiny_model, "v1")
    assert (await engine.generate([5], Sampling(1), "s")).weight_version == "v1"
    server.refuses_reload = {str(other_model), str(tiny_model)}
    with pytest.raises(EngineLostError, match="mixed"):
        await engine.load(WeightRef(other_model, "v2", ""))
    assert server.version.startswith("partial:")
