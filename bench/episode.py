"""Measure whole Episodes of the twin on `local` sandboxes, with the known solution as the agent.

    python bench/episode.py --tasks 4 --attempts 8        attempts at several tasks, one by one
    python bench/episode.py --commits 12000               a task whose image hides 12,000 commits
    python bench/episode.py --servers 2                   on the sandbox servers of a cluster run
    python bench/episode.py --serve                       through a `swerl sandbox serve`
    python bench/episode.py --snapshots                   snapshots of 0 to 100 MiB, and forks

Prints the wall time of an Episode and of its phases (medians), and CPU seconds and page faults for
each: of the controller, and of all its sandboxes together. Other work on the machine changes wall
times far more than CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from swerl.cli._options import SETTINGS
from swerl.cli.rollout import replies
from swerl.cluster.node import LocalNode
from swerl.cluster.sandbox_servers import serve_sandboxes
from swerl.core.contracts import EngineSetup
from swerl.core.events import ignore
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.recipe.load import load
from swerl.rollout import episode, wiring
from swerl.sandboxes import e2b, local
from swerl.tasks import twin

HZ = os.sysconf("SC_CLK_TCK")
COMMIT = """commit refs/heads/later
committer a <a@b> {number} +0000
data 2
x
{parent}M 100644 inline file{number}
data 2
{number:02}

"""


def with_future(task: Task, num_commits: int) -> Task:
    """Return the Task with so many later commits in its repository."""
    folder = Path(task.image.removeprefix("dir:"))
    script = "".join(
        COMMIT.format(number=n % 100, parent="" if n else "from refs/heads/main^0\n")
        for n in range(num_commits)
    )
    git = ["git", "-C", str(folder), "fast-import", "--quiet"]
    subprocess.run(git, input=script.encode(), check=True)
    return task


def usage() -> tuple[float, int]:
    """Return CPU seconds and page faults of all sandboxes that have ended."""
    seconds, faults = 0.0, 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            seconds += sum(map(int, fields[11:15])) / HZ
            faults += int(fields[7]) + int(fields[8])
    return seconds, faults


@contextmanager
def serve(tasks: list[Task]) -> Iterator[e2b.E2BBackend]:
    """Yield the backend of a client of `swerl sandbox serve`, which has the tasks' images."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        key.write_text("k" * 20)
        argv = [str(Path(sys.executable).with_name("swerl")), "sandbox", "serve"]
        argv += ["--listen=127.0.0.1:0", f"--api-key-file={key}", f"--workdir={tasks[0].workdir}"]
        argv += [f"--template={task.image}={task.image}" for task in tasks]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
            assert server.stdout
            url = server.stdout.readline().decode().strip().partition("=")[2]
            options = e2b.Options(
                api_url=url, sandbox_url=url, image_key="image", creates_per_s=1000
            )
            yield e2b.connect(options, "k" * 20)
            server.terminate()


async def measure(
    tasks: list[Task], attempts: int, num_servers: int, *, is_served: bool = False
) -> None:
    recipe = load([], [*SETTINGS, "name=bench", "engine.type=scripted"])
    harness = wiring.harness_of(recipe)
    said = {task.id: replies("gold", harness, task) for task in tasks}
    with tempfile.TemporaryDirectory() as logs:
        family = wiring.family_of(recipe, None)
        setup = EngineSetup(family, Path(logs), script=lambda name: said[name.split("/")[0]])
        async with (
            wiring.engine_of(recipe, setup) as engine,
            wiring.gateway_of(recipe, engine, setup) as gateway,
            AsyncExitStack() as servers,
        ):
            backend = None
            if num_servers:
                nodes = [LocalNode(name=f"n{number}") for number in range(num_servers)]
                serving = serve_sandboxes(nodes, recipe, logs=Path(logs), emit=ignore)
                backend = await servers.enter_async_context(serving)
            if is_served:
                backend = servers.enter_context(serve(tasks))
            parts: Any = wiring.parts_of(recipe, gateway, ignore, backend)
            for task in tasks[:1]:  # imports and the spawner
                await episode.run(task, f"{task.id}/warm", replace(parts, seed=1))
            walls, boots = [], []
            (cpu, faults), own = usage(), time.process_time()
            for task in tasks:
                for number in range(attempts):
                    started = time.perf_counter()
                    done = await episode.run(task, f"{task.id}/{number}", parts)
                    assert done.reward == 1, (done.grade, done.log)
                    walls.append(time.perf_counter() - started)
                    boots.append(done.timings["boot"])
            own = time.process_time() - own
            await asyncio.sleep(0.3)
            (cpu_after, faults_after), num = usage(), len(walls)
    for name, values in (("wall", walls), ("agent's boot", boots)):
        shown = f"median {median(values) * 1e3:.0f} ms, fastest {min(values) * 1e3:.0f} ms"
        print(f"{name:24}{shown}")
    print(f"{'CPU of the controller':24}{own / num * 1e3:.0f} ms an Episode of {num}")
    if num_servers or is_served:
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, cpu_after = 0, spent.ru_utime + spent.ru_stime  # with the start and the warm Episode
        faults, faults_after = 0, spent.ru_minflt + spent.ru_majflt
    print(f"{'CPU of the sandboxes':24}{(cpu_after - cpu) / num * 1e3:.0f} ms an Episode")
    print(f"{'faults of the sandboxes':24}{(faults_after - faults) / num:,.0f} an Episode")


async def measure_snapshots(folder: Path) -> None:
    backend, limits = local.build(local.Options()), Limits(memory_mib=1024)
    folder.mkdir()
    for size_mib in (0, 1, 10, 100):
        walls, cpus = [], []
        for number in range(5):
            async with backend.open(f"dir:{folder}", limits, workdir="/w") as sandbox:
                await sandbox.run(["sh", "-c", f"head -c {size_mib}M /dev/urandom >big"])
                started, cpu = time.perf_counter(), sum(os.times()[:4])
                image = await sandbox.snapshot(f"{size_mib}.{number}")
                walls.append(time.perf_counter() - started)
                cpus.append(sum(os.times()[:4]) - cpu)
        shown = f"median {median(walls) * 1e3:.0f} ms, fastest {min(walls) * 1e3:.0f} ms"
        print(f"snapshot of {size_mib:3} MiB   {shown}; CPU {median(cpus) * 1e3:.0f} ms")
    walls = []
    async with AsyncExitStack() as stack:
        before, forks = page_cache_mib(), []
        for _ in range(100):
            started = time.perf_counter()
            forks.append(await stack.enter_async_context(backend.open(image, limits, workdir="/w")))
            walls.append(time.perf_counter() - started)
        shown = f"median {median(walls) * 1e3:.0f} ms, fastest {min(walls) * 1e3:.0f} ms"
        print(f"fork                  {shown}")
        for sandbox in forks:
            await sandbox.run(["sh", "-c", "cat big | wc -c"])
        grown = page_cache_mib() - before
        print(f"page cache after 100 forks have read 100 MiB each: {grown:.0f} MiB more")


def page_cache_mib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Cached:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--commits", type=int, default=0)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--snapshots", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SWERL_CACHE"] = f"{folder}/cache"
        if chosen.snapshots:
            asyncio.run(measure_snapshots(Path(folder, "image")))
            return
        tasks = twin.make_tasks(Path(folder, "tasks"), split="train", count=chosen.tasks, seed=0)
        if chosen.commits:
            tasks = [with_future(task, chosen.commits) for task in tasks]
        asyncio.run(measure(tasks, chosen.attempts, chosen.servers, is_served=chosen.serve))


if __name__ == "__main__":
    main()
