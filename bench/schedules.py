"""What each schedule makes of long-tailed Episodes: `python bench/schedules.py`.

The schedules are the real ones. Episodes and optimizer steps only wait, in scaled time: nine in ten
Episodes take 0.3 to 0.6 s and one 3 to 5 s, a step takes 1 s, weights load in 0.05 s. As nothing
computes, the machine's own load hardly shows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from swerl.core.chat import Finish
from swerl.core.episode import Episode, Group, Status
from swerl.core.events import TurnEnded, ignore
from swerl.core.grade import Grade, Verdict
from swerl.core.sandbox import Limits
from swerl.core.task import GradingSpec, Task
from swerl.core.turn import Trajectory, Turn, WeightChange
from swerl.recipe.schema import BudgetsSection, RolloutSection, ScheduleSection
from swerl.rollout import group
from swerl.rollout.parts import Parts, Provisioner
from swerl.rollout.reward import reward_of
from swerl.rollout.schedules import ScheduleInputs, open_schedule
from swerl.rollout.versions import Staleness, Versions, staleness
from swerl.runs.layout import Cursor, RunFolder
from swerl.runs.prompts import Fate, LengthBias, entry
from swerl.training.step_metrics import prompt_entries

TRAIN_S = 1.0
LOAD_S = 0.05
PIECES = 20
"""Times that an Episode looks which weights serve."""


def main() -> None:
    """Print a line a schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=4)
    chosen = parser.parse_args()
    schedules = [
        ScheduleSection(mode="sync"),
        ScheduleSection(mode="one-step-off"),
        *(ScheduleSection(mode="async", max_staleness=bound) for bound in (1, 2, 3)),
        ScheduleSection(mode="async", max_staleness=1, too_stale="drop"),
    ]
    print(
        "| schedule | s a step | staleness: mean, most | Groups dropped | longest tenth trained |"
    )
    print("|---|---|---|---|---|")
    for schedule in schedules:
        asyncio.run(play(schedule, chosen.steps, chosen.groups, chosen.episodes))


async def play(schedule: ScheduleSection, steps: int, groups: int, episodes: int) -> None:
    """Run a schedule and print what it came to."""
    versions = Versions(["0"])
    group.episode.run = make_episodes(versions)  # type: ignore[assignment]  # a fake that waits
    tasks = [Task(f"t{i}", "r", "host", "/w", "p", GradingSpec("command")) for i in range(512)]
    length_bias, ages, num_dropped = LengthBias(), list[Staleness](), 0
    with tempfile.TemporaryDirectory() as folder:
        root = RunFolder(Path(folder))
        site = ScheduleInputs(tasks, parts_of(groups, episodes), root, schedule, steps, versions)
        began = time.monotonic()
        async with open_schedule(site, Cursor()) as schedule:
            for step in range(steps):
                taken = await schedule.take(step)
                ages.append(staleness(members(taken.kept), versions))
                num_dropped += len(taken.stale)
                length_bias.add(prompt_entries(step, taken, ())[len(taken.kept) :])
                length_bias.add(entry(step, one, Fate.TRAINED) for one in taken.kept)
                await asyncio.sleep(TRAIN_S)

                async def load(version: str = str(step + 1)) -> str:
                    await asyncio.sleep(LOAD_S)
                    return version

                await schedule.serve(load)
        seconds = (time.monotonic() - began) / steps
    tokens = sum(each.num_tokens for each in ages)
    mean = sum(each.mean * each.num_tokens for each in ages) / tokens
    most, last = max(each.largest for each in ages), length_bias.tenths()[-1]
    name = schedule.mode
    if name == "async":
        name += f", bound {schedule.max_staleness}, {schedule.too_stale}"
    share = last.trained / last.sampled
    print(
        f"| {name} | {seconds:.2f} | {mean:.2f}, {most} | {num_dropped} | {share:.0%} |", flush=True
    )


def members(groups: tuple[Group, ...]) -> list[Episode]:
    """Return the Episodes of Groups."""
    return [episode for one in groups for episode in one.episodes]


def make_episodes(versions: Versions) -> Any:
    """Return a fake of `episode.run`: it waits, and notes which weights serve meanwhile."""

    async def run(task: Task, name: str, parts: Parts) -> Episode:
        draws = random.Random(name)
        seconds = draws.uniform(3, 5) if draws.random() < 0.1 else draws.uniform(0.3, 0.6)
        length = round(seconds * 100)
        served = [versions.names[-1]]
        changes = []
        for piece in range(1, PIECES):
            await asyncio.sleep(seconds / PIECES)
            parts.emit(TurnEnded(name, piece, 0, length // PIECES, seconds / PIECES, "", ()))
            if versions.names[-1] != served[-1]:
                served.append(versions.names[-1])
                changes.append(WeightChange(piece * length // PIECES, served[-1]))
        await asyncio.sleep(seconds / PIECES)
        ids, logprobs = tuple(range(length)), (0.0,) * length
        turn = Turn(
            0, None, (1,), ids, logprobs, Finish.STOP, served[0], weight_changes=tuple(changes)
        )
        grade = Grade(Verdict.SOLVED)
        return Episode(name, task.id, Status.COMPLETED, grade, 1.0, Trajectory("s", (turn,)))

    return run


def parts_of(groups: int, episodes: int) -> Parts:
    """Return what Episodes share; nothing here opens a sandbox or asks an engine."""
    absent: Any = None
    return Parts(
        gateway=absent,
        provisioner=Provisioner(absent, Limits(), concurrency=4 * groups * episodes),
        harness=absent,
        reward=reward_of("solved"),
        rollout=RolloutSection(groups_per_step=groups, episodes_per_group=episodes),
        budgets=BudgetsSection(),
        seed=0,
        emit=ignore,
    )


if __name__ == "__main__":
    main()
