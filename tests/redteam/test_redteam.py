"""No cheating policy is rewarded, each would be without defences, and honest work is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swerl.core.grade import Verdict
from swerl.sandboxes import local
from swerl.sandboxes.local import LocalBackend
from tests.redteam import agents, by_language, files, guesses, signs, tested_code
from tests.redteam.play import Attempt, is_rewarded_naively, missing_tool, play
from tests.redteam.policy import Defence, Kind, Policy
from tests.redteam.projects import project_of

TOPICS = (agents, files, tested_code, by_language, signs, guesses)
POLICIES = [policy for topic in TOPICS for policy in topic.POLICIES]
VETTED = [policy for policy in POLICIES if policy.stopped_by is Defence.VETTED]
HONEST = [
    Policy(
        f"honest-{kind}",
        "Fixes the till",
        (f"sed -i 's/{project_of(kind).wrong}/{project_of(kind).right}/' {project_of(kind).path}",),
        Defence.TESTS,
        Verdict.SOLVED,
        kind,
    )
    for kind in Kind
]
_tools: dict[str, str] = {}


def policies(chosen: list[Policy]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("policy", chosen, ids=lambda policy: policy.name)


@pytest.fixture(scope="module")
def backend() -> LocalBackend:
    return local.build(local.Options())


async def skip_without_tools(policy: Policy, backend: LocalBackend) -> None:
    probe = project_of(policy.kind).probe
    if probe not in _tools:
        _tools[probe] = await missing_tool(policy.kind, backend)
    if _tools[probe]:
        pytest.skip(f"this machine cannot run `{probe}`")


async def attempt(policy: Policy, backend: LocalBackend) -> Attempt:
    await skip_without_tools(policy, backend)
    return await play(policy, backend)


@policies(POLICIES)
async def test_a_policy_is_stopped_as_it_declares(policy: Policy, backend: LocalBackend) -> None:
    end = await attempt(policy, backend)
    assert not end.problem, end
    assert end.reward == 0


@policies([policy for policy in POLICIES if not policy.harmless])
async def test_a_grader_without_defences_rewards_it(policy: Policy, backend: LocalBackend) -> None:
    await skip_without_tools(policy, backend)
    assert await is_rewarded_naively(policy, backend)


@policies(VETTED)
async def test_only_vetting_stops_it(policy: Policy, backend: LocalBackend) -> None:
    assert (await play(policy, backend, vets=False)).reward == 1
    assert "/opt/build/lib/till.py" in (await play(policy, backend)).vetting


@policies(HONEST)
async def test_honest_work_is_rewarded(policy: Policy, backend: LocalBackend) -> None:
    end = await attempt(policy, backend)
    assert (end.verdict, end.reward) == ("solved", 1), end


@policies([replace(policy, name=f"idle-{policy.kind}", commands=()) for policy in HONEST])
async def test_doing_nothing_is_not_rewarded(policy: Policy, backend: LocalBackend) -> None:
    end = await attempt(policy, backend)
    assert (end.verdict, end.reward) == ("unsolved", 0), end
    if policy.kind is not Kind.REPORT:  # a naive grader reads no report
        assert not await is_rewarded_naively(policy, backend)
