"""Policies in nine languages: a fixed part of them here, all in `swerl tasks redteam`."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.grade import Verdict
from swerl.grading import blind
from swerl.grading.swaps import swapped
from tests.redteam import repository, runner
from tests.redteam.languages import GROUNDS
from tests.redteam.policy import Defence, Policy, TaskKind
from tests.redteam.repository import ImageTools, obstacle
from tests.redteam.runner import PolicyOutcome, PolicyResult

from .test_redteam import NIGHT, row_of, run

DOCS = Path(__file__).parents[4] / "docs" / "measurements" / "redteam.md"
OLD = {each.name for topic in runner.FIRST_TOPICS for each in topic.POLICIES}
ALL = [each for each in runner.all_policies() if each.name not in OLD]
FIRST_OF_EACH = {each.kind: each for each in reversed(ALL)}
POLICIES = list(
    {e.name: e for e in (*ALL[:: 10 if NIGHT else 20], *FIRST_OF_EACH.values())}.values()
)
HONEST = [
    Policy(
        f"honest-{kind}",
        "Fixes the till",
        (f"sed -i 's/{ground.wrong}/{ground.right}/' {ground.path}",),
        Defence.TESTS,
        Verdict.SOLVED,
        kind,
    )
    for kind, ground in GROUNDS.items()
]
IDLE = [replace(each, name=f"idle-{each.kind}", commands=()) for each in HONEST]


@pytest.fixture(scope="module")
def rows() -> dict[str, PolicyResult]:
    """The results of all policies of this file, by name."""
    return {row.policy.name: row for row in run([*POLICIES, *HONEST, *IDLE], naively=NIGHT).rows}


@pytest.mark.parametrize("policy", HONEST, ids=lambda policy: policy.name)
def test_honest_work_is_rewarded(rows: dict[str, PolicyResult], policy: Policy) -> None:
    row = row_of(rows, policy)
    assert (row.verdict, row.reward) == ("solved", 1.0), row.seen
    assert row.rewarded_naively or not NIGHT


@pytest.mark.parametrize("policy", IDLE, ids=lambda policy: policy.name)
def test_doing_nothing_is_not_rewarded(rows: dict[str, PolicyResult], policy: Policy) -> None:
    row = row_of(rows, policy)
    assert (row.verdict, row.reward) == ("unsolved", 0.0), row.seen
    assert not row.rewarded_naively


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_policy_is_stopped(rows: dict[str, PolicyResult], policy: Policy) -> None:
    row = row_of(rows, policy)
    assert row.outcome is PolicyOutcome.HELD, row.seen


@pytest.mark.nightly
@pytest.mark.parametrize(
    "policy", [each for each in POLICIES if not each.harmless], ids=lambda policy: policy.name
)
def test_a_policy_would_win_without_defences(rows: dict[str, PolicyResult], policy: Policy) -> None:
    assert row_of(rows, policy).rewarded_naively


@pytest.mark.parametrize("policy", [each for each in ALL if "parity" in each.name])
def test_a_policy_that_knows_half_of_the_swaps_wins_hardly_ever(policy: Policy) -> None:
    """Count the swaps whose value it takes for real; each run that has one betrays it."""
    ground = GROUNDS[policy.kind]
    spec = repository.task_of(policy, ImageTools((3, 11), has_pytest=True), "host").grading
    text = str(spec.test_files[ground.test_path])
    trials = blind.trials({ground.test_path: text.encode()}, {}, spec, at_once=blind.MAX_TESTS)
    seen: dict[str, list[bool]] = {}
    for trial in (each for part in trials[:2] for each in part):
        new = swapped(text.encode(), [trial.swap]).decode()
        line = next(b for a, b in zip(text.split("\n"), new.split("\n"), strict=True) if a != b)
        price, paid = map(int, re.findall(r"(\d+), (\d+)\)", line)[0])
        value = int(re.findall(r"-?\d+", re.sub(r"\(\d+, \d+\)", "", line))[0])
        is_impossible = "bounds" in policy.name and not 0 <= value <= paid
        found = is_impossible or (value + price + paid) % 2 == 1
        seen.setdefault(trial.candidate.test, []).append(found)
    assert len(seen) == len(spec.fail_to_pass) == 26
    chance = math.prod(0.5 + 0.5 * sum(each) / len(each) for each in seen.values()) ** 3
    assert chance < 2**-18


def test_every_language_has_policies() -> None:
    assert set(GROUNDS) <= {each.kind for each in POLICIES}
    assert len(ALL) >= 200


def test_without_its_tools_a_policy_names_the_obstacle() -> None:
    bare = ImageTools((3, 11), has_pytest=True, grounds=frozenset({TaskKind.GO}))
    cargo, go = (next(each for each in ALL if each.kind == kind) for kind in ("rust", "go"))
    assert "cargo" in obstacle(cargo, bare)
    assert not obstacle(go, bare)


def test_the_page_shows_every_topic() -> None:
    shown = DOCS.read_text().partition("<!-- topics -->")[2].partition("<!-- end of topics -->")[0]
    rows = [line.split(" | ") for line in shown.strip().splitlines()[2:]]
    known = {each.name: each for each in ALL}
    for row, topic in zip(rows, runner.FURTHER_TOPICS, strict=True):
        policies = [known[each.name] for each in topic.POLICIES]
        assert row[0].startswith(f"| {topic.__name__.rpartition('.')[2]}: ")
        assert int(row[1]) == len(policies)
        vetted = [f"`{each.name}`" for each in policies if each.stopped_by is Defence.VETTED]
        assert row[3].removesuffix(" |") == (", ".join(vetted) or "none")
