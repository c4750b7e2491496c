"""Measure weight deltas: bytes a version, on disk and over HTTP, seconds, and bit-equality.

    python bench/weight_delta.py [--kills 50]

Three sources of 20 steps in bf16: the twin's model in swerl's trainer on random rows, and AdamW on
matrices with the shapes of Qwen3-4B over four, and on LoRA adapters of Qwen3.6-35B-A3B's experts,
whose gradients are noise around a fixed direction.
Every version goes over HTTP to another machine's folder, through a relay that counts all bytes.
With `--kills` that many CPU engines, each started on the initial model, are killed while they load
the newest version from deltas; those that serve must sample as one that reads the whole folder.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import psutil
import torch

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineLostError
from swerl.core.learning import Batch, WeightRef
from swerl.core.sample import Sample
from swerl.core.turn import Sampling
from swerl.engines import torch_cpu
from swerl.engines._delta import DeltaWriter
from swerl.engines._delta_http import Receiver, send
from swerl.engines._weights import checksum
from swerl.engines.families import tiny
from swerl.recipe.schema import ModelShape
from swerl.training.model_folder import publish
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from swerl.training.warm_start import make_tiny_model

STEPS = 20
KEY = "a key of both machines"
SHAPES = {
    "q": (1024, 640),
    "k": (256, 640),
    "v": (256, 640),
    "o": (640, 1024),
    "gate": (2432, 640),
    "up": (2432, 640),
    "down": (640, 2432),
}
"""Matrices of a layer of Qwen3-4B with every size over four."""
EXPERTS = {"gate_up": (1024, 2048), "down": (2048, 512)}
"""Outputs and inputs of a routed expert of Qwen3.6-35B-A3B."""
NUM_EXPERTS, RANK = 16, 8
"""Of 256, and the rank of qwen35b_1node_lora."""
RATES = (1e-6, 1e-5, 4e-4)
"""Learning rates: of large models in RL, ten times that, and the twin's."""


@dataclass(slots=True)
class Sizes:
    """Bytes of the versions after the first, which is whole."""

    deltas: list[int]
    sent: list[int]
    """Bytes over HTTP in both directions."""
    whole: int
    write_s: float
    fetch_s: float

    def row(self, name: str) -> str:
        mean = sum(self.deltas) / len(self.deltas)
        # Without the 20th, sent whole.
        small, sent = (sorted(each)[: -(len(each) // 20)] for each in (self.deltas, self.sent))
        return (
            f"| {name} | {self.whole / 1e6:.2f} | {sum(small) / len(small) / 1e6:.4f} | "
            f"{sum(sent) / len(sent) / 1e6:.4f} | "
            f"{self.whole * len(small) / sum(small):.0f} | {self.whole / mean:.1f} | "
            f"{self.write_s / len(self.deltas):.2f} | {self.fetch_s / len(self.deltas):.2f} |"
        )


@dataclass(slots=True)
class Relay:
    """A connection to the receiver that counts the bytes of both directions."""

    port: int
    num_bytes: int = 0

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            self.num_bytes += len(data)
            sink.write(data)
            await sink.drain()
        sink.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(self.pump(reader, back), self.pump(there, writer))


@asynccontextmanager
async def receiving(machine: Path) -> AsyncIterator[Callable[[WeightRef], Awaitable[int]]]:
    """Yield a function that sends a version to another machine, and returns the bytes it took.

    Every version is compared bit by bit.
    """
    async with Receiver(machine, KEY).listen("127.0.0.1", 0) as port:
        relay = Relay(port)
        async with await asyncio.start_server(relay.serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

            async def deliver(ref: WeightRef) -> int:
                before = relay.num_bytes
                there = await send(ref, url, key=KEY, timeout_s=600)
                for path in ref.path.iterdir():
                    assert path.read_bytes() == (there / path.name).read_bytes()
                return relay.num_bytes - before

            yield deliver


async def measure(refs: Iterator[WeightRef], machine: Path) -> Sizes:
    """Send every version."""
    found = Sizes([], [], 0, 0.0, 0.0)
    started = time.perf_counter()
    async with receiving(machine) as deliver:
        for number, ref in enumerate(refs):
            found.write_s += time.perf_counter() - started
            await count(found, ref, deliver, is_first=number == 0)
            started = time.perf_counter()
    return found


async def count(
    found: Sizes, ref: WeightRef, deliver: Callable[[WeightRef], Awaitable[int]], *, is_first: bool
) -> None:
    """Send one version and add its numbers; the first one is whole."""
    assert ref.delta is not None
    started = time.perf_counter()
    sent = await deliver(ref)
    found.fetch_s += time.perf_counter() - started
    found.whole = sum(path.stat().st_size for path in ref.path.glob("*.safetensors"))
    if not is_first:
        found.deltas.append(ref.delta.stat().st_size)
        found.sent.append(sent)


def layer(root: Path, lr: float) -> Iterator[WeightRef]:
    """Yield the versions of a layer under AdamW."""
    torch.manual_seed(0)
    return versions(
        root,
        {
            f"{name}.{copy}": torch.randn(shape).mul_(0.02).requires_grad_()
            for name, shape in SHAPES.items()
            for copy in range(3)
        },
        lr,
    )


def adapters(root: Path, lr: float) -> Iterator[WeightRef]:
    """Yield the versions of LoRA adapters under AdamW: A is drawn as the trainer does, B is 0."""
    torch.manual_seed(0)
    masters = {}
    for name, (outputs, inputs) in EXPERTS.items():
        A = (2 * torch.rand(NUM_EXPERTS * RANK, inputs) - 1) / inputs**0.5
        masters[f"{name}.A"] = A.requires_grad_()
        masters[f"{name}.B"] = torch.zeros(outputs, RANK * NUM_EXPERTS).requires_grad_()
    return versions(root, masters, lr)


def versions(root: Path, masters: dict[str, torch.Tensor], lr: float) -> Iterator[WeightRef]:
    """Yield the versions of some weights in bf16."""
    signs = {name: torch.randn_like(each) for name, each in masters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    source, writer = root / "source", DeltaWriter(root / "shared")
    for folder in (source, root / "shared"):
        folder.mkdir()
    (source / "config.json").write_text("{}")
    for step in range(STEPS + 1):
        halves = ((name, each.detach().to(torch.bfloat16)) for name, each in masters.items())
        yield writer.write(publish(halves, source, root / "local" / f"{step:06d}"))
        for name, each in masters.items():
            each.grad = 0.3 * signs[name] + torch.randn_like(each)
        optimizer.step()


def rows(step: int) -> Batch:
    """Return random rows of the twin's vocabulary."""
    rng = random.Random(step)
    samples = tuple(
        Sample(
            episode=f"{n}",
            task="task",
            ids=tuple(rng.randrange(320) for _ in range(64)),
            mask=(0,) * 8 + (1,) * 56,
            logprobs=(0.0,) * 8 + (-6.0,) * 56,
            advantage=rng.uniform(-1, 1),
        )
        for n in range(8)
    )
    return Batch(step, samples, len(samples))


async def twin(root: Path, lr: float, kills: int = 0) -> Sizes:
    """Train the twin's model in bf16; afterwards kill engines that load its last version."""
    (root / "tokenizer").mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), root / "tokenizer")
    tokenizer = root / "tokenizer"
    model = make_tiny_model(root / "model", ModelShape(), seed=0, tokenizer=tokenizer, eos_id=2)
    (root / "weights").mkdir()
    options = TrainerOptions(
        checkpoint_dir=root / "checkpoints",
        publish_dir=root / "weights",
        delta_dir=root / "local",
        log_dir=root,
        dtype="bf16",
        lr=lr,
        warmup_steps=0,
    )
    sizes = Sizes([], [], 0, 0.0, 0.0)
    async with (
        receiving(root / "machine") as deliver,
        MegatronTrainer(model=model, family="tiny", algorithm="sft", options=options) as trainer,
    ):
        for step in range(STEPS + 1):
            started = time.perf_counter()
            ref = await trainer.publish()
            sizes.write_s += time.perf_counter() - started
            await count(sizes, ref, deliver, is_first=step == 0)
            await trainer.step(rows(step))
    if kills:
        loaded = await survive(root, model, ref, kills)
        print(f"{kills} kills of the engine, {loaded} after it had loaded: nothing was lost")
    return sizes


async def survive(root: Path, model: Path, ref: WeightRef, kills: int) -> int:
    """Kill engines at random moments of loading; return how many held the version already.

    Each machine folder is used by several engines, and some are removed in between. Every engine
    that has loaded, and one that is not killed, must give the whole folder's tokens and numbers.
    """
    expected = await _reply(root, model, ref, None)
    loaded = 0
    for number in range(kills + 1):
        machine = root / f"machine-{number % 5}"
        if random.Random(number).random() < 0.3:
            shutil.rmtree(machine, ignore_errors=True)
        there = replace(ref, path=machine / ref.path.name)
        delay_s = random.Random(-number).random() * 0.2 if number < kills else None
        found = await _reply(root, model, there, delay_s)
        assert found in (expected, None)
        assert found or number < kills
        loaded += bool(found)
        if there.path.exists():
            assert checksum(there.path) == ref.checksum
    return loaded - 1


async def _reply(
    root: Path, model: Path, ref: WeightRef, delay_s: float | None
) -> tuple[object, ...] | None:
    """Load a version into a new engine and sample; kill the engine after a delay, if given.

    Returns None if it died before it had loaded.
    """
    setup = EngineSetup(family=None, log_dir=root, model=model)  # type: ignore[arg-type]
    async with torch_cpu.open(torch_cpu.Options(), setup) as engine:
        killing = asyncio.create_task(_kill(delay_s)) if delay_s is not None else None
        try:
            await engine.load(ref)
            reply = await engine.generate(tuple(range(3, 40)), Sampling(8, seed=1), "session")
        except EngineLostError:
            return None
        finally:
            if killing:
                await killing
        return reply.ids, reply.logprobs, reply.weight_version


async def _kill(delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "swerl.engines._torch_server" in process.cmdline():
                process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0)
    kills = parser.parse_args().kills
    titles = ("20 steps", "whole, MB", "delta, MB", "over HTTP, MB", "times fewer", "with the 20th")
    print(f"| {' | '.join(titles)} | write, s | send and rebuild, s |")
    print("|---|---|---|---|---|---|---|---|")
    for source, lr in (*product((layer,), RATES), *product((adapters,), RATES[1:])):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            sizes = asyncio.run(measure(source(root, lr), root / "machine"))
            print(sizes.row(f"{source.__name__}, lr {lr:g}"), flush=True)
    for lr in RATES:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(twin(Path(folder), lr, kills if lr == RATES[0] else 0))
            print(found.row(f"twin, lr {lr:g}"), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
