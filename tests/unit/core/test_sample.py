"""Linearising a Trajectory trains each sampled token once, after the prefix it was sampled from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swerl.core.sample import to_samples, trained_turns
from swerl.core.turn import Trajectory, Turn
from tests.unit import made


def turn(index: int, parent: int | None, *, version: str = "v1") -> Turn:
    """A Turn whose tokens tell where they come from: 100 per index, odd ones sampled."""
    base = 100 * (index + 1)
    output = (base + 1, base + 3, base + 5)
    logprobs = (-0.1 * base, -0.3, -0.5)
    return made.turn(index, parent, (base, base + 2), output, version, logprobs=logprobs)


def test_a_chain_is_one_row_with_the_sampled_tokens_marked() -> None:
    chain = Trajectory("s", (turn(0, None), turn(1, 0)))

    (sample,) = to_samples(chain, episode="e", task="t")

    assert tuple(sample.ids) == (100, 102, 101, 103, 105, 200, 202, 201, 203, 205)
    assert tuple(sample.mask) == (0, 0, 1, 1, 1, 0, 0, 1, 1, 1)
    assert tuple(sample.logprobs) == (0, 0, -10.0, -0.3, -0.5, 0, 0, -20.0, -0.3, -0.5)
    assert (sample.episode, sample.task, sample.share) == ("e", "t", 1.0)


def test_a_shared_turn_is_trained_with_its_first_leaf_only() -> None:
    fork = Trajectory("s", (turn(0, None), turn(1, 0), turn(2, 0)))

    first, second = to_samples(fork, episode="e", task="t")

    assert first.num_trained_tokens == 6
    assert tuple(second.ids) == (100, 102, 101, 103, 105, 300, 302, 301, 303, 305)
    assert tuple(second.mask) == (0, 0, 0, 0, 0, 0, 0, 1, 1, 1)
    assert tuple(second.logprobs[:5]) == (0.0,) * 5


def test_one_episode_is_one_vote_however_many_samples_it_became() -> None:
    tree = Trajectory("s", (turn(0, None), turn(1, 0), turn(2, 0), turn(3, None)))

    shares = [sample.share for sample in to_samples(tree, episode="e", task="t")]

    assert shares == [0.5, 0.25, 0.25]
    assert sum(shares) == pytest.approx(1.0)


def test_weight_versions_are_those_of_the_trained_turns() -> None:
    turns = (turn(0, None, version="1"), turn(1, 0, version="2"), turn(2, 0, version="2"))

    samples = to_samples(Trajectory("s", turns), episode="e", task="t")

    assert [sample.weight_versions for sample in samples] == [("1", "2"), ("2",)]


@pytest.mark.parametrize(
    "turns",
    [
        (),
        (replace(turn(0, None), output_ids=(), logprobs=()),),
        (replace(turn(0, None), trainable=False),),
    ],
    ids=["no turn", "nothing sampled", "no exact tokens"],
)
def test_a_branch_without_trainable_tokens_gives_no_sample(turns: tuple[Turn, ...]) -> None:
    assert to_samples(Trajectory("s", turns), episode="e", task="t") == []


def test_values_of_trained_tokens_find_their_turns() -> None:
    silent = replace(turn(3, None), output_ids=(), logprobs=())
    debugged = replace(turn(4, 0), trainable=False)
    tree = Trajectory("s", (turn(0, None), turn(1, 0), turn(2, 0), silent, debugged))

    rows = [
        [logp for logp, on in zip(sample.logprobs, sample.mask, strict=True) if on]
        for sample in to_samples(tree, episode="e", task="t")
    ]

    assert rows == [
        [logp for each in turns for logp in each.logprobs] for turns in trained_turns(tree)
    ]
    assert [[each.index for each in turns] for turns in trained_turns(tree)] == [[0, 1], [2]]
