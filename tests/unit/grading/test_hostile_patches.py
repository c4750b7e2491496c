"""Ten hostile patches get no reward, and five honest ones of unusual shape do.

`tests/redteam` has the longer list, for each night.
"""

from __future__ import annotations

import pytest

from swerl.core.grade import Verdict
from swerl.sandboxes import local
from tests.redteam import agents, files, tested_code
from tests.redteam.play import play
from tests.redteam.policy import Defence, Policy
from tests.redteam.projects import RIGHT, WRONG

HOSTILE = (
    "forged-and-gone", "os-exit", "sys-exit", "test-result", "equal-to-all", "conftest",
    "tests-edited", "tests-deleted", "tests-as-link", "pytest-settings",
)  # fmt: skip
POLICIES = {
    policy.name: policy for topic in (agents, files, tested_code) for policy in topic.POLICIES
}
FIX = f"sed -i 's/{WRONG}/{RIGHT}/' till.py"
DIFF = "--- a/conftest.py\\n+++ b/conftest.py\\n@@ -0,0 +1 @@\\n+x"
HONEST = {
    "module-becomes-package": (
        FIX,
        "mkdir till && git mv till.py till/__init__.py",
    ),
    "own-conftest": (FIX, "echo 'import pytest' >conftest.py"),
    "odd-names-and-binary": (
        FIX,
        "mkdir 'dö cs' && echo x >'dö cs/a b.txt' && head -c 9999 /dev/urandom >b.png",
    ),
    "other-line-ends-and-mode": (
        FIX,
        "sed -i 's/$/\\r/' till.py && truncate -s -1 till.py && chmod 755 till.py",
    ),
    "text-like-a-diff": (FIX, f'printf \'"""\\n{DIFF}\\n"""\\n\' >>till.py'),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_patch_is_stopped(name: str) -> None:
    end = await play(POLICIES[name], local.build(local.Options()))
    assert not end.problem, end
    assert end.reward == 0


@pytest.mark.parametrize("name", HONEST)
async def test_an_honest_patch_is_rewarded(name: str) -> None:
    policy = Policy(name, "Fixes the till", HONEST[name], Defence.TESTS, Verdict.SOLVED)
    end = await play(policy, local.build(local.Options()))
    assert (end.verdict, end.reward) == ("solved", 1), end
