"""Weights sent into live servers: either all of them serve afterwards, or none.

The servers are fakes of the wire contract, because a fault must come when the test wants it.
`tests/integration/test_weight_sync_sglang.py` sends real weights to real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, EngineLostError, TrainerError
from swerl.core.learning import EngineTarget, Sent, WeightRef
from swerl.core.turn import Sampling
from swerl.engines import _sglang_pool, sglang
from swerl.engines._sglang_client import HttpEngine, connect
from swerl.engines._sglang_pool import ClientSettings
from swerl.training.weight_sync.transport import Caller, failures
from tests.unit.engines._fake_sglang import SHAPE, FakeServer, opened
from tests.unit.engines._launched import until, versions
from tests.unit.engines._updates import receive, resending

Fault = Callable[[], None]


class Source:
    """Sends two pieces to every server, and calls `between` in the middle."""

    def __init__(self, version: str, between: Fault = lambda: None) -> None:
        self.version = version
        self.between = between
        self.lies: str = ""
        """Pieces of which the trainer states another checksum."""
        self.certain = frozenset({"a", "b"})
        self.targets: Sequence[EngineTarget] = ()
        """The servers of the last update."""

    async def send(self, targets: Sequence[EngineTarget], *, version: str | None = None) -> Sent:
        if version not in (None, self.version):
            message = f"the trainer holds {self.version}"
            raise TrainerError(message, hint="")
        self.targets = targets
        wrong: dict[str, str] = {}
        caller = Caller(len(targets), 5.0)
        for piece in ("a", "b"):
            body = {"serialized_named_tensors": [f"{piece}={self.version}"]}
            calls = {
                each.url: caller.start(each.url, "/update_weights_from_tensor", body)
                for each in targets
                if each.url not in wrong
            }
            lost = await asyncio.to_thread(failures, calls)
            wrong |= {url: str(error) for url, error in lost.items()}
            if piece == "a":
                self.between()
        sums = {
            piece: ("other" if piece in self.lies else self.version, "cast") for piece in ("a", "b")
        }
        return Sent(self.version, 2, wrong, (sums,), self.certain)


async def test_a_server_that_refuses_a_piece_is_taken_out_until_it_took_all(
    servers: list[FakeServer],
) -> None:
    async with opened(servers) as engine:
        await receive(engine, Source("1", lambda: setattr(servers[2], "refuses_weights", True)))
        assert await versions(engine) == {"1"}
        assert servers[2].version.startswith("partial:")
        assert engine.pool.servers[2].lost
        servers[2].refuses_weights = False
        await receive(engine, Source("2"))
        assert await versions(engine) == {"2"}
        assert {server.version for server in servers} == {"2"}


async def test_a_server_that_comes_back_alone_keeps_its_place_and_gpus(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tensor` finds the memory of a server's GPUs by them, also in an update of that server."""
    monkeypatch.setattr(_sglang_pool, "WATCH_EVERY_S", 0.05)
    source = Source("1")
    async with opened(servers) as engine, resending(engine, source):
        engine.pool.servers[2].gpus = ("g2",)
        await receive(engine, source)
        assert [target.place for target in source.targets] == [0, 1, 2]
        await servers[2].restart()
        await until(lambda: servers[2].version == "1" and not servers[2].session)
        assert [(target.place, target.gpus) for target in source.targets] == [(2, ("g2",))]
        assert await versions(engine) == {"1"}


async def test_a_server_waits_if_the_trainer_holds_newer_weights(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sglang_pool, "WATCH_EVERY_S", 0.05)
    source = Source("1")
    async with opened(servers) as engine, resending(engine, source):
        await receive(engine, source)
        source.version = "2"
        await servers[0].restart()
        await until(lambda: servers[0].version.startswith("partial:"))
        assert await versions(engine) == {"1"}
        await receive(engine, source)
        assert await versions(engine) == {"2"}


async def test_a_trainer_that_dies_in_the_middle_leaves_no_server_in_use(
    servers: list[FakeServer],
) -> None:
    def die() -> None:
        raise TrainerError("a rank died", hint="")

    async with opened(servers) as engine:
        with pytest.raises(TrainerError, match="a rank died"):
            await receive(engine, Source("1", die))
        with pytest.raises(EngineLostError, match="interrupted"):
            await engine.generate([5], Sampling(2), "s")
    async with opened(servers) as after:
        with pytest.raises(EngineLostError, match="interrupted"):
            await after.generate([5], Sampling(2), "s")
        await receive(after, Source("2"))
        assert await versions(after) == {"2"}


async def test_weights_from_a_folder_repair_an_interrupted_update(
    servers: list[FakeServer], tmp_path: Path
) -> None:
    for server in servers:
        server.version, server.session = "partial:x", True
    async with opened(servers) as engine:
        with pytest.raises(EngineLostError, match="interrupted"):
            await engine.generate([5], Sampling(2), "s")
        await engine.load(WeightRef(tmp_path, "1", "checksum"))
        assert await versions(engine) == {"1"}


async def test_weights_that_arrived_changed_never_serve(servers: list[FakeServer]) -> None:
    source = Source("1")
    source.lies = "ab"
    async with opened(servers) as engine:
        with pytest.raises(EngineError, match="2 of 2 parameters arrived changed, a first"):
            await receive(engine, source)
        with pytest.raises(EngineError, match="arrived changed"):
            await engine.generate([5], Sampling(2), "s")


@pytest.mark.parametrize(
    ("certain", "dp_size"),
    [("a", 1), ("ab", 2)],
    ids=["a layout of the engine's own", "ranks that share attention's data"],
)
async def test_parameters_that_an_engine_may_cut_otherwise_are_not_confirmed_and_serve(
    servers: list[FakeServer], certain: str, dp_size: int
) -> None:
    source = Source("1")
    source.lies, source.certain = "b", frozenset(certain)
    for server in servers:
        server.dp_size = dp_size
    async with opened(servers) as engine:
        received = await receive(engine, source)
        assert (received.num_confirmed, received.num_parameters) == (1, 2)
        assert await versions(engine) == {"1"}


async def test_parameters_that_agreed_once_have_to_agree_ever_after(
    servers: list[FakeServer],
) -> None:
    source = Source("1")
    source.certain = frozenset()
    async with opened(servers) as engine:
        assert (await receive(engine, source)).num_confirmed == 2
        source.version, source.lies = "2", "b"
        with pytest.raises(EngineError, match="1 of 2 parameters arrived changed, b first"):
            await receive(engine, source)


async def test_a_sleeping_engine_wakes_in_order(servers: list[FakeServer]) -> None:
    async with opened(servers) as engine:
        await engine.sleep()
        assert all(server.released == {"weights", "kv_cache"} for server in servers)
        held: list[set[str]] = []
        await receive(engine, Source("1", lambda: held.extend(set(s.released) for s in servers)))
        assert held == [{"kv_cache"}] * 3  # the cache's memory comes last
        assert not any(server.released or server.paused for server in servers)
        assert await versions(engine) == {"1"}


class FakeHost:
    """Implements Host for a fake server; `memory` is free unless a trainer holds it."""

    gpus = ()

    def __init__(self, fake: FakeServer) -> None:
        self.fake, self.url = fake, fake.url
        self.died, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.starts = 0
        self.trainer_holds_memory = False

    async def start(self) -> None:
        assert not self.trainer_holds_memory
        self.starts += 1
        self.died.clear()
        await self.may_end.wait()
        assert not self.trainer_holds_memory
        await self.fake.restart()

    async def stop(self) -> None: ...

    async def ended(self) -> str:
        await self.died.wait()
        return "killed"

    async def die(self) -> None:
        await self.fake.stop()
        self.died.set()


@asynccontextmanager
async def hosted(servers: list[FakeServer]) -> AsyncIterator[tuple[HttpEngine, list[FakeHost]]]:
    hosts = [FakeHost(server) for server in servers]
    urls = [host.url for host in hosts]
    settings = ClientSettings(retries=2, wait_s=20)
    async with connect(urls, shape=SHAPE, settings=settings, hosts=hosts) as engine:
        yield engine, hosts


@pytest.mark.parametrize("count", [1, 3])
async def test_a_server_that_died_beside_a_working_trainer_waits_for_its_sleep(
    servers: list[FakeServer], count: int
) -> None:
    async with hosted(servers[:count]) as (engine, hosts):
        await engine.sleep()
        hosts[0].trainer_holds_memory = True
        await hosts[0].die()
        await asyncio.sleep(0.3)
        assert hosts[0].starts == 0
        hosts[0].trainer_holds_memory = False  # `sync` puts the trainer to sleep first
        # No server could have started before, so nothing waits for one until it may.
        await asyncio.wait_for(receive(engine, Source("7")), 30)
        await until(lambda: servers[0].version == "7")
        assert await versions(engine) == {"7"} and hosts[0].starts == 1


async def test_a_trainer_waits_for_a_start_and_gets_that_servers_memory_too(
    servers: list[FakeServer],
) -> None:
    async with hosted(servers) as (engine, hosts):
        await receive(engine, Source("1"))
        hosts[0].may_end.clear()
        await hosts[0].die()
        await until(lambda: hosts[0].starts == 1)
        lending = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0.3)
        assert not lending.done()
        hosts[0].may_end.set()
        await asyncio.wait_for(lending, 30)
        assert all(server.released == {"weights", "kv_cache"} for server in servers)
        await receive(engine, Source("2"))
        assert {server.version for server in servers} == {"2"}


@pytest.mark.parametrize(
    ("vocab_size", "words", "message"),
    [(999, "ab", r"other with 999 tokens, .*mine has 512"), (512, "ac", "another tokenizer")],
)
async def test_a_server_of_another_model_is_refused_by_name(
    servers: list[FakeServer], tmp_path: Path, vocab_size: int, words: str, message: str
) -> None:
    mine = _model(tmp_path / "mine", 512, "ab")
    servers[1].model = _model(tmp_path / "other", vocab_size, words)
    urls = tuple(server.url for server in servers)
    setup = EngineSetup(family=None, log_dir=tmp_path, model=mine)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=message):
        async with sglang.open(sglang.Options(url=urls), setup):
            pass


def _model(folder: Path, vocab_size: int, words: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    vocab = {word: number for number, word in enumerate(words)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return folder


async def test_a_server_on_a_gpu_that_would_keep_its_memory_does_not_sleep(
    servers: list[FakeServer],
) -> None:
    servers[0].device = "cuda"
    async with opened(servers) as engine:
        with pytest.raises(EngineError, match="cannot give its memory back"):
            await engine.sleep()
