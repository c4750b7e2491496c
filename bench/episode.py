"""Measure whole Episodes of the twin on `local` sandboxes, with the known solution as the agent.

    python bench/episode.py --tasks 4 --attempts 8        attempts at several tasks, one by one
    python bench/episode.py --commits 12000               a task whose image hides 12,000 commits

Prints the wall time of an Episode and of its phases (medians), and CPU seconds and page faults for
each: of the controller, and of all its sandboxes together. Other work on the machine changes wall
times far more than CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from twin import floor_ms, usage

from swerl.cli._options import SETTINGS
from swerl.cli.rollout import replies
from swerl.core.contracts import EngineSetup
from swerl.core.events import ignore
from swerl.core.task import Task
from swerl.recipe.load import load
from swerl.rollout import episode, wiring
from swerl.tasks import twin

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


async def measure(tasks: list[Task], attempts: int, audit: float) -> None:
    recipe = load([], [*SETTINGS, "name=bench", "engine.type=scripted", f"grading.audit={audit}"])
    harness = wiring.harness_of(recipe)
    said = {task.id: replies("gold", harness, task) for task in tasks}
    with tempfile.TemporaryDirectory() as logs:
        family = wiring.family_of(recipe, None)
        setup = EngineSetup(family, Path(logs), script=lambda name: said[name.split("/")[0]])
        async with (
            wiring.engine_of(recipe, setup) as engine,
            wiring.gateway_of(recipe, engine, setup) as gateway,
        ):
            parts: Any = wiring.parts_of(recipe, gateway, ignore)
            for task in tasks[:1]:  # imports and the spawner
                await episode.run(task, f"{task.id}/warm", replace(parts, seed=1))
            walls, boots = [], []
            before, own = usage(os.getpid()), time.process_time()
            for task in tasks:
                for number in range(attempts):
                    started = time.perf_counter()
                    done = await episode.run(task, f"{task.id}/{number}", parts)
                    assert done.reward == 1, (done.grade, done.log)
                    walls.append(time.perf_counter() - started)
                    boots.append(done.timings["boot"])
            own = time.process_time() - own
            await asyncio.sleep(0.3)
            after, num = usage(os.getpid()), len(walls)
    for name, values in (("wall", walls), ("agent's boot", boots)):
        shown = f"median {median(values) * 1e3:.0f} ms, fastest {min(values) * 1e3:.0f} ms"
        print(f"{name:24}{shown}")
    print(f"{'CPU of the controller':24}{own / num * 1e3:.0f} ms an Episode of {num}")
    after.subtract(before)
    cpu_s, faults = after["sandboxes", "CPU s"], after["sandboxes", "faults"]
    print(f"{'CPU of the sandboxes':24}{cpu_s / num * 1e3:.0f} ms an Episode")
    print(f"{'its floor':24}{floor_ms():.0f} ms, two starts of Python")
    print(f"{'faults of the sandboxes':24}{faults / num:,.0f} an Episode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--commits", type=int, default=0)
    parser.add_argument("--audit", type=float, default=0.0, help="share of confirmed patches")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SWERL_CACHE"] = f"{folder}/cache"
        tasks = twin.make_tasks(Path(folder, "tasks"), split="train", count=chosen.tasks, seed=0)
        if chosen.commits:
            tasks = [with_future(task, chosen.commits) for task in tasks]
        asyncio.run(measure(tasks, chosen.attempts, chosen.audit))


if __name__ == "__main__":
    main()
