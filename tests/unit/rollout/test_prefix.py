"""Attempts of a Group that start from a prefix of another one, on real sandboxes and a gateway."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swerl.core.chat import Finish, Message
from swerl.core.episode import Episode, Group
from swerl.core.events import Event, Notice, TurnEnded
from swerl.core.sample import to_samples
from swerl.core.task import Task
from swerl.core.turn import Completion, Sampling
from swerl.gateway.conversation import TurnRecord
from swerl.recipe.schema import PrefixSection
from swerl.rollout import episode, group, record, step
from swerl.rollout.prefix import PrefixGroup, num_replayed
from swerl.rollout.step import StepGroups
from swerl.rollout.versions import Versions
from swerl.runs import _why_tokens as rules
from swerl.runs import evidence, prompts, tables
from swerl.runs.layout import RunFolder
from swerl.tasks import twin
from swerl.training import batch, step_metrics
from swerl.training.algorithms import grpo
from tests.unit.rollout.test_episode import FAMILY, Replies, gold, parts, say

SIZE = 6
"""Attempts of a Group: four from the start, two from a prefix."""


class ByAttempt(Replies):
    """An Engine that gives each attempt of a Group the replies of its number."""

    def __init__(self, *replies: Sequence[Message]) -> None:
        super().__init__()
        self._of = [[*each] for each in replies]

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        number = int(session.partition("+")[0].rpartition(".")[2])
        said = tuple(FAMILY.encode_reply(self._of[number].pop(0)))
        return Completion(said, (-0.25,) * len(said), Finish.STOP, "7")


async def run(
    task: Task,
    folder: RunFolder,
    *replies: Sequence[Message],
    stage: str = "00000",
    events: list[Event] | None = None,
) -> Group:
    async with parts(ByAttempt(*replies)) as its:
        section = its.rollout.model_copy(update={"prefix": PrefixSection(share=1 / 3)})
        emit = (lambda _: None) if events is None else events.append
        its = replace(its, rollout=section, emit=emit)
        return await group.run_one(task, stage, its, size=SIZE, folder=folder, may_fork=True)


def one_in_four(task: Task) -> list[Sequence[Message]]:
    """Replies of which one attempt in four solves the Task."""
    return [gold(task), *([say("submit")] for _ in range(3))]


def sampled(each: Episode) -> int:
    rows = to_samples(each.trajectory, episode=each.id, task=each.task_id)
    return sum(row.num_trained_tokens for row in rows)


async def test_attempts_continue_a_solved_one_and_are_compared_with_each_other(
    task: Task, folder: RunFolder
) -> None:
    rest, fails = gold(task)[1:], [say("submit")]
    done = await run(task, folder, *one_in_four(task), rest, fails)

    verdicts = [str(each.verdict) for each in done.episodes]
    assert verdicts == ["solved", *["unsolved"] * 3, "solved", "unsolved"]
    whole, forked = done.subgroups
    assert [len(whole.episodes), len(forked.episodes)] == [4, 2]
    first = done.episodes[0].trajectory.turns[0]
    for each in forked.episodes:
        assert each.fork and (each.fork.episode, each.fork.turn) == (done.episodes[0].id, 1)
        [prefix, *fresh] = each.trajectory.turns
        assert prefix.replayed and prefix.output_ids == first.output_ids
        assert sampled(each) == sum(len(turn.output_ids) for turn in fresh)
    # An advantage in the whole Group would be higher: two of six are solved.
    algorithm = grpo.build(grpo.Options(normalize_std=False))
    collected = batch.collect(0, [done], algorithm)
    advantages = {row.episode[-1]: row.advantage for row in collected.batch.samples}
    assert [advantages[k] for k in "045"] == [0.75, 0.5, -0.5]
    assert collected.num_sampled_tokens == sum(map(sampled, done.episodes))

    # A Group whose outcomes differ only between prefixes compares nothing.
    alike = replace(done, episodes=(done.episodes[1], done.episodes[4]))
    assert not alike.has_signal
    assert [step.group_filter("mixed-verdicts")(g) for g in (done, alike)] == [True, False]

    again = await run(task, folder)  # every Episode is read back
    assert [each.fork for each in again.episodes] == [each.fork for each in done.episodes]


async def test_metrics_and_diagnoses_tell_them_apart(task: Task, folder: RunFolder) -> None:
    events: list[Event] = []
    done = await run(
        task, folder, *one_in_four(task), gold(task)[1:], [say("submit")], events=events
    )
    groups = StepGroups((done,))
    collected = batch.collect(0, [done], grpo.build(grpo.Options()))
    versions = Versions(("7",))
    found = step_metrics.metrics(groups, collected, None, versions=versions)
    assert (found["solve_rate"], found["prefix_solve_rate"]) == (0.25, 0.5)
    replayed = sum(
        len(turn.output_ids) for e in done.episodes for turn in e.trajectory.turns if turn.replayed
    )
    assert (found["prefix_episodes"], found["replayed_tokens"]) == (2, replayed)
    assert found["prefix_sampled_tokens"] == sum(map(sampled, done.episodes[4:]))
    assert sum(event.replayed for event in events if isinstance(event, TurnEnded)) == 2
    [entry] = step_metrics.prompt_entries(0, groups, ())
    assert entry.forked == (False,) * 4 + (True,) * 2
    prompts.append(folder.prompts, [entry])
    assert prompts.read(folder.prompts) == [entry]

    (folder.root / "recipe.resolved.json").write_text("{}")
    for path in (folder.turns(0), folder.samples(0)):
        path.parent.mkdir(exist_ok=True)
    tables.write_turns(folder.turns(0), done.episodes)
    batch.write(folder.samples(0), collected.batch)
    run_of = evidence.read(folder.root)
    assert [len(each) for each in run_of.steps[0].groups.values()] == [4, 2]
    healthy = (rules.turned_advantages, rules.shifted_mask, rules.stale_engine)
    assert [rule(run_of) for rule in healthy] == [None] * 3


async def test_an_attempt_that_does_not_repeat_its_prefix_starts_anew(
    task: Task, folder: RunFolder
) -> None:
    [_, other] = twin.make_tasks(folder.root / "twin", split="train", count=2, seed=4)
    foreign = folder.episode("00000", "other.0")
    async with parts(Replies(*gold(other))) as its:
        record.write(foreign, await episode.run(other, "00000/other.0", its))
    # Other requests; then an agent that ends before it has made them all.
    cases = [
        ("00001", "00000/other.0", 1, "the replay ended: "),
        ("00002", f"00001/{task.id}.0", 99, "requests to replay, then ended"),
    ]
    for stage, source, turn, why in cases:
        choice = folder.episode(stage, f"{task.id}.prefix.json")
        choice.parent.mkdir(parents=True)
        fork = {"episode": source, "folder": f"episodes/{source}", "turn": turn}
        choice.write_text(json.dumps({"fork": fork}))
        events: list[Event] = []
        replies = [*one_in_four(task), gold(task), gold(task)]
        done = await run(task, folder, *replies, stage=stage, events=events)
        assert [str(each.verdict) for each in done.episodes[4:]] == ["solved"] * 2
        assert {each.fork for each in done.episodes} == {None}
        told = [event.text for event in events if isinstance(event, Notice)]
        assert sum("starts again without its prefix" in text and why in text for text in told) == 2


async def test_a_crash_keeps_the_prefix_and_trains_none_of_it(
    task: Task, folder: RunFolder
) -> None:
    rest = gold(task)[1:]
    done = await run(task, folder, *one_in_four(task), rest, [say("submit")])
    before, path = done.episodes[4], folder.episode("00000", f"{task.id}.4")
    turns: list[TurnRecord] = []
    async with parts(Replies(*rest)) as its:
        choice = PrefixGroup(folder, "00000", task.id, "", SIZE, 0)
        prefix = choice.choose((), PrefixSection())
        assert prefix is not None
        await episode.run(task, "x", replace(its, on_turn=turns.append), replay=prefix.replay())
    for num_left in (1, 2):  # in the replay, and after a sampled Turn
        (path / "episode.json").unlink()
        for turn in turns[:num_left]:
            record.append_turn(path, turn)
        resumed = await run(task, folder, [], [], [], [], rest[num_left - 1 :])
        each = resumed.episodes[4]
        assert (each.fork, each.verdict, each.lost_tokens) == (before.fork, "solved", 0)
        assert sampled(each) == sampled(before)
        assert [t.replayed for t in each.trajectory.turns] == [True, *[False] * len(rest)]


async def test_the_newest_attempt_with_the_other_outcome_gives_the_prefix(
    task: Task, folder: RunFolder
) -> None:
    first = await run(task, folder, *one_in_four(task), gold(task)[1:], [say("submit")])
    own = PrefixGroup(folder, "00001", task.id, "", SIZE, 0)
    failed = first.episodes[1:4]
    chosen = own.choose(failed, PrefixSection())
    assert chosen and chosen.fork.episode == first.episodes[0].id
    # It is written down, and repeated whatever else is known by then.
    assert own.choose(first.episodes[:1], PrefixSection()) == chosen
    # Attempts of one Turn have no prefix, and neither have those that are half solved.
    for number, firsts in enumerate((first.episodes[:1], first.episodes[:2]), 2):
        other = replace(own, stage=f"{number:05d}")
        assert other.choose(firsts, PrefixSection()) is None
    assert replace(own, stage="00004", agent="codex").choose(failed, PrefixSection()) is None
    # A damaged Episode is passed over.
    (folder.root / chosen.fork.folder / "trajectory.json").write_text("{")
    assert replace(own, stage="00005").choose(failed, PrefixSection()) is None


@pytest.mark.parametrize(
    ("rate", "num_turns", "expected"),
    [(0.0, 10, 5), (0.25, 10, 3), (1.0, 10, 5), (0.75, 10, 3), (0.25, 2, 1), (0.0, 2, 1)],
)
def test_the_rarer_the_outcome_the_longer_the_prefix(
    rate: float, num_turns: int, expected: int
) -> None:
    assert num_replayed(rate, 0.5, num_turns) == expected
