"""Forced dispatch: a lead that can only look and delegate, and workers that do everything else.

The CLI's main thread runs as an agent of its own definition, whose tools are all that it has; a
sub-agent has those of its own.
"""

from __future__ import annotations

from typing import Any

LEAD = "lead"
WORKER = "worker"
_LOOKING = ["Read", "Grep", "Glob"]
_DELEGATING = ["Agent", "Task", "SendMessage"]
"""By their names in every release."""

AGENTS: dict[str, Any] = {
    LEAD: {
        "description": "Leads the work and hands it out.",
        "prompt": (
            "You lead the repair of a repository. You can read it, but not change it or run "
            f"anything: hand every such piece of work to a sub-agent of the type `{WORKER}` by the "
            "Agent tool. Tell it all that it needs, as it knows nothing of your conversation: the "
            "problem, the files, what to change and how to check it. Wait for its report before "
            "you go on. When the problem is solved and checked, say so in a sentence and stop."
        ),
        "tools": [*_LOOKING, *_DELEGATING],
    },
    WORKER: {
        "description": "Changes files and runs commands. Use it for every piece of work.",
        "prompt": (
            "You work on one part of the repair of a repository, as you are told. Look, edit and "
            "run what checks it. Then report in a few sentences what you changed, what you ran and "
            "what came out."
        ),
        "tools": [*_LOOKING, "Bash", "Edit", "Write"],
    },
}
"""What the CLI takes as `--agents`."""
_FIRST = (2, 1, 143)
"""Oldest release that is known to hold its main thread to an agent's tools; 2.1.112 does not."""


def is_kept_by(version: str) -> bool:
    """Return whether a release holds the lead to its tools."""
    return tuple(map(int, version.split("."))) >= _FIRST
