"""The repository inside an agent's Sandbox: its base commit, and the patch that came of it."""

from __future__ import annotations

from swerl.errors import SandboxError
from swerl.interfaces import Sandbox

MAX_PATCH_BYTES = 8 * 2**20
"""Largest patch that is graded; real fixes are a thousand times smaller."""

_BASE = """
git rev-parse --verify -q HEAD && exit
git init -q && git add -Af . &&
git -c user.name=swerl -c user.email=swerl@localhost commit -q --allow-empty -m base &&
git rev-parse HEAD
"""

# Hooks, filters and external diffs that the agent may have configured stay switched off.
_DIFF = """
export GIT_OPTIONAL_LOCKS=0
git -c core.fsmonitor=false -c core.hooksPath=/dev/null add -AN . &&
git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.quotePath=false \
    diff --binary --full-index --no-ext-diff --no-textconv --no-color "$1" --
"""


async def base_commit(sandbox: Sandbox, workdir: str) -> str:
    """Return the commit that the agent starts from, making one where there is no repository."""
    done = await sandbox.run(["sh", "-c", _BASE], cwd=workdir, timeout_s=60)
    if done.exit_code:
        message = f"{workdir} cannot be used as a git work tree: {done.text.strip()[-200:]}"
        raise SandboxError(message, hint="`swerl sandbox smoke` checks images for this")
    return done.stdout.decode().split()[-1]


async def take_patch(sandbox: Sandbox, workdir: str, base: str) -> str | None:
    """Return everything that changed since `base` as a binary-safe diff.

    None where the agent left a work tree that git can no longer read, or a patch over the cap.
    """
    done = await sandbox.run(["sh", "-c", _DIFF, "sh", base], cwd=workdir, timeout_s=60)
    if done.exit_code or done.truncated or len(done.stdout) > MAX_PATCH_BYTES:
        return None
    return done.stdout.decode("utf-8", "surrogateescape")
