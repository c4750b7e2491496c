"""The Tasks that policies cheat on: one small repository under every kind of grading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swerl.checks.redteam import _shop as shop
from swerl.checks.redteam.policy import Ground, Policy
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Limits
from swerl.core.task import GradingSpec, Task

WORKDIR = "/srv/till"
LIMITS = Limits(memory_mib=384, num_processes=64, num_cpus=1.0, disk_mib=96, lifetime_s=600)
"""Little, so that policies that use everything up have soon done so."""
_TIMEOUT_S = 60.0
_TEST_S = 90.0
"""Far above what these tests take, since a machine may be busy."""
_LOOK = "import sys; print('python', *sys.version_info[:2])"
_TESTS = "tests/test_till.py"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the sandboxes' image brings."""

    python: tuple[int, int]
    has_pytest: bool


async def scout(backend: SandboxBackend, image: str) -> Machine:
    """Look at the image. Raises SandboxError where it lacks Python or git."""
    async with backend.open(image, LIMITS, workdir=WORKDIR) as sandbox:
        script = f'git --version && python3 -c "{_LOOK}" && python3 -m pytest --version'
        said = await sandbox.run(["sh", "-c", script], timeout_s=_TIMEOUT_S)
    words = said.text.split()
    if "python" not in words:
        raise SandboxError(
            f"policies cannot cheat in image {image}: {said.text.strip()[-200:]}",
            hint="it needs git and python3",
        )
    at = words.index("python")
    return Machine((int(words[at + 1]), int(words[at + 2])), said.exit_code == 0)


def why_not(policy: Policy, machine: Machine) -> str:
    """Return why the policy cannot be tried in such an image; empty where it can."""
    needs = policy.ground in (Ground.PYTEST, Ground.SCRIPT)
    return "the image's python3 has no pytest" if needs and not machine.has_pytest else ""


def task_of(policy: Policy, machine: Machine, image: str) -> Task:
    """Return the Task that a policy cheats on."""
    ground = policy.ground
    spec = _SPECS[ground](machine)
    changes: dict[str, Any] = dict(policy.changes)
    tests = shop.FIRST_FUNCTION if ground is Ground.PYTEST else shop.CLASSES
    visible = {} if ground in (Ground.REWARD, Ground.SCRIPT) else {_TESTS: tests}
    files = {"till.py": shop.MODULE, "tests/__init__.py": "", **visible, **policy.files}
    future = shop.FUTURE if ground is Ground.FUTURE else ""
    return Task(
        id=f"redteam__{policy.name}",
        repo="redteam/till",
        image=image,
        workdir=WORKDIR,
        prompt="In till.py, change(7, 10) should be 3.",
        grading=replace(spec, **changes),
        gold_patch=shop.GOLD,
        dataset="redteam",
        files={f"{WORKDIR}/{path}": text for path, text in files.items()},
        setup=shop.COMMIT + future + shop.OWN,
    )


def _unittest(machine: Machine) -> GradingSpec:
    return GradingSpec(
        "command",
        fail_to_pass=tuple(_unittest_id(name, machine) for name in shop.MENDED),
        pass_to_pass=tuple(_unittest_id(name, machine) for name in shop.KEPT),
        test_files={_TESTS: shop.CLASSES},
        test_command=f"python3 -m unittest -v {_TESTS}",
        log_parser="django",
        env={"PYTHONPATH": "."},
        timeout_s=_TEST_S,
        canary=True,
    )


def _unittest_id(name: str, machine: Machine) -> str:
    """Return a test's id as unittest writes it, which differs between releases."""
    place = "tests.test_till.TillTest"
    return f"{name} ({place}.{name})" if machine.python >= (3, 11) else f"{name} ({place})"


def _pytest(machine: Machine) -> GradingSpec:
    return GradingSpec(
        "swebench",
        fail_to_pass=tuple(f"{_TESTS}::{name}" for name in shop.MENDED),
        pass_to_pass=tuple(f"{_TESTS}::{name}" for name in shop.KEPT),
        test_patch=shop.TEST_PATCH,
        test_command=f"python3 -m pytest -rA -p no:cacheprovider {_TESTS}",
        log_parser="pytest",
        env={"PYTHONPATH": "."},
        timeout_s=_TEST_S,
        canary=True,
    )


def _exit_code(machine: Machine) -> GradingSpec:
    return GradingSpec(
        "command",
        test_files={_TESTS: shop.CLASSES},
        test_command="python3 -m unittest discover -s tests",
        env={"PYTHONPATH": "."},
        timeout_s=_TEST_S,
        canary=True,
    )


def _script(machine: Machine) -> GradingSpec:
    return GradingSpec(
        "script",
        test_files={"test_fail_to_pass.py": shop.FUNCTIONS},
        test_command="python3 -m pytest -rA -p no:cacheprovider test_fail_to_pass.py",
        timeout_s=_TEST_S,
        canary=True,
    )


def _reward(machine: Machine) -> GradingSpec:
    return GradingSpec(
        "reward_file",
        files={"/tests/test.sh": shop.REWARD_SCRIPT, "/tests/test_till.py": shop.CLASSES},
        test_setup="rm -rf /logs/verifier && mkdir -p /logs/verifier",
        test_command="bash /tests/test.sh",
        report_path=shop.REWARD_PATH,
        timeout_s=_TEST_S,
        canary=True,
    )


_SPECS: Mapping[Ground, Callable[[Machine], GradingSpec]] = {
    Ground.UNITTEST: _unittest,
    Ground.FUTURE: _unittest,
    Ground.PYTEST: _pytest,
    Ground.EXIT_CODE: _exit_code,
    Ground.SCRIPT: _script,
    Ground.REWARD: _reward,
}
