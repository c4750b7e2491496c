"""Advantages: one vote per Episode, lost Episodes in no statistic, nothing to compare gives 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swerl.core.episode import Group
from swerl.core.turn import Trajectory
from swerl.training.batch import collect
from tests.unit import made
from tests.unit.training.algorithms.conftest import NAMES, make

BY_DEVIATION = ("gspo", "grpo", "dapo", "cispo")
FLOOR = 1e-6


def _with_roots(group: Group, name: str, *num_roots: int) -> Group:
    """Give each Episode a Session of so many roots: each becomes a Sample of its own."""
    episodes = []
    for k, (episode, count) in enumerate(zip(group.episodes, num_roots, strict=True)):
        roots = tuple(made.turn(index, output=(3,) * (index + 1)) for index in range(count))
        episodes.append(replace(episode, id=f"{name}.{k}", trajectory=Trajectory("s", roots)))
    return Group(name, tuple(episodes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fan_out", [1, 2, 6])
def test_samples_of_an_episode_share_its_advantage_and_its_one_vote(
    group, name: str, fan_out: int
) -> None:
    mixed = group(("solved", 1.0), ("unsolved", 0.0), ("unsolved", 0.0))
    algorithm = make(name)
    [plain] = algorithm.advantages([mixed])
    batch = collect(0, [_with_roots(mixed, "A", fan_out, 1, 1)], algorithm).batch
    assert [s.advantage for s in batch.samples] == [plain[0]] * fan_out + [plain[1], plain[2]]
    assert batch.num_episodes == 3
    votes = [sum(s.share for s in batch.samples if s.episode == f"A.{k}") for k in range(3)]
    assert votes == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", BY_DEVIATION)
def test_advantages_are_the_rewards_normalised_in_their_group(group, name: str) -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    one = group(*(("solved", reward) for reward in rewards))
    [found] = make(name).advantages([one])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + FLOOR)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    [found] = make(name, normalize_std=False).advantages([one])
    np.testing.assert_allclose(found, rewards - rewards.mean(), atol=1e-12)


def test_reinforce_pp_divides_by_the_deviation_of_the_step(group) -> None:
    first = group(("solved", 1.0), ("unsolved", 0.0))
    second = group(("solved", 1.0), ("solved", 0.5), ("infra", 9.0))
    centred = np.array([0.5, -0.5, 0.25, -0.25])
    found = make("reinforce-pp").advantages([first, second])
    expected = centred / (centred.std(ddof=1) + FLOOR)
    np.testing.assert_allclose([*found[0], *found[1]], [*expected, 0.0], atol=1e-12)
    rewards = np.array([1.0, 0.0, 1.0, 0.5])
    found = make("reinforce-pp", baseline="step").advantages([first, second])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + FLOOR)
    np.testing.assert_allclose([*found[0], *found[1]], [*expected, 0.0], atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_lost_episodes_enter_neither_mean_nor_deviation(group, name: str) -> None:
    algorithm = make(name)
    clean = group(("solved", 1.0), ("unsolved", 0.0), ("timeout", 0.0))
    mixed = group(
        ("solved", 1.0), ("infra", 9.0), ("unsolved", 0.0), ("invalid", -9.0), ("timeout", 0.0)
    )
    [wanted] = algorithm.advantages([clean])
    [found] = algorithm.advantages([mixed])
    assert list(found) == [wanted[0], 0.0, wanted[1], 0.0, wanted[2]]


def test_lost_episodes_enter_no_batch(group) -> None:
    mixed = group(("solved", 1.0), ("infra", 9.0), ("unsolved", 0.0), ("invalid", 9.0))
    collected = collect(0, [_with_roots(mixed, "A", 1, 3, 1, 1)], make("grpo"))
    assert {sample.episode for sample in collected.batch.samples} == {"A.0", "A.2"}
    assert collected.batch.num_episodes == 2
    assert collected.num_sampled_tokens == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "outcomes",
    [
        [("solved", 0.1), ("solved", 0.1), ("solved", 0.1)],
        [("unsolved", 0.0), ("unsolved", 0.0)],
        [("solved", 1.0), ("infra", 0.0), ("infra", 0.0)],
        [("infra", 1.0), ("invalid", 0.0)],
        [("solved", 1.0)],
        [],
    ],
    ids=["all solved", "none solved", "one survivor", "no survivor", "alone", "empty"],
)
def test_a_group_that_cannot_compare_gives_zeros(group, name: str, outcomes) -> None:
    assert make(name).advantages([group(*outcomes)]) == [[0.0] * len(outcomes)]
    assert not group(*outcomes).has_signal
