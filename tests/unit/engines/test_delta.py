"""Weight deltas: rebuilt versions are equal bit by bit, and anything less never appears."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest

from swerl.core.errors import EngineError, EngineLostError
from swerl.core.learning import WeightRef
from swerl.engines import _delta, _delta_http, _sglang_pool, _sglang_update
from swerl.engines._delta import DeltaWriter, fetch
from swerl.engines._delta_http import KEY, Receiver, send
from swerl.engines._sglang_client import connect
from swerl.engines._sglang_pool import ClientSettings
from swerl.engines._sglang_wire import ServedShape
from swerl.engines._weights import checksum
from swerl.engines.sglang import free_port
from tests.unit.engines._fake_sglang import VOCAB, FakeServer

np = pytest.importorskip("numpy", reason="needs the extra swerl[twin]")
pytest.importorskip("zstandard", reason="needs the extra swerl[zstd]")
SIZE = 60_001
"""Parameters of the model; an odd number of bytes with its last file."""


class Trainer:
    """Publishes versions of a small model in 16 bits, of which a step changes few."""

    def __init__(self, root: Path, *, adapters: bool = False) -> None:
        self.prefix = "adapter_" if adapters else ""
        """The names of PEFT's files begin with it."""
        self.settings = '{"odd": 1}\n'
        self.local, self.shared = root / "trainer", root / "shared"
        self.local.mkdir()
        self.shared.mkdir()
        self.bits = np.random.default_rng(0).normal(0, 0.02, SIZE).astype("f4").view("u4") >> 16
        self.bits = self.bits.astype("u2")
        self.writer = DeltaWriter(self.shared)
        self.step = 0

    def publish(self) -> WeightRef:
        folder = self.local / f"{self.step:06d}"
        folder.mkdir()
        header = {"w": {"dtype": "BF16", "shape": [SIZE], "data_offsets": [0, 2 * SIZE]}}
        text = json.dumps(header).encode()
        blob = len(text).to_bytes(8, "little") + text + self.bits.tobytes()
        (folder / f"{self.prefix}model.safetensors").write_bytes(blob)
        (folder / f"{self.prefix}config.json").write_text(self.settings)
        found = self.writer.write(WeightRef(folder, folder.name, checksum(folder)))
        # Only two whole versions stay, as `publish` leaves them.
        for old in sorted(self.local.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-2]:
            shutil.rmtree(old)
        return found

    def learn(self) -> WeightRef:
        rng = np.random.default_rng(self.step + 1)
        self.bits[rng.integers(0, SIZE, SIZE // 100)] ^= 1
        self.step += 1
        return self.publish()


def _at(ref: WeightRef, machine: Path) -> WeightRef:
    """Return a reference as another machine sees it, with a local folder of its own."""
    return replace(ref, path=machine / ref.path.name)


def _assert_equal(ref: WeightRef, machine: Path) -> None:
    for path in ref.path.iterdir():
        assert (machine / ref.path.name / path.name).read_bytes() == path.read_bytes()


def test_twenty_versions_arrive_bit_by_bit_in_a_tenth_of_the_bytes(tmp_path: Path) -> None:
    trainer, machine = Trainer(tmp_path), tmp_path / "machine"
    fetch(_at(trainer.publish(), machine))
    sizes = []
    for _ in range(20):
        ref = trainer.learn()
        assert ref.delta is not None
        sizes.append(ref.delta.stat().st_size)
        fetch(_at(ref, machine))
        _assert_equal(ref, machine)
    whole = 2 * SIZE
    assert sum(size > whole / 10 for size in sizes) == 1  # every 20th is whole
    assert len(list(machine.glob("0*"))) == 2
    assert len(list(trainer.shared.iterdir())) <= 21


def test_a_machine_that_missed_versions_catches_up(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    refs = [trainer.publish(), *(trainer.learn() for _ in range(5))]
    fetch(_at(refs[5], tmp_path / "late"))
    _assert_equal(refs[5], tmp_path / "late")
    fetch(_at(refs[1], tmp_path / "early"))
    fetch(_at(refs[5], tmp_path / "early"))
    _assert_equal(refs[5], tmp_path / "early")


def test_the_same_weights_again_are_no_new_version(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    first = trainer.publish()
    again = trainer.publish()
    assert again == first
    assert again.path.is_dir()


def test_weights_that_a_crash_lost_are_not_taken_for_those_of_the_same_step(
    tmp_path: Path,
) -> None:
    trainer, machine = Trainer(tmp_path), tmp_path / "machine"
    start = trainer.publish()
    fetch(_at(start, machine))
    lost = trainer.learn()
    fetch(_at(lost, machine))
    # The trainer resumes before that step and learns something else.
    trainer.step, trainer.bits = 0, trainer.bits ^ 2
    trainer.writer = DeltaWriter(trainer.shared)
    other = trainer.learn()
    assert other.version == lost.version
    fetch(_at(other, machine))
    _assert_equal(other, machine)


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "empty", "no base"])
def test_a_damaged_delta_never_serves(tmp_path: Path, damage: str) -> None:
    trainer, machine = Trainer(tmp_path), tmp_path / "machine"
    first = trainer.publish()
    fetch(_at(first, machine))
    ref = trainer.learn()
    assert ref.delta is not None and first.delta is not None
    data = ref.delta.read_bytes()
    if damage == "cut":
        ref.delta.write_bytes(data[:-5])
    elif damage == "flipped":
        ref.delta.write_bytes(data[:-50] + bytes([data[-50] ^ 1]) + data[-49:])
    elif damage == "empty":
        ref.delta.write_bytes(b"")
    elif damage == "missing":
        ref.delta.unlink()
    else:
        shutil.rmtree(machine)
        first.delta.unlink()
    with pytest.raises(EngineError) as caught:
        fetch(_at(ref, machine))
    assert caught.value.hint
    assert not (machine / ref.path.name).exists()
    ref.delta.write_bytes(data)
    if damage != "no base":
        fetch(_at(ref, machine))
        _assert_equal(ref, machine)


def test_a_base_that_changed_on_a_machines_disk_is_replaced(tmp_path: Path) -> None:
    trainer, machine = Trainer(tmp_path), tmp_path / "machine"
    first = trainer.publish()
    fetch(_at(first, machine))
    held = machine / first.path.name / "model.safetensors"
    held.write_bytes(held.read_bytes()[:-1] + b"\x55")
    ref = trainer.learn()
    fetch(_at(ref, machine))
    _assert_equal(ref, machine)
    assert not held.exists()


def test_a_delta_of_other_weights_never_serves(tmp_path: Path) -> None:
    trainer, machine = Trainer(tmp_path), tmp_path / "machine"
    trainer.publish()
    old, new = trainer.learn(), trainer.learn()
    assert old.delta is not None and new.delta is not None
    shutil.copyfile(old.delta, new.delta)
    with pytest.raises(EngineError, match="arrived changed"):
        fetch(_at(new, machine))
    assert not (machine / new.path.name).exists()


FETCH = """
import sys
from pathlib import Path
from swerl.core.learning import WeightRef
from swerl.engines import _delta
_delta._CHUNK = 1 << 12
print("ready", flush=True)
_delta.fetch(WeightRef(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])))
"""


def test_a_rebuild_that_is_killed_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_delta, "_CHUNK", 1 << 9)  # many pieces, so that kills fall between them
    trainer, machine, rng = Trainer(tmp_path), tmp_path / "machine", random.Random(0)
    fetch(_at(trainer.publish(), machine))
    for _ in range(4):
        ref = _at(trainer.learn(), machine)
        arguments = [str(ref.path), ref.version, ref.checksum, str(ref.delta)]
        process = subprocess.Popen([sys.executable, "-c", FETCH, *arguments], stdout=-1)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        if ref.path.exists():
            assert checksum(ref.path) == ref.checksum
        fetch(ref)
        assert checksum(ref.path) == ref.checksum


SECRET = "a key of both machines"


@dataclass
class Wire:
    """A connection to the other machine: it counts bytes, and cuts or changes them."""

    port: int
    num_bytes: int = 0
    cut_after: int = 0
    """Bytes after which each connection breaks; 0 for none."""
    flip: bytes = b""
    """The first byte of this text is changed on its way."""

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        left = self.cut_after or sys.maxsize
        with suppress(ConnectionError):
            while (data := await source.read(min(left, 1 << 16))) and left > 0:
                left -= len(data)
                self.num_bytes += len(data)
                sink.write(data.replace(self.flip, b"~" + self.flip[1:]) if self.flip else data)
                await sink.drain()
        sink.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(self.pump(reader, back), self.pump(there, writer))


@pytest.fixture(params=["weights", "adapters"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Trainer:
    return Trainer(tmp_path, adapters=request.param == "adapters")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    return tmp_path / "machine"


@asynccontextmanager
async def elsewhere(folder: Path) -> AsyncIterator[tuple[str, Wire]]:
    """Yield the URL of a receiver on another machine, and the wire to it."""
    async with Receiver(folder, SECRET).listen("127.0.0.1", 0) as port:
        wire = Wire(port)
        async with await asyncio.start_server(wire.serve, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", wire


async def test_twenty_versions_arrive_over_http_in_a_tenth_of_the_bytes(
    trainer: Trainer, machine: Path
) -> None:
    async with elsewhere(machine) as (url, wire):
        assert await send(trainer.publish(), url, key=SECRET, timeout_s=60) is not None
        wire.num_bytes, sizes = 0, []
        for _ in range(20):
            ref = trainer.learn()
            assert ref.delta is not None
            sizes.append(ref.delta.stat().st_size)
            assert await send(ref, url, key=SECRET, timeout_s=60) == machine / ref.path.name
            _assert_equal(ref, machine)
    assert wire.num_bytes < sum(sizes) + 20 * 6000
    assert sum(size > 2 * SIZE / 10 for size in sizes) == 1
    names = {path.name for path in machine.iterdir()} - {".lock"}
    assert len(names) == 2 and ref.path.name in names


async def test_broken_connections_go_on_at_the_byte_that_arrived_last(
    trainer: Trainer, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_delta_http, "_PIECE", 5_000)
    refs = [trainer.publish(), trainer.learn(), trainer.learn()]
    async with elsewhere(machine) as (url, wire):
        wire.cut_after = 18_000
        # The machine missed the first two versions.
        await send(refs[-1], url, key=SECRET, timeout_s=60)
    _assert_equal(refs[-1], machine)
    needed = sum(ref.delta.stat().st_size for ref in refs if ref.delta)
    assert needed < wire.num_bytes < 2 * needed


@pytest.mark.parametrize("key", ["another key of 22 bytes", "changed on its way"])
async def test_a_request_that_the_key_did_not_sign_is_refused(
    trainer: Trainer, machine: Path, key: str
) -> None:
    async with elsewhere(machine) as (url, wire):
        if key == "changed on its way":
            wire.flip, key = b'"checksum": ', SECRET
        with pytest.raises(EngineError, match="another key, or the request was changed") as caught:
            await send(trainer.publish(), url, key=key, timeout_s=60)
        assert KEY in caught.value.hint
    assert not list(machine.glob("0*"))


@pytest.mark.parametrize("left", ["torn", "of another start", "longer", "base changed"])
async def test_leftovers_on_the_other_machine_do_not_serve(
    trainer: Trainer, machine: Path, left: str
) -> None:
    machine.mkdir()
    first = trainer.publish()
    async with elsewhere(machine) as (url, _):
        await send(first, url, key=SECRET, timeout_s=60)
        ref = trainer.learn()
        assert ref.delta is not None and first.delta is not None
        if left == "torn":
            (machine / ref.delta.with_suffix(".part").name).write_bytes(b"\0" * 1000)
        elif left == "longer":
            (machine / ref.delta.with_suffix(".part").name).write_bytes(b"\0" * 3 * SIZE)
        elif left == "of another start":
            shutil.copyfile(first.delta, machine / ref.delta.name)
        else:
            held = machine / first.path.name / f"{trainer.prefix}model.safetensors"
            held.write_bytes(held.read_bytes()[:-1] + b"\x55")
        assert await send(ref, url, key=SECRET, timeout_s=60) == machine / ref.path.name
    _assert_equal(ref, machine)


async def test_adapters_of_another_scale_or_that_changed_on_disk_do_not_serve(
    tmp_path: Path, machine: Path
) -> None:
    """Two runs with the same first adapters, which change nothing yet, and two values of alpha."""
    (tmp_path / "other").mkdir()
    old, new = Trainer(tmp_path / "other", adapters=True), Trainer(tmp_path, adapters=True)
    old.settings, new.settings = '{"r": 2, "lora_alpha": 2}', '{"r": 2, "lora_alpha": 8}'
    async with elsewhere(machine) as (url, _):
        await send(old.publish(), url, key=SECRET, timeout_s=60)
        await send(new.publish(), url, key=SECRET, timeout_s=60)
        ref = new.learn()
        await send(ref, url, key=SECRET, timeout_s=60)
        _assert_equal(ref, machine)
        (machine / ref.path.name / "adapter_config.json").write_text(old.settings)
        await send(ref, url, key=SECRET, timeout_s=60)
    _assert_equal(ref, machine)


async def test_pieces_out_of_turn_and_names_outside_the_folder_are_not_written(
    tmp_path: Path,
) -> None:
    async with elsewhere(tmp_path / "machine") as (url, _), aiohttp.ClientSession() as client:

        async def put(target: str, body: bytes) -> object:
            signed = {"X-Signature": _delta_http._signature(SECRET, "PUT", target, body)}
            async with client.put(url + target, data=body, headers=signed) as response:
                return await response.json()

        name = "/deltas/000001-0123456789ab"
        assert await put(f"{name}?at=0&of=9", b"abc") == {"size": 3}
        assert await put(f"{name}?at=6&of=9", b"ghi") == {"size": 3}
        assert await put(f"{name}?at=3&of=9", b"def") == {"size": 6}
        assert await put(f"{name}?at=3&of=9", b"def") == {"size": 6}
        assert await put(f"{name}?at=6&of=9", b"ghi") == {"size": 9}
        assert (tmp_path / f"machine{name[7:]}.delta").read_bytes() == b"abcdefghi"
        assert "is no version" in str(await put("/deltas/..%2Fother?at=0&of=3", b"abc"))
    assert not (tmp_path / "other.part").exists()


async def test_a_receiver_that_is_killed_loses_nothing_and_one_that_stays_away_is_given_up(
    trainer: Trainer, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_delta_http, "_PIECE", 2_000)
    monkeypatch.setenv(KEY, SECRET)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "swerl.cli", "train", "receive", str(machine)]
    refs = [trainer.publish(), *(trainer.learn() for _ in range(3))]
    sending = asyncio.create_task(send(refs[-1], url, key=SECRET, timeout_s=120))
    for seen in ("0*.part", ".part", "never"):
        receiver = await asyncio.create_subprocess_exec(*command, "--port", str(port), stdout=-3)
        while not sending.done() and not list(machine.glob(seen)):
            await asyncio.wait([sending], timeout=0.001)
        receiver.kill()
        await receiver.wait()
    assert await sending == machine / refs[-1].path.name
    _assert_equal(refs[-1], machine)
    with pytest.raises(EngineLostError, match="is gone"):
        await send(trainer.learn(), url, key=SECRET, timeout_s=60, away_s=0.2)


async def test_an_engine_whose_receiver_is_away_is_left_out_and_catches_up(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines, here two addresses; the fakes load any folder, as the wire alone counts."""
    monkeypatch.setenv(KEY, SECRET)
    monkeypatch.setattr(_sglang_update, "AWAY_S", 0.2)
    monkeypatch.setattr(_sglang_pool, "WATCH_EVERY_S", 0.05)
    here, there = FakeServer(tmp_path), FakeServer(tmp_path)
    await here.start()
    await there.start(host="127.0.0.2")
    second = Receiver(tmp_path / "second", SECRET)
    async with Receiver(tmp_path / "first", SECRET).listen("127.0.0.1", 0) as port:
        settings = ClientSettings(receiver_port=port, adapters="endpoint" if trainer.prefix else "")
        urls = [here.url, there.url]
        async with connect(urls, shape=ServedShape(VOCAB), settings=settings) as engine:
            async with second.listen("127.0.0.2", port):
                first = trainer.publish()
                await engine.load(first)
            assert there.version == here.version == first.version
            ref = trainer.learn()
            await engine.load(ref)
            assert (here.version, there.version) == (ref.version, first.version)
            assert [server.in_use for server in engine.pool.servers] == [True, False]
            async with second.listen("127.0.0.2", port), asyncio.timeout(30):
                while not all(each.in_use for each in engine.pool.servers):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)  # the pool watches by itself
            assert there.version == ref.version
            _assert_equal(ref, tmp_path / "second")
            served = {"policy": tmp_path / "second" / ref.path.name} if trainer.prefix else {}
            assert there.adapters == served
    await asyncio.gather(here.stop(), there.stop())
