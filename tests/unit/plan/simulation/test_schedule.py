"""The simulator against sums done by hand, and the directions that every simulation must keep."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import pytest

from swerl.plan.simulation.episodes import EpisodeLoad, TurnLoad
from swerl.plan.simulation.machine import SimulatedMachine
from swerl.plan.simulation.schedule import MODES, ScheduleSimulation, SimulatedRun, tail
from swerl.recipe.schema import RolloutSection, ScheduleSection


@dataclass(frozen=True)
class Steady:
    """An engine that reads 100 tokens a second, and says 10 to each of any number of agents."""

    each: float = 0.0
    """Seconds that every further reply adds to a round."""

    def prompt_s(self, cached: int, tokens: int) -> float:
        return (tokens - cached) / 100

    def round_s(self, replies: int, tokens: int) -> float:
        return 0.1 + (replies - 1) * self.each


def train_s(rows: Sequence[int]) -> float:
    return sum(rows) / 50


MACHINE = SimulatedMachine(
    num_engines=1,
    speed=Steady(),
    cache_tokens=10_000,
    train_s=train_s,
    update_s=3.0,
    switch_s=2.0,
    step_s=1.0,
)
TWO_TURNS = EpisodeLoad((TurnLoad(100, 20, 4.0), TurnLoad(150, 10, 0.0)), 5.0, 7.0)
"""5 boot, 1 prompt, 2 reply, 4 tools, 0.3 for 30 new tokens, 1 reply, 7 tests: 20.3 seconds."""


class Given:
    def __init__(self, loads: Iterable[EpisodeLoad]) -> None:
        self.loads = list(loads)
        self.drawn = 0

    def draw(self, chance: random.Random) -> EpisodeLoad:
        self.drawn += 1
        return self.loads[(self.drawn - 1) % len(self.loads)]


def simulated(
    *loads: EpisodeLoad,
    mode: str = "sync",
    steps: int = 1,
    machine: SimulatedMachine = MACHINE,
    agent_s: float = 1e9,
    passing_share: float = 1.0,
    schedule: ScheduleSection | None = None,
    **rollout: object,
) -> SimulatedRun:
    settings = {"groups_per_step": 1, "episodes_per_group": len(loads), "concurrency": 64}
    section = RolloutSection.model_validate(settings | rollout)
    return ScheduleSimulation(
        machine=machine,
        rollout=section,
        source=Given(loads),
        agent_s=agent_s,
        passing_share=passing_share,
        section=schedule or ScheduleSection(),
    ).run(mode, steps)


def test_one_episode_takes_the_sum_of_its_parts() -> None:
    found = simulated(TWO_TURNS)
    training = (150 + 10) / 50
    assert found.seconds == pytest.approx(20.3 + 2 + training + 1 + 3, rel=1e-12)
    [step] = found.steps
    assert step.rollout_s == pytest.approx(20.3)
    assert step.parts["tools"] == pytest.approx(4)
    assert step.parts["prompts"] == pytest.approx(1.3)
    assert step.parts["replies"] == pytest.approx(3)
    assert (found.row_tokens, found.sandbox_s) == (160, pytest.approx(20.3))


def test_steps_of_equal_work_take_equal_time() -> None:
    one, five = simulated(TWO_TURNS), simulated(TWO_TURNS, steps=5)
    assert five.seconds == pytest.approx(5 * one.seconds)
    assert five.hours(100) == pytest.approx(one.hours(100))


def test_episodes_that_must_take_turns_take_as_many_times_as_long() -> None:
    found = simulated(*[TWO_TURNS] * 3, concurrency=1)
    assert found.steps[0].rollout_s == pytest.approx(3 * 20.3)
    assert found.steps[0].parts["a free slot"] == pytest.approx(2 * 20.3)


def test_prompts_are_read_one_after_the_other_and_stall_replies() -> None:
    load = EpisodeLoad((TurnLoad(100, 10, 0.0),), 0.0, 0.0)
    found = simulated(load, load)
    # The first prompt ends at 1 s, the second at 2 s, then both replies take their 1 s together.
    assert found.steps[0].rollout_s == pytest.approx(3.0)
    assert found.usage[0].prompt_s == pytest.approx(2.0)
    assert found.usage[0].reply_s == pytest.approx(1.0)
    assert found.replies_at_once == pytest.approx(2.0)


def test_replies_slow_each_other_down_at_the_engines_rate() -> None:
    load = EpisodeLoad((TurnLoad(1, 10, 0.0),), 0.0, 0.0)
    longer = EpisodeLoad((TurnLoad(1, 30, 0.0),), 0.0, 0.0)
    machine = replace(MACHINE, speed=Steady(each=0.1))
    found = simulated(load, longer, machine=machine)
    # 10 rounds of 0.2 s together, then 20 of 0.1 s alone; both prompts take 0.01 s.
    assert found.steps[0].rollout_s == pytest.approx(0.02 + 2.0 + 2.0)


def test_sandboxes_on_too_few_cores_slow_down_alike() -> None:
    load = EpisodeLoad((TurnLoad(100, 10, 0.0),), 5.0, 7.0)
    found = simulated(load, load, machine=replace(MACHINE, cores=1.0))
    # Both boot for 10 s, then 2 s of prompts and 1 s of replies on a GPU, then 14 s of tests.
    assert found.steps[0].rollout_s == pytest.approx(27.0)
    assert found.steps[0].parts["starting sandboxes"] == pytest.approx(10.0)
    half = simulated(load, load, machine=replace(MACHINE, cores=1.0, sandbox_cores=0.5))
    assert half.steps[0].rollout_s == pytest.approx(15.0)


def test_an_engine_on_the_sandboxes_core_leaves_no_time_and_gains_none() -> None:
    loads = [EpisodeLoad((TurnLoad(100, 10, 0.0),), boot_s, 0.0) for boot_s in (0.0, 2.0)]
    one = replace(MACHINE, cores=1.0, engine_cores=1.0)
    # The prompt and the reply of the first take 4 s beside the boot of the second.
    found = simulated(*loads, machine=one)
    assert found.steps[0].rollout_s == pytest.approx(6.0)
    assert found.steps[0].engine_s == pytest.approx(4.0 + 2.0)
    # A prompt that stops a reply gives its core back once.
    loads = [EpisodeLoad((TurnLoad(100, 20, 0.0),), boot_s, 0.0) for boot_s in (0.0, 1.0)]
    assert simulated(*loads, machine=one).steps[0].rollout_s == pytest.approx(5.0)


def test_a_trainer_beside_sandboxes_hides_no_time_on_one_core() -> None:
    load = EpisodeLoad((TurnLoad(100, 10, 0.0),), 5.0, 7.0)
    all_on = replace(MACHINE, cores=1.0, engine_cores=1.0, trainer_cores=1.0, step_s=0.0)
    work = 2 * (5 + 1 + 1 + 7 + 110 / 50)
    found = simulated(load, mode="one-step-off", steps=2, machine=all_on)
    assert found.seconds == pytest.approx(work + 2 * 3.0)
    apart = simulated(load, mode="one-step-off", steps=2, machine=replace(all_on, cores=inf))
    assert apart.seconds == pytest.approx(work - 110 / 50 + 2 * 3.0)


@pytest.mark.parametrize("mode", MODES)
def test_enough_cores_are_as_good_as_cores_of_ones_own(mode: str) -> None:
    loads = [
        EpisodeLoad((TurnLoad(100, 10 + n, 1.0), TurnLoad(150, 9, 2.0)), n, 3.0) for n in range(4)
    ]
    many = replace(MACHINE, cores=64.0, engine_cores=1.0, trainer_cores=2.0, step_s=0.0)
    found = simulated(*loads, mode=mode, steps=4, machine=many)
    assert found.seconds == pytest.approx(
        simulated(*loads, mode=mode, steps=4, machine=replace(many, cores=inf)).seconds
    )


def test_cache_that_is_too_small_makes_prompts_be_read_again() -> None:
    loads = [TWO_TURNS, replace(TWO_TURNS, boot_s=6.0)]
    roomy, narrow = (
        simulated(*loads, machine=replace(MACHINE, cache_tokens=size)) for size in (400, 200)
    )
    assert roomy.tokens_again == 0
    assert narrow.usage[0].again > 0
    assert narrow.seconds > roomy.seconds


def test_agent_is_stopped_by_its_budget_between_turns() -> None:
    found = simulated(TWO_TURNS, agent_s=5.0)
    # 5 boot, 5 of agent (1 prompt, 2 reply, 2 of 4 tools), 7 tests.
    assert found.steps[0].rollout_s == pytest.approx(17.0)
    assert found.timed_out == 1
    assert found.row_tokens == 120


def test_lost_attempt_costs_its_time_and_trains_nothing() -> None:
    found = simulated(replace(TWO_TURNS, lost=(1,)))
    # Once more 5 boot, 1 prompt, 2 reply and 4 tools.
    assert found.steps[0].rollout_s == pytest.approx(12 + 20.3)
    assert found.row_tokens == 160


@pytest.mark.parametrize("mode", MODES)
def test_parts_add_up_to_the_time(mode: str) -> None:
    loads = [replace(TWO_TURNS, grading_s=float(number)) for number in range(8)]
    found = simulated(*loads, mode=mode, steps=6, groups_per_step=2, concurrency=5)
    parts = sum(sum(step.parts.values()) for step in found.steps)
    assert parts == pytest.approx(found.seconds)
    assert sum(found.parts.values()) == pytest.approx(1)


def test_one_step_off_hides_the_shorter_of_rollout_and_training() -> None:
    apart = replace(MACHINE, switch_s=0.0)
    found = simulated(TWO_TURNS, mode="one-step-off", steps=4, machine=apart)
    training, update = 160 / 50 + 1, 3
    # The first rollout and the last training are alone; in between the rollout is the longer.
    assert found.seconds == pytest.approx(20.3 + 3 * (20.3 + update) + training + update)


def test_asynchronous_episodes_go_on_while_the_trainer_works() -> None:
    loads = [replace(TWO_TURNS, grading_s=float(grade)) for grade in (1, 60, 2, 3)]
    apart = replace(MACHINE, switch_s=0.0)
    runs = {
        mode: simulated(*loads, mode=mode, steps=20, machine=apart, episodes_per_group=1)
        for mode in MODES
    }
    assert runs["async"].seconds < runs["one-step-off"].seconds < runs["sync"].seconds
    assert max(step.staleness for step in runs["async"].steps) <= ScheduleSection().max_staleness


def test_staleness_of_zero_is_as_slow_as_waiting_for_every_group() -> None:
    loads = [replace(TWO_TURNS, grading_s=float(grade)) for grade in (1, 60, 2, 3)]
    apart = replace(MACHINE, switch_s=0.0)
    bound = ScheduleSection(mode="async", max_staleness=0)
    found = simulated(
        *loads, mode="async", steps=20, machine=apart, episodes_per_group=1, schedule=bound
    )
    sync = simulated(*loads, mode="sync", steps=20, machine=apart, episodes_per_group=1)
    assert found.seconds == pytest.approx(sync.seconds)
    assert {step.staleness for step in found.steps} == {0}


def test_groups_that_a_filter_leaves_out_are_replaced() -> None:
    found = simulated(
        TWO_TURNS,
        groups_per_step=4,
        group_filter="zero-variance",
        passing_share=0.5,
        oversample=1.5,
    )
    assert found.steps[0].episodes > 6
    assert found.steps[0].parts["training"] == pytest.approx(4 * 160 / 50)


@pytest.mark.parametrize("mode", MODES)
def test_a_simulation_repeats_exactly(mode: str) -> None:
    loads = [TWO_TURNS, replace(TWO_TURNS, grading_s=30.0)]
    first, second = (simulated(*loads, mode=mode, steps=5) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("worse", "machine"),
    [
        ({"concurrency": 2}, {}),
        ({}, {"num_engines": 1}),
        ({}, {"cache_tokens": 170}),
        ({}, {"update_s": 9.0}),
    ],
)
def test_less_of_anything_is_never_faster(
    worse: dict[str, object], machine: dict[str, object]
) -> None:
    loads = [replace(TWO_TURNS, boot_s=float(number)) for number in range(6)]
    best = replace(MACHINE, num_engines=3)
    fast = simulated(*loads, steps=3, machine=best)
    slow = simulated(*loads, steps=3, machine=replace(best, **machine), **worse)  # type: ignore[arg-type]
    assert slow.seconds > fast.seconds


def test_tail_begins_when_nine_in_ten_have_ended() -> None:
    assert tail([float(number) for number in range(1, 11)]) == 1
    assert tail([1.0] * 9 + [11.0]) == 10
    assert tail([3.0]) == 0


def test_busiest_window_of_the_gateway_is_found() -> None:
    found = replace(simulated(TWO_TURNS), turn_times=(1.0, 2.0, 50.0, 51.0, 52.0), seconds=100.0)
    assert found.turns_per_s() == (pytest.approx(0.05), pytest.approx(0.3))
