"""A Trajectory is a tree of Turns."""

from __future__ import annotations

from swerl.core.chat import Finish
from swerl.core.turn import Trajectory, Turn


def turn(index: int, parent: int | None, num_sampled: int = 2) -> Turn:
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=(1,),
        output_ids=(2,) * num_sampled,
        logprobs=(-1.0,) * num_sampled,
        finish=Finish.STOP,
        weight_version="v1",
    )


TREE = Trajectory("s", (turn(0, None), turn(1, 0), turn(2, None, 5), turn(3, 1), turn(4, 0)))


def test_leaves_are_the_turns_that_nothing_continues() -> None:
    assert [leaf.index for leaf in TREE.leaves()] == [2, 3, 4]


def test_a_path_leads_from_the_root() -> None:
    assert [node.index for node in TREE.path(TREE.turns[3])] == [0, 1, 3]
    assert [node.index for node in TREE.path(TREE.turns[2])] == [2]


def test_sampled_tokens_count_every_turn_once() -> None:
    assert TREE.num_sampled_tokens == 13
    assert Trajectory("s").num_sampled_tokens == 0
