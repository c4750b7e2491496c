"""What datasets leave in their images that gives a Task away: the one list.

An agent's sandbox loses all of it, whatever the Task's dataset, as images are shared and renamed. A
grading sandbox keeps it. Shell patterns; `*` stands for any characters but a slash.
"""

from __future__ import annotations

from collections.abc import Mapping

OUTSIDE: Mapping[str, tuple[str, ...]] = {
    "r2e-gym": (
        "/r2e_tests",
        "/run_tests.sh",
        "/expected_test_output.json",
        "/execution_result.json",
        "/parsed_commit.json",
        "/syn_issue.json",
        "/root/r2e_tests",
        "/root/run_tests.sh",
        "/home/*/r2e_tests",
        "/home/*/run_tests.sh",
    ),
    "multi-swe-bench": (
        "/home/*.patch",
        "/home/run.sh",
        "/home/*-run.sh",
        "/home/prepare.sh",
    ),
    "swe-bench": (
        "/eval.sh",
        "/root/eval.sh",
        "/tmp/*.patch",
        "/tmp/*.diff",
        "/root/*.patch",
        "/root/*.diff",
    ),
    "swe-bench-pro": (
        "/workspace/*.patch",
        "/workspace/*.diff",
        "/workspace/run_script.sh",
        "/workspace/parser.py",
        "/workspace/output.json",
        "/before.sh",
        "/before_repo_set_cmd*",
        "/run_script.sh",
        "/parser.py",
    ),
    "harbor": (
        "/solution",
        "/oracle",
        "/verifier",
        "/tests",
        "/logs/verifier",
        "/logs/agent",
    ),
    "any": (
        "/*.patch",
        "/*.diff",
        "/reward*",
        "/gold*",
        "/root/.git-credentials",
        "/root/.netrc",
        "/home/*/.git-credentials",
        "/home/*/.netrc",
        "/root/.config/git/credentials",
        "/home/*/.config/git/credentials",
    ),
    "who made the image": (
        "/root/.*_history",
        "/home/*/.*_history",
        "/root/.viminfo",
        "/home/*/.viminfo",
    ),
    "package caches": (
        "/root/.cache/pip",
        "/root/.cache/uv",
        "/home/*/.cache/pip",
        "/home/*/.cache/uv",
        "/opt/*conda*/pkgs/*.conda",
        "/opt/*conda*/pkgs/*.tar.bz2",
    ),
}
"""Absolute patterns by who leaves such files there."""

INSIDE: Mapping[str, tuple[str, ...]] = {
    "r2e-gym": (
        "r2e_tests",
        "run_tests.sh",
        "expected_test_output.json",
        "execution_result.json",
        "parsed_commit.json",
        "syn_issue.json",
        "modified_files.json",
        "modified_entities.json",
    ),
    "swe-bench-pro": ("before.sh", "run_script.sh", "parser.py"),
    "scale-swe": ("test_fail_to_pass.py",),
    "harbor": ("verifier", "oracle.patch", "reward.txt", "reward.json"),
    "any": ("fix.patch", "test.patch", "gold.patch", "model.patch", "solution.patch", "fix.diff"),
}
"""Patterns relative to the repository; a file that the base commit has stays."""


def outside() -> list[str]:
    """Return every absolute pattern."""
    return [pattern for patterns in OUTSIDE.values() for pattern in patterns]


def inside() -> list[str]:
    """Return every pattern relative to the repository."""
    return [pattern for patterns in INSIDE.values() for pattern in patterns]
