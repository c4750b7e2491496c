"""Penalties for length and format."""

from __future__ import annotations

import pytest

from swerl.core.episode import Status
from swerl.core.turn import Trajectory, Turn
from swerl.recipe.schema import RolloutSection, ShapingSection
from swerl.rollout.reward import penalty
from tests.unit import made

DONE = Status.COMPLETED


def _turn(index: int, parent: int | None, num_tokens: int, malformed: int = 0) -> Turn:
    return made.turn(index, parent, (1,) * (num_tokens - 1), malformed_calls=malformed)


def _rollout(**rules: float) -> RolloutSection:
    return RolloutSection(max_context_tokens=1000, shaping=ShapingSection(**rules))


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(10, 0.0), (800, 0.0), (850, 0.25), (900, 0.5), (1000, 1.0), (1200, 1.0)],
)
def test_overlong_grows_from_its_beginning_to_the_limit(num_tokens: int, expected: float) -> None:
    """DAPO eq. 13 with L_max = 1000 and L_cache = 200."""
    trajectory = Trajectory("s", (_turn(0, None, num_tokens),))
    assert penalty(trajectory, DONE, _rollout(overlong=1.0)) == pytest.approx(expected)
    assert penalty(trajectory, DONE, _rollout(overlong=0.4)) == pytest.approx(0.4 * expected)
    assert penalty(trajectory, DONE, _rollout()) == 0


FORKED = (_turn(0, None, 500), _turn(1, 0, 400), _turn(2, None, 700))
MALFORMED = (_turn(0, None, 5, 2), _turn(1, 0, 5), _turn(2, 1, 5, 1), _turn(3, 2, 5))


@pytest.mark.parametrize(
    ("turns", "status", "rules", "expected"),
    [
        (FORKED, DONE, {"overlong": 1.0}, 0.5),
        (MALFORMED, DONE, {"malformed": 0.2}, 0.1),
        ((_turn(0, None, 900, 1),), DONE, {"overlong": 1.0, "malformed": 0.5}, 1.0),
        ((), DONE, {"overlong": 1.0, "malformed": 0.5}, 0),
        ((), Status.LIMIT, {"unfinished": 0.5}, 0.5),
        ((), Status.LIMIT, {}, 0),
        ((), DONE, {"unfinished": 0.5}, 0),
        ((), Status.TIMEOUT, {"unfinished": 0.5}, 0),
    ],
    ids=[
        "the longest conversation is overlong, not the sum",
        "the share of replies with unreadable calls",
        "rules add up",
        "no turn",
        "unfinished at a limit",
        "no rule",
        "completed",
        "out of time",
    ],
)
def test_each_rule_takes_its_part(
    turns: tuple[Turn, ...], status: Status, rules: dict[str, float], expected: float
) -> None:
    assert penalty(Trajectory("s", turns), status, _rollout(**rules)) == pytest.approx(expected)
