"""Ten hostile patches get no reward.

`tests/redteam` has the longer list, for each night.
"""

from __future__ import annotations

import pytest

from swerl.sandboxes import local
from tests.redteam import agents, files, tested_code
from tests.redteam.play import play

HOSTILE = (
    "forged-and-gone", "os-exit", "sys-exit", "test-result", "equal-to-all", "conftest",
    "tests-edited", "tests-deleted", "tests-as-link", "pytest-settings",
)  # fmt: skip
POLICIES = {
    policy.name: policy for topic in (agents, files, tested_code) for policy in topic.POLICIES
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_patch_is_stopped(name: str) -> None:
    end = await play(POLICIES[name], local.build(local.Options()))
    assert not end.problem, end
    assert end.reward == 0
