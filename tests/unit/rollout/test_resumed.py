"""An Episode that a crash interrupted goes on after its last Turn, and loses no sampled token."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.episode import Episode
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.events import Event, Notice
from swerl.core.sample import to_samples
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.gateway.conversation import TurnRecord
from swerl.rollout import episode, group, record
from swerl.rollout.versions import Versions
from swerl.runs.layout import Cursor, RunFolder
from swerl.sandboxes import local
from tests.unit.rollout.test_episode import Replies, gold, parts


def path_of(task: Task, folder: RunFolder) -> Path:
    return folder.episode(*f"{group.id_prefix(task, '00000')}0".split("/"))


async def interrupt(task: Task, folder: RunFolder, num_turns: int) -> list[TurnRecord]:
    """Leave the files of a run that was killed after some Turns of an Episode; return all Turns."""
    turns: list[TurnRecord] = []
    async with parts(Replies(*gold(task))) as its:
        await episode.run(task, "00000/first", replace(its, on_turn=turns.append))
    path = path_of(task, folder)
    path.mkdir(parents=True)
    for turn in turns[:num_turns]:
        record.append_turn(path, turn)
    return turns


async def resume(
    task: Task,
    folder: RunFolder,
    replies: Replies,
    *,
    emit: Callable[[Event], None] = lambda _: None,
    backend: Any = None,
) -> Episode:
    async with parts(replies, backend=backend) as its:
        its = replace(its, emit=emit)
        done = await group.run_one(task, "00000", its, size=1, folder=folder)
    return done.episodes[0]


def tokens(turns: Sequence[TurnRecord]) -> list[tuple[int, ...]]:
    return [turn.turn.output_ids for turn in turns]


async def test_it_goes_on_after_its_last_turn(task: Task, folder: RunFolder) -> None:
    before = await interrupt(task, folder, 2)
    events: list[Event] = []
    done = await resume(task, folder, Replies(*gold(task)[2:]), emit=events.append)

    assert (done.verdict, done.lost_tokens) == ("solved", 0)
    turns = done.trajectory.turns
    assert [turn.output_ids for turn in turns] == tokens(before)
    assert turns[0].prompt_ids == before[0].turn.prompt_ids
    rows = to_samples(done.trajectory, episode="e", task="t")
    assert sum(row.num_trained_tokens for row in rows) == sum(map(len, tokens(before)))
    told = [event.text for event in events if isinstance(event, Notice)]
    assert any("goes on after turn 2" in text for text in told)
    assert not (path_of(task, folder) / record.TURNS).exists()


async def test_an_agent_that_sends_something_else_is_attempted_again(
    task: Task, folder: RunFolder
) -> None:
    before = await interrupt(task, folder, 2)
    changed = replace(before[1], new_messages=(replace(before[1].new_messages[0], text="other"),))
    path = path_of(task, folder)
    (path / record.TURNS).unlink()
    for turn in (before[0], changed):
        record.append_turn(path, turn)
    done = await resume(task, folder, Replies(*gold(task)))
    assert (done.verdict, done.id[-2:]) == ("solved", "+1")
    assert done.lost_tokens == len(before[0].turn.output_ids)


async def test_a_second_crash_during_the_replay_loses_nothing(
    task: Task, folder: RunFolder
) -> None:
    before = await interrupt(task, folder, 2)
    path = path_of(task, folder)
    log = record.TurnLog(path)
    log(before[0])
    assert [each.turn.index for each in record.TurnLog(path).recorded] == [0, 1]
    log = record.TurnLog(path)
    for turn in before[:3]:
        log(turn)
    assert [each.turn.index for each in record.read_turns(path)] == [0, 1, 2]


async def test_turns_of_lost_weights_are_not_continued(task: Task, folder: RunFolder) -> None:
    await interrupt(task, folder, 2)
    path = path_of(task, folder)
    version = record.read_turns(path)[0].turn.weight_version
    record.move_orphans_aside(folder, Versions((version,)), Cursor(), 1, lambda _: None)
    assert (path / record.TURNS).exists()
    record.move_orphans_aside(folder, Versions(("other",)), Cursor(), 1, lambda _: None)
    assert not (path / record.TURNS).exists()


class LosingBackend:
    """Loses a sandbox once the engine has given so many replies, as a machine that is gone does.

    The plan has an entry for each sandbox: that number, a failure to open, or None.
    """

    def __init__(self, replies: Replies, *plan: int | SandboxError | None) -> None:
        self._inner = local.build(local.Options())
        self._replies, self._num_replies = replies, len(replies._replies)
        self._plan = [*plan]

    @asynccontextmanager
    async def open(self, image: str, limits: Limits, **options: Any) -> AsyncIterator[Any]:
        todo = self._plan.pop(0) if self._plan else None
        if isinstance(todo, SandboxError):
            raise todo
        async with self._inner.open(image, limits, **options) as sandbox:
            run = sandbox.run

            async def losing(argv: Sequence[str], **more: Any) -> Any:
                if todo is not None and self._num_replies - len(self._replies._replies) >= todo:
                    raise SandboxLostError("the machine is gone", hint="open a new sandbox")
                return await run(argv, **more)

            sandbox.run = losing  # type: ignore[method-assign,assignment]
            yield sandbox


FULL = SandboxError("no sandbox within 180 s", hint="wait")


@pytest.mark.parametrize(
    ("plan", "attempts"),
    [((2, 3), 3), ((2, FULL), 3), ((None, 0), 2)],
    ids=["agent twice", "no other machine", "grading"],
)
async def test_it_goes_on_after_its_last_turn_on_another_machine(
    task: Task, folder: RunFolder, plan: Sequence[Any], attempts: int
) -> None:
    replies, events = Replies(*gold(task)), list[Event]()
    backend = LosingBackend(replies, *plan)
    done = await resume(task, folder, replies, emit=events.append, backend=backend)
    # The engine has each reply once, so every one was sampled once.
    assert (done.verdict, done.lost_tokens) == ("solved", 0)
    assert len(done.trajectory.turns) == len(gold(task))
    assert done.id.endswith(f"+{attempts - 1}")
    assert any("goes on after turn" in each.text for each in events if isinstance(each, Notice))


CONTROLLER = """
import asyncio, sys, typer
from pathlib import Path
from swerl.cli._run import run
from swerl.rollout import group
from swerl.runs.layout import RunFolder
from swerl.tasks import twin
from tests.unit.rollout.test_episode import BUDGETS, Replies, gold, parts

class Waiting(Replies):
    async def generate(self, *given):
        if not self._replies:
            print("waits", flush=True)
            await asyncio.sleep(600)
        return await super().generate(*given)

async def main():
    [task] = twin.make_tasks(Path(sys.argv[1]) / "twin", split="train", count=1, seed=3)
    budgets = BUDGETS.model_copy(update={"model_call_s": 600, "agent_s": 600, "episode_s": 600})
    async with parts(Waiting(*gold(task)[:2]), budgets) as its:
        await group.run_one(task, "00000", its, size=1, folder=RunFolder(Path(sys.argv[1])))

try:
    run(main(), after="the same command resumes")
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


async def test_it_goes_on_after_the_notice_that_its_machine_will_end(
    task: Task, folder: RunFolder
) -> None:
    controller = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CONTROLLER, str(folder.root)), stdout=asyncio.subprocess.PIPE
    )
    assert controller.stdout and await controller.stdout.readline() == b"waits\n"
    controller.send_signal(signal.SIGTERM)
    assert await controller.wait() == 128 + signal.SIGTERM
    assert len(record.read_turns(path_of(task, folder))) == 2
    done = await resume(task, folder, Replies(*gold(task)[2:]))
    assert (done.verdict, done.lost_tokens) == ("solved", 0)
    assert len(done.trajectory.turns) == len(gold(task))
