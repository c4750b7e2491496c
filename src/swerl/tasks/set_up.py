"""Prepare a new sandbox of a Task: write its files and run its setup."""

from __future__ import annotations

from swerl.core.contracts import Sandbox
from swerl.core.errors import BrokenImageError
from swerl.core.task import Task, file_bytes

_TIMEOUT_S = 600.0
"""Time limit of a setup in seconds: known ones check out a commit."""
_SHOWN_CHARS = 300


async def set_up(sandbox: Sandbox, task: Task) -> None:
    """Write the Task's files and run its setup. Raises BrokenImageError if that fails."""
    for path, content in task.files.items():
        await sandbox.write(path, file_bytes(content))
    if not task.setup:
        return
    result = await sandbox.run(
        ["bash", "-s"],
        cwd=task.workdir,
        user="root",
        timeout_s=_TIMEOUT_S,
        stdin=f"{{\n{task.setup}\n}} </dev/null\n".encode("utf-8", "surrogateescape"),
    )
    if result.timed_out or result.exit_code:
        why = f"ran past {_TIMEOUT_S:g} s" if result.timed_out else f"exit code {result.exit_code}"
        said = result.text.strip()[-_SHOWN_CHARS:]
        raise BrokenImageError(
            f"the setup of task {task.id} failed ({why}): {said}",
            hint="the image may not be the one of its dataset",
        )
