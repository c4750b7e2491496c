"""Policies against docker's sandboxes: another user, another Python, other limits."""

from __future__ import annotations

from swerl.sandboxes import docker
from tests.redteam import runner
from tests.redteam.runner import PolicyOutcome, RedteamSettings

NAMES = [
    "future-objects",
    "future-worktree",
    "tests-edited",
    "number-equal-to-all",
    "only-once",
    "user-packages",
    "reward-daemon",
    "tests-eat-memory",
    "agent-eats-processes",
]


async def test_policies_are_stopped_in_docker_too(dockerd: str, docker_image: str) -> None:
    backend = docker.build(docker.Options(base_url=dockerd, user="root"))
    settings = RedteamSettings("docker", docker_image, num_jobs=3)
    found = await runner.run(backend, runner.choose(NAMES), settings)
    assert {row.outcome for row in found.rows} == {PolicyOutcome.HELD}, [
        (row.policy.name, row.seen) for row in found.rows if row.outcome is not PolicyOutcome.HELD
    ]
