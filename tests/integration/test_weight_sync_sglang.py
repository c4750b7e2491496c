"""Weights from real ranks into real SGLang: two servers on the CPU, two tensor-parallel ranks.

Needs an interpreter with SGLang in SWERL_SGLANG_PYTHON; skips without.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineLostError, RankLostError, TrainerError
from swerl.core.events import Event
from swerl.core.learning import Batch, EngineTarget, Sent
from swerl.core.sample import Sample
from swerl.core.turn import Completion, Sampling
from swerl.engines import _sglang_pool, sglang
from swerl.engines._sglang_client import HttpEngine
from swerl.engines.families import tiny
from swerl.engines.families.tiny import TinyShape
from swerl.recipe.schema import ClusterSection
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from swerl.training.warm_start import make_tiny_model
from swerl.training.weight_sync import sync as weight_sync
from tests.sglang_cpu.interpreter import sglang_python
from tests.unit.engines._updates import TrainerSource, receive, resending
from tests.unit.training.weight_sync._live_servers import (
    has_connection,
    kill_server,
    stop_server,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_PARAMETERS = 18
"""Of the tiny model, as SGLang fuses them."""
UPDATES = 5
PROMPT = list(range(3, 40))
SHAPE = TinyShape(
    init_std=0.05,
    vocab_size=320,
    hidden_size=256,
    ffn_hidden_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
"""So large that it travels in several pieces of a MiB."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights."""
    root = tmp_path_factory.mktemp("model")
    (root / "tokenizer").mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), root / "tokenizer")
    return make_tiny_model(root / "model", SHAPE, seed=0, tokenizer=root / "tokenizer", eos_id=2)


async def test_an_update_of_the_model_has_several_pieces(model: Path) -> None:
    assert sum(path.stat().st_size for path in model.glob("*.safetensors")) > 4 * 2**20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HttpEngine]:
    """Two launched servers, each with the whole model."""
    options = sglang.Options(python=sglang_python(), servers=2, restarts=3, start_timeout_s=600)
    logs = tmp_path_factory.mktemp("engine")
    setup = EngineSetup(family=None, log_dir=logs, model=model)  # type: ignore[arg-type]
    async with sglang.open(options, setup) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(
    engine: HttpEngine, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[MegatronTrainer]:
    """Two ranks that share the model."""
    root = tmp_path_factory.mktemp("trainer")
    options = two_ranks(root)
    opened = MegatronTrainer(model=model, family="tiny", algorithm="gspo", options=options)
    async with opened:
        yield opened


def two_ranks(root: Path) -> TrainerOptions:
    """Return options whose pieces are small, so that an update has several."""
    return TrainerOptions(
        ranks=2,
        tensor_parallel=2,
        checkpoint_dir=root / "checkpoints",
        publish_dir=root / "weights",
        log_dir=root,
        lr=1e-3,
        warmup_steps=2,
        weight_bucket_mib=1,
    )


async def sample(engine: HttpEngine, num_tokens: int = 24, count: int = 6) -> list[Completion]:
    """Sample replies of several sessions, so that both servers are asked."""
    sampling = Sampling(num_tokens, temperature=1.0)
    calls = (engine.generate(PROMPT, sampling, f"session-{n}") for n in range(count))
    return list(await asyncio.gather(*calls))


async def mismatch(trainer: MegatronTrainer, replies: Sequence[Completion]) -> float:
    """Return the mean absolute difference of log-probabilities, a token."""
    rows = [
        Sample("e", "t", (*PROMPT, *reply.ids), (0,) * len(PROMPT) + (1,) * len(reply.ids),
               (0.0,) * len(PROMPT) + reply.logprobs)
        for reply in replies
    ]  # fmt: skip
    known = await trainer.logprobs(Batch(0, tuple(rows), len(rows)))
    gaps = [
        abs(ours - theirs)
        for row, logprobs in zip(rows, known, strict=True)
        for ours, theirs in zip(logprobs, row.logprobs[len(PROMPT) :], strict=True)
    ]
    return sum(gaps) / len(gaps)


@pytest.mark.parametrize("way", ["tensor", "distributed", "disk"])
async def test_five_updates_leave_engine_and_trainer_in_agreement(
    engine: HttpEngine,
    trainer: MegatronTrainer,
    random_batch: Callable[..., Batch],
    way: str,
) -> None:
    events: list[Event] = []
    before = await sample(engine)
    for step in range(UPDATES):
        stats = await trainer.step(random_batch(step))
        cluster = ClusterSection(weight_sync=way)  # type: ignore[arg-type]
        version = await weight_sync.sync(trainer, engine, cluster, events.append)
        assert stats.num_tokens > 0
    after = await sample(engine)
    assert {reply.weight_version for reply in after} == {version} != before[0].weight_version
    assert await mismatch(trainer, after) <= 1e-4
    assert await mismatch(trainer, before) > 1e-4  # else the steps changed nothing
    assert not events


@pytest.mark.parametrize("way", ["tensor", "distributed"])
async def test_every_parameter_is_confirmed_by_its_checksum(
    engine: HttpEngine, trainer: MegatronTrainer, way: str
) -> None:
    received = await receive(engine, TrainerSource(trainer, way))
    assert received.num_confirmed == NUM_PARAMETERS


async def test_replies_under_way_go_on_over_an_update(
    engine: HttpEngine, trainer: MegatronTrainer, random_batch: Callable[..., Batch]
) -> None:
    old = (await receive(engine, TrainerSource(trainer, "tensor"))).version
    long = asyncio.create_task(sample(engine, 200))
    await until(lambda: bool(engine._flights))
    await trainer.step(random_batch(9))
    new = (await receive(engine, TrainerSource(trainer, "distributed"))).version
    replies = await long
    spans = {
        (reply.weight_version, *(c.version for c in reply.weight_changes)) for reply in replies
    }
    assert spans <= {(old,), (old, new), (new,)}


async def test_an_engine_that_slept_wakes_with_the_next_weights(
    engine: HttpEngine, trainer: MegatronTrainer
) -> None:
    await engine.sleep()
    received = await receive(engine, TrainerSource(trainer, "tensor"))
    replies = await sample(engine)
    assert received.num_confirmed == NUM_PARAMETERS
    assert await mismatch(trainer, replies) <= 1e-4


class _CutOff:
    """A source that dies after its first piece."""

    async def send(self, targets: Sequence[EngineTarget], *, version: str | None = None) -> Sent:
        """Send one tensor of noise by shared memory, and fail."""
        import torch

        from swerl.training.weight_sync.transport import Bucket, Caller, failures, handle

        name = "model.layers.0.mlp.down_proj.weight"
        bucket = Bucket((name,), (torch.randn(256, 512),))
        flat = bucket.flat()
        body = {"serialized_named_tensors": [handle(bucket, flat)], "flush_cache": False}
        body["load_format"] = "flattened_bucket"
        caller = Caller(len(targets), 60.0)
        path = "/update_weights_from_tensor"
        calls = {each.url: caller.start(each.url, path, body) for each in targets}
        assert not await asyncio.to_thread(failures, calls)
        raise TrainerError("rank 0 died", hint="")


async def test_no_token_comes_from_an_update_that_was_cut_off(
    engine: HttpEngine, trainer: MegatronTrainer, model: Path
) -> None:
    urls = tuple(server.url for server in engine.pool.servers)
    setup = EngineSetup(family=None, log_dir=Path(), model=model)  # type: ignore[arg-type]
    async with (
        engine.pool.changing,  # it would see a foreign update, and begin its own
        sglang.open(sglang.Options(url=urls), setup) as another,
    ):
        with pytest.raises(TrainerError, match="rank 0 died"):
            await receive(another, _CutOff())
        with pytest.raises(EngineLostError, match="interrupted"):
            await another.generate(PROMPT, Sampling(4), "a session")
    received = await receive(engine, TrainerSource(trainer, "distributed"))
    assert received.num_confirmed == NUM_PARAMETERS
    assert await mismatch(trainer, await sample(engine)) <= 1e-4


class _Hanging:
    """A source under which one server stops for good in the middle of the first broadcast."""

    def __init__(self, source: TrainerSource, victim: str, sender: int) -> None:
        self._is_done = False
        self._source = source
        self._victim = victim
        self._sender = sender

    async def send(self, targets: Sequence[EngineTarget], *, version: str | None = None) -> Sent:
        """Stop every process of the server once, and see the trainer wait for it."""
        if self._is_done:
            return await self._source.send(targets, version=version)
        self._is_done = True
        stop_server(self._victim)
        sending = asyncio.create_task(self._source.send(targets, version=version))
        await until(lambda: has_connection(self._sender, self._victim))
        assert not sending.done()
        return await sending


async def test_a_server_that_hangs_in_a_broadcast_is_replaced_without_delay_for_others(
    engine: HttpEngine,
    trainer: MegatronTrainer,
    random_batch: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_sglang_pool, "WATCH_EVERY_S", 1.0)
    await both_serve(engine)
    source = TrainerSource(trainer, "distributed")
    old = (await receive(engine, source)).version  # both servers are in the trainer's group
    under_way = asyncio.create_task(sample(engine, 200))
    await until(lambda: bool(engine._flights))
    await trainer.step(random_batch(11))
    first, second = engine.pool.servers
    received = await receive(engine, _Hanging(source, second.url, trainer.pids[0]))
    assert received.num_confirmed == NUM_PARAMETERS
    assert second.lost and not first.lost
    assert {reply.weight_version for reply in await under_way} <= {old, received.version}
    replies = await sample(engine)
    assert {reply.weight_version for reply in replies} == {received.version}
    assert await mismatch(trainer, replies) <= 1e-4


class _Dying:
    """A source whose trainer loses a rank while one server waits for the rest of the weights."""

    def __init__(self, source: TrainerSource, slow: str, sender: int, victim: int) -> None:
        self._source = source
        self._slow = slow
        self._sender = sender
        self._victim = victim

    async def send(self, targets: Sequence[EngineTarget], *, version: str | None = None) -> Sent:
        """Stop one server, wait until the trainer waits for it, and kill the rank."""
        resume = stop_server(self._slow)
        try:
            sending = asyncio.create_task(self._source.send(targets, version=version))
            await until(lambda: has_connection(self._sender, self._slow))
            assert not sending.done()
            os.kill(self._victim, signal.SIGKILL)
            return await sending
        finally:
            resume()


class _Start:
    """One start of a run: a trainer of its own, and an engine on servers that others started."""

    def __init__(self, engine: HttpEngine, model: Path, root: Path) -> None:
        self._servers = engine.pool.servers
        self._model = model
        self._root = root

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[HttpEngine, MegatronTrainer]]:
        urls = tuple(server.url for server in self._servers)
        setup = EngineSetup(family=None, log_dir=Path(), model=self._model)  # type: ignore[arg-type]
        trainer = MegatronTrainer(
            model=self._model, family="tiny", algorithm="gspo", options=two_ranks(self._root)
        )
        async with sglang.open(sglang.Options(url=urls), setup) as engine, trainer:
            yield engine, trainer

    async def lose(
        self, engine: HttpEngine, trainer: MegatronTrainer, way: str, *, rank: int
    ) -> None:
        """Kill a rank in mid-update; neither server may hold, or serve, anything afterwards."""
        sender, victim = trainer.pids[0], trainer.pids[rank]
        source = _Dying(TrainerSource(trainer, way), self._servers[1].url, sender, victim)
        with pytest.raises(RankLostError, match=f"rank {rank} .*killed by SIGKILL"):
            await receive(engine, source)
        for server in self._servers:
            info = await server.get("/model_info")
            assert str(info["weight_version"]).startswith("partial:")
        await refuse(engine)


async def refuse(engine: HttpEngine) -> None:
    """Require that no token comes from servers whose weights may be of two versions."""
    with pytest.raises(EngineLostError, match="interrupted"):
        await engine.generate(PROMPT, Sampling(4), "a session")


async def test_after_a_rank_is_killed_in_an_update_only_whole_weights_serve(
    engine: HttpEngine,
    trainer: MegatronTrainer,
    model: Path,
    tmp_path: Path,
    random_batch: Callable[..., Batch],
) -> None:
    await both_serve(engine)
    start = _Start(engine, model, tmp_path)
    async with engine.pool.changing:  # it leaves its servers to this run
        async with start.open() as (served, doomed):
            await doomed.step(random_batch(0))
            await doomed.save(1)
            await doomed.saved()
            committed = (await receive(served, TrainerSource(doomed, "tensor"))).version
            await doomed.step(random_batch(1))
            await start.lose(served, doomed, "tensor", rank=1)
        async with start.open() as (served, doomed):
            await refuse(served)
            await doomed.restore(1)
            received = await receive(served, TrainerSource(doomed, "distributed"))
            assert (received.version, received.num_confirmed) == (committed, NUM_PARAMETERS)
            replies = await sample(served)
            assert {reply.weight_version for reply in replies} == {committed}
            assert await mismatch(doomed, replies) <= 1e-4
            await doomed.step(random_batch(1))
            await start.lose(served, doomed, "distributed", rank=0)
    received = await receive(engine, TrainerSource(trainer, "distributed"))
    assert received.num_confirmed == NUM_PARAMETERS
    assert await mismatch(trainer, await sample(engine)) <= 1e-4


async def both_serve(engine: HttpEngine) -> None:
    """Wait until the watch has taken back every server that was lost."""
    await until(lambda: not any(server.lost for server in engine.pool.servers))


async def test_a_killed_server_is_replaced_and_its_requests_answered_by_the_right_weights(
    engine: HttpEngine, trainer: MegatronTrainer
) -> None:
    source = TrainerSource(trainer, "tensor")
    version = (await receive(engine, source)).version
    async with resending(engine, source):
        under_way = asyncio.create_task(sample(engine, 300))
        await until(lambda: bool(engine._flights))
        victim = engine.pool.servers[0]
        kill_server(victim.url)
        replies = await under_way
        assert {reply.weight_version for reply in replies} == {version}
        assert await mismatch(trainer, replies) <= 1e-4
        await both_serve(engine)
    for server in engine.pool.servers:
        assert (await server.get("/model_info"))["weight_version"] == version
    assert await mismatch(trainer, await sample(engine)) <= 1e-4
