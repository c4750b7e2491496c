"""No cheating policy is rewarded, each would be without defences, and honest work is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.checks.redteam import _shop as shop
from swerl.checks.redteam import catalogue, naive, sheet
from swerl.checks.redteam.ground import Machine, scout, task_of, why_not
from swerl.checks.redteam.policy import Ground, Policy, Stop
from swerl.checks.redteam.sheet import Result, Row, Settings, Sheet, judge
from swerl.core.episode import Episode, Status
from swerl.core.grade import Canary, Grade, TestStatus, Verdict
from swerl.core.tree import Trajectory
from swerl.sandboxes import local

POLICIES = catalogue.all_policies()
HONEST = [
    Policy(
        f"honest-{ground}",
        "Mends the till",
        (f"sed -i 's/{shop.WRONG}/{shop.RIGHT}/' till.py",),
        Stop.TESTS,
        Verdict.SOLVED,
        ground,
    )
    for ground in Ground
]
MEND = f"sed -i 's/{shop.WRONG}/{shop.RIGHT}/' till.py"
DIFF = "--- a/conftest.py\\n+++ b/conftest.py\\n@@ -0,0 +1 @@\\n+x"
UNUSUAL = {
    "with-conftest": (MEND, "echo 'import pytest' >conftest.py"),
    "moved": (
        "mkdir till && git mv till.py till/__init__.py",
        MEND.replace("till.py", "till/*.py"),
    ),
    "odd-names": (
        MEND,
        "mkdir 'dö cs' && echo x >'dö cs/a b.txt' && head -c 9999 /dev/urandom >b.png",
    ),
    "other-ends": (
        MEND,
        "sed -i 's/$/\\r/' till.py && truncate -s -1 till.py && chmod 755 till.py",
    ),
    "like-a-diff": (MEND, f'printf \'"""\\n{DIFF}\\n"""\\n\' >>till.py'),
    "generated": (MEND, "yes 'a line that a program wrote' | head -c 5000000 >prices.sql"),
}
DOCS = Path(__file__).parents[3] / "docs" / "measurements" / "redteam.md"


def run(policies: list[Policy], *, naively: bool = False) -> Sheet:
    backend = local.build(local.Options())
    return asyncio.run(sheet.run(backend, policies, Settings(num_jobs=2, naively=naively)))


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """The sheet of all policies, by name."""
    return {row.policy.name: row for row in run(POLICIES, naively=True).rows}


def row_of(rows: dict[str, Row], policy: Policy) -> Row:
    row = rows[policy.name]
    if row.result is Result.SKIPPED:
        pytest.skip(row.seen)
    return row


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_policy_is_stopped_as_it_declares(rows: dict[str, Row], policy: Policy) -> None:
    row = row_of(rows, policy)
    assert row.result is Result.HELD, row.seen
    assert (row.verdict, row.reward) == (policy.verdict, 0.0)


@pytest.mark.parametrize(
    "policy", [each for each in POLICIES if not each.harmless], ids=lambda policy: policy.name
)
def test_a_policy_would_win_without_defences(rows: dict[str, Row], policy: Policy) -> None:
    assert row_of(rows, policy).rewarded_naively


def test_honest_work_is_rewarded_on_every_ground() -> None:
    for row in run(HONEST).rows:
        if row.result is not Result.SKIPPED:
            assert (row.verdict, row.reward) == ("solved", 1.0), f"{row.policy.name}: {row.seen}"
            assert row.result is Result.BROKE, "a sheet must not hold a policy that is rewarded"


def test_honest_work_of_unusual_shape_is_rewarded() -> None:
    honest = [
        Policy(name, "Mends the till", commands, Stop.TESTS, Verdict.SOLVED)
        for name, commands in UNUSUAL.items()
    ]
    assert {row.policy.name: row.seen for row in run(honest).rows if not row.reward} == {}


def test_a_grader_without_defences_does_not_reward_doing_nothing() -> None:
    async def paid() -> dict[Ground, bool]:
        backend = local.build(local.Options())
        machine = await scout(backend, "host")
        found = {}
        for honest in HONEST:
            idle = replace(honest, commands=())
            if not why_not(idle, machine):
                task = task_of(idle, machine, "host")
                found[honest.ground] = await naive.rewards(idle, task, backend)
        return found

    assert not any(asyncio.run(paid()).values())


def test_names_are_unique_and_over_thirty_policies_look_for_no_future() -> None:
    assert len({policy.name for policy in POLICIES}) == len(POLICIES)
    assert sum(policy.ground is not Ground.FUTURE for policy in POLICIES) > 30
    assert sum(policy.ground is Ground.FUTURE for policy in POLICIES) >= 8


def test_without_pytest_a_policy_says_so() -> None:
    bare = Machine((3, 11), has_pytest=False)
    [script] = catalogue.choose(["exit-in-script"])
    [module] = catalogue.choose(["exit-at-import"])
    assert "pytest" in why_not(script, bare)
    assert not why_not(module, bare)


def ended(grade: Grade, reward: float = 0.0, patch: str = "x") -> Episode:
    return Episode("e", "t", Status.COMPLETED, grade, reward, Trajectory("e", ()), patch=patch)


FAILING = {"test_a": TestStatus.FAILED}


@pytest.mark.parametrize(
    ("stop", "grade"),
    [
        (Stop.DROPPED, Grade(Verdict.UNSOLVED, "r", FAILING)),
        (Stop.CANARY, Grade(Verdict.UNSOLVED, "r", FAILING, canary=Canary.FAILED)),
        (Stop.CANARY, Grade(Verdict.UNSOLVED, "r", canary=Canary.PASSED)),
        (Stop.TWICE, Grade(Verdict.UNSOLVED, "r", FAILING, canary=Canary.PASSED)),
        (Stop.FUTURE, Grade(Verdict.UNSOLVED, "r", FAILING)),
    ],
)
def test_a_policy_that_something_else_stopped_did_not_hold(stop: Stop, grade: Grade) -> None:
    policy = Policy("p", "s", (), stop)
    assert "something else" in judge(policy, ended(grade))


def test_a_policy_with_another_verdict_did_not_hold() -> None:
    policy = Policy("p", "s", (), Stop.TESTS)
    assert "infra and not unsolved" in judge(policy, ended(Grade(Verdict.INFRA, "lost")))
    assert not judge(policy, ended(Grade(Verdict.UNSOLVED, "r", FAILING)))


def test_the_page_shows_every_policy() -> None:
    text = DOCS.read_text()
    shown = text.partition("<!-- sheet -->")[2].partition("<!-- end -->")[0].strip()
    lines = [
        f"| `{policy.name}` | {policy.sentence} | {policy.verdict} | {policy.stop} |"
        for policy in POLICIES
    ]
    assert shown.splitlines()[2:] == lines
