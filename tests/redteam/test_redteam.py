"""No cheating policy is rewarded, each would be without defences, and honest work is."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.episode import Episode, Status
from swerl.core.grade import Blind, Grade, TestStatus, Verdict
from swerl.core.turn import Trajectory
from swerl.sandboxes import local
from tests.redteam import repository, runner
from tests.redteam.languages import GROUNDS
from tests.redteam.policy import Defence, Policy, TaskKind
from tests.redteam.repository import ImageTools, inspect, obstacle, task_of
from tests.redteam.runner import (
    PolicyOutcome,
    PolicyResult,
    RedteamReport,
    RedteamSettings,
    is_rewarded_naively,
    judge,
)

POLICIES = [each for topic in runner.FIRST_TOPICS for each in topic.POLICIES]
HONEST = [
    Policy(
        f"honest-{kind}",
        "Fixes the till",
        (f"sed -i 's/{repository.WRONG}/{repository.RIGHT}/' till.py",),
        Defence.TESTS,
        Verdict.SOLVED,
        kind,
    )
    for kind in TaskKind
    if kind not in GROUNDS
]
FIX = f"sed -i 's/{repository.WRONG}/{repository.RIGHT}/' till.py"
DIFF = "--- a/conftest.py\\n+++ b/conftest.py\\n@@ -0,0 +1 @@\\n+x"
UNUSUAL = {
    "with-conftest": (FIX, "echo 'import pytest' >conftest.py"),
    "moved": (
        "mkdir till && git mv till.py till/__init__.py",
        FIX.replace("till.py", "till/*.py"),
    ),
    "odd-names": (
        FIX,
        "mkdir 'dö cs' && echo x >'dö cs/a b.txt' && head -c 9999 /dev/urandom >b.png",
    ),
    "other-ends": (
        FIX,
        "sed -i 's/$/\\r/' till.py && truncate -s -1 till.py && chmod 755 till.py",
    ),
    "like-a-diff": (FIX, f'printf \'"""\\n{DIFF}\\n"""\\n\' >>till.py'),
    "generated": (FIX, "yes 'a line that a program wrote' | head -c 5000000 >prices.sql"),
}
NIGHT = bool(os.environ.get("SWERL_NIGHTLY"))
"""Then a grader without defences judges each policy, too."""
DOCS = Path(__file__).parents[4] / "docs" / "measurements" / "redteam.md"


def run(policies: list[Policy], *, naively: bool = False, vets: bool = True) -> RedteamReport:
    settings = RedteamSettings(num_jobs=2, naively=naively, vets=vets)
    return asyncio.run(runner.run(local.build(local.Options()), policies, settings))


@pytest.fixture(scope="module")
def rows() -> dict[str, PolicyResult]:
    """The results of all policies, by name."""
    return {row.policy.name: row for row in run(POLICIES, naively=NIGHT).rows}


def row_of(rows: dict[str, PolicyResult], policy: Policy) -> PolicyResult:
    row = rows[policy.name]
    if row.outcome is PolicyOutcome.SKIPPED:
        pytest.skip(row.seen)
    return row


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_policy_is_stopped_as_it_declares(rows: dict[str, PolicyResult], policy: Policy) -> None:
    row = row_of(rows, policy)
    assert row.outcome is PolicyOutcome.HELD, row.seen
    assert (row.verdict, row.reward) == (policy.verdict, 0.0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "policy", [each for each in POLICIES if not each.harmless], ids=lambda policy: policy.name
)
def test_a_policy_would_win_without_defences(rows: dict[str, PolicyResult], policy: Policy) -> None:
    assert row_of(rows, policy).rewarded_naively


def test_a_fix_that_lies_about_wins_without_vetting_alone() -> None:
    policies = [each for each in runner.all_policies() if each.stopped_by is Defence.VETTED]
    assert len(policies) == 5
    for row in run(policies, vets=False).rows:
        assert (row.outcome, row.reward) == (PolicyOutcome.BROKE, 1.0), row.policy.name
    for row in run(policies, naively=True).rows:
        assert (row.outcome, row.reward) == (PolicyOutcome.HELD, 0.0), row.seen
        assert "/opt/build/lib/till.py" in row.vetting
        assert row.rewarded_naively


def test_honest_work_is_rewarded_on_every_kind_of_task() -> None:
    for row in run(HONEST).rows:
        if row.outcome is not PolicyOutcome.SKIPPED:
            assert (row.verdict, row.reward) == ("solved", 1.0), f"{row.policy.name}: {row.seen}"
            assert row.outcome is PolicyOutcome.BROKE, "a rewarded policy must not count as held"


def test_honest_work_of_unusual_shape_is_rewarded() -> None:
    honest = [
        Policy(name, "Fixes the till", commands, Defence.TESTS, Verdict.SOLVED)
        for name, commands in UNUSUAL.items()
    ]
    assert {row.policy.name: row.seen for row in run(honest).rows if not row.reward} == {}


def test_a_grader_without_defences_does_not_reward_doing_nothing() -> None:
    async def paid() -> dict[TaskKind, bool]:
        backend = local.build(local.Options())
        tools = await inspect(backend, "host")
        found = {}
        for honest in HONEST:
            idle = replace(honest, commands=())
            if not obstacle(idle, tools):
                task = task_of(idle, tools, "host")
                found[honest.kind] = await is_rewarded_naively(idle, task, backend)
        return found

    assert not any(asyncio.run(paid()).values())


def test_names_are_unique_and_over_thirty_policies_look_for_no_future() -> None:
    assert len({policy.name for policy in POLICIES}) == len(POLICIES)
    assert sum(policy.kind is not TaskKind.FUTURE for policy in POLICIES) > 30
    assert sum(policy.kind is TaskKind.FUTURE for policy in POLICIES) >= 8


def test_without_pytest_a_policy_names_the_obstacle() -> None:
    bare = ImageTools((3, 11), has_pytest=False)
    [script] = runner.choose(["exit-in-script"])
    [module] = runner.choose(["exit-at-import"])
    [built] = runner.choose(["placed-cmake-test"])
    assert "pytest" in obstacle(script, bare)
    assert "no cmake" in obstacle(built, replace(bare, grounds=frozenset({TaskKind.C})))
    assert not obstacle(module, bare)


def ended(grade: Grade, reward: float = 0.0, patch: str = "x") -> Episode:
    return Episode("e", "t", Status.COMPLETED, grade, reward, Trajectory("e", ()), patch=patch)


FAILING = {"test_a": TestStatus.FAILED}


@pytest.mark.parametrize(
    ("defence", "grade"),
    [
        (Defence.DROPPED, Grade(Verdict.UNSOLVED, "r", FAILING)),
        (Defence.BLIND, Grade(Verdict.CHEAT, "r", FAILING, blind=Blind.NONE)),
        (Defence.BLIND, Grade(Verdict.CHEAT, "r", blind=Blind.MATCHED)),
        (Defence.FUTURE, Grade(Verdict.UNSOLVED, "r", FAILING)),
    ],
)
def test_a_policy_that_something_else_stopped_did_not_hold(defence: Defence, grade: Grade) -> None:
    policy = Policy("p", "s", (), defence)
    assert "something else" in judge(policy, ended(grade))


def test_a_policy_with_another_verdict_did_not_hold() -> None:
    policy = Policy("p", "s", (), Defence.TESTS)
    assert "infra and not unsolved" in judge(policy, ended(Grade(Verdict.INFRA, "lost")))
    assert not judge(policy, ended(Grade(Verdict.UNSOLVED, "r", FAILING)))


def test_the_page_shows_every_policy() -> None:
    text = DOCS.read_text()
    shown = text.partition("<!-- sheet -->")[2].partition("<!-- end -->")[0].strip()
    lines = [
        f"| `{policy.name}` | {policy.sentence} | {policy.verdict} | {policy.stopped_by} |"
        for policy in POLICIES
    ]
    assert shown.splitlines()[2:] == lines
