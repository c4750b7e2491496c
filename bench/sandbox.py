"""Cost of a sandbox: boot, command, whole lives a second, files.

`python bench/sandbox.py [--json FILE] [--rounds 60]`: every kind on the same machine
in one run: `local`, and `docker` on a dockerd of its own, where one can be started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.sandbox import Limits
from swerl.sandboxes import docker, local

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.services import dockerd, image
from tests.services.daemon import CannotRunError

LIMITS = Limits(memory_mib=1024, disk_mib=512)
WORKDIR = "/testbed"
FILE_MIB = 100
NUM_FILES = 40
"""Files of the small repository, about as many as a generated task has."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of sandbox on one image."""

    name: str
    backend: SandboxBackend
    image: str


@dataclass(frozen=True, slots=True)
class Cost:
    """One line of the table. Times are medians in milliseconds."""

    sandbox: str
    boot_ms: float
    """From the order to the end of the first command."""
    exec_ms: float = 0.0
    life_ms: float = 0.0
    """Create, command, write, diff, close."""
    controller_ms: float = 0.0
    """CPU time of the controller's process for one such life."""
    lives_1: float = 0.0
    """Such lives a second, one after the other."""
    lives_16: float = 0.0
    """The same with 16 at once."""
    write_mib_s: float = 0.0
    read_mib_s: float = 0.0


@asynccontextmanager
async def kinds() -> AsyncIterator[list[Kind]]:
    """Yield every kind that this machine can have; what it cannot is told."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        found = [*local_kinds(Path(folder, "repository"))]
        try:
            found.append(docker_kind(stack, Path(folder, "image")))
        except CannotRunError as error:
            sys.stdout.write(f"no docker: {error}\n")
        yield found


def local_kinds(repository: Path) -> Sequence[Kind]:
    """Return `local` on an empty and on a small workdir."""
    repository.mkdir()
    for number in range(NUM_FILES):
        (repository / f"{number}.py").write_text("x = 1\n" * 50)
    return [
        Kind(f"local, {label}", local.build(local.Options()), name)
        for label, name in (("host", "host"), ("dir", f"dir:{repository}"))
    ]


def docker_kind(stack: AsyncExitStack, folder: Path) -> Kind:
    """Start a dockerd and return its kind. Raises CannotRunError."""
    folder.mkdir()
    base = image.build(folder)
    daemon = dockerd.start()
    stack.callback(daemon.stop)
    load(base.archive, daemon.address)
    return Kind("docker", docker.build(docker.Options(base_url=daemon.address)), base.name)


def load(archive: Path, address: str) -> None:
    """Load an image into a dockerd."""
    from docker import DockerClient

    client = DockerClient(base_url=address)
    client.images.load(archive.read_bytes())
    client.close()


async def cost_of(kind: Kind, rounds: int) -> Cost:
    """Measure one kind."""

    async def boot() -> None:
        async with kind.backend.open(kind.image, LIMITS, workdir=WORKDIR) as sandbox:
            await sandbox.run(["true"])

    async def life() -> None:
        async with kind.backend.open(kind.image, LIMITS, workdir=WORKDIR) as sandbox:
            await sandbox.run(["git", "init", "-q", "."])
            await sandbox.write(f"{WORKDIR}/f", b"x" * 1000)
            done = await sandbox.run(["sh", "-c", "git add -N . && git diff"])
            assert done.exit_code == 0, done

    await life()
    spent = time.process_time()
    life_ms = await median(rounds, life)
    controller_ms = (time.process_time() - spent) * 1e3 / rounds
    async with kind.backend.open(kind.image, LIMITS, workdir=WORKDIR) as sandbox:
        exec_ms = await median(rounds, lambda: sandbox.run(["true"]))
        write_mib_s, read_mib_s = await files(sandbox)
    return Cost(
        sandbox=kind.name,
        boot_ms=await median(rounds, boot),
        exec_ms=exec_ms,
        life_ms=life_ms,
        controller_ms=controller_ms,
        lives_1=await rate(rounds, 1, life),
        lives_16=await rate(rounds, 16, life),
        write_mib_s=write_mib_s,
        read_mib_s=read_mib_s,
    )


async def median(rounds: int, step: Callable[[], Awaitable[object]]) -> float:
    """Return the median of a step's milliseconds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        await step()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


async def rate(rounds: int, num_workers: int, life: Callable[[], Awaitable[None]]) -> float:
    """Return lives a second with so many at once."""
    free = asyncio.Semaphore(num_workers)

    async def limited() -> None:
        async with free:
            await life()

    num_lives = max(rounds, num_workers * 2)
    started = time.perf_counter()
    await asyncio.gather(*(limited() for _ in range(num_lives)))
    return num_lives / (time.perf_counter() - started)


async def files(sandbox: Sandbox) -> tuple[float, float]:
    """Return MiB a second for writing and for reading one big file."""
    data = bytes(FILE_MIB << 20)
    started = time.perf_counter()
    await sandbox.write("/tmp/big", data)
    written = time.perf_counter()
    assert len(await sandbox.read("/tmp/big")) == len(data)
    return FILE_MIB / (written - started), FILE_MIB / (time.perf_counter() - written)


def show(costs: list[Cost]) -> None:
    """Print the table and how it compares with docker."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title="medians in ms; lives a second; MiB/s", box=SIMPLE)
    table.add_column("sandbox", no_wrap=True)
    for column in ("boot", "exec", "life", "own CPU", "lives x1", "x16", "write", "read"):
        table.add_column(column, justify="right")
    for cost in costs:
        label, *figures = asdict(cost).values()
        table.add_row(label, *map(written, figures))
    console = Console(width=max(100, Console().width))
    console.print(table)
    if ratios := against_docker(costs):
        said = ", ".join(f"{name} {ratio:.1f}" for name, ratio in ratios.items())
        console.print(f"docker : local, boot to first command: {said}")


def written(figure: float) -> str:
    """Return a figure with three digits or so; nothing where it was not measured."""
    return "" if not figure else f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}"


def against_docker(costs: list[Cost]) -> dict[str, float]:
    """Return how many times faster than docker each local sandbox boots."""
    theirs = [cost.boot_ms for cost in costs if cost.sandbox == "docker"]
    ours = [cost for cost in costs if cost.sandbox.startswith("local")]
    return {cost.sandbox: theirs[0] / cost.boot_ms for cost in ours if theirs}


async def measure(rounds: int) -> list[Cost]:
    """Measure every kind, each in a turn of its own."""
    costs = []
    async with kinds() as found:
        for kind in found:
            few = rounds if kind.name != "docker" else max(5, rounds // 5)
            costs.append(await cost_of(kind, few))
    return costs


def main() -> None:
    """Read the command line, measure, show, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    costs = asyncio.run(measure(options.rounds))
    show(costs)
    if options.json:
        rows = {
            "sandboxes": [asdict(cost) for cost in costs],
            "docker_to_local_boot": against_docker(costs),
        }
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
        sys.stdout.write(f"written to {options.json}\n")


if __name__ == "__main__":
    main()
