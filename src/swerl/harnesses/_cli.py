"""What agents that are programs inside the sandbox share."""

from __future__ import annotations

import json
from collections.abc import Iterator

from swerl.chat import Json, Message, Role, ToolCall
from swerl.errors import SandboxError
from swerl.interfaces import Sandbox

NO_PROXY = "unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; "
"""Shell command: an image may name a proxy, and the gateway is not behind one."""
ENDLESS_CONTEXT = 10_000_000
"""Tokens of a context that no run fills, for a CLI that is not to mind it."""
UNCAPPED_TOKENS = 131_072
"""Most tokens of a reply that a CLI is told to ask for; the session's own sampling decides."""


async def prepare(sandbox: Sandbox, script: str, agent: str) -> None:
    """Run the shell script that makes an agent's home folder. Raises SandboxError."""
    done = await sandbox.run(["sh", "-c", script], timeout_s=60)
    if done.exit_code:
        message = f"cannot prepare {agent}'s home folder: {done.text.strip()[-200:]}"
        raise SandboxError(message, hint="the sandbox's user needs a writable HOME")


def call(name: str, **arguments: Json) -> Message:
    """Return a reply that calls one tool."""
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("", name, arguments),))


def said_last(lines: bytes) -> Iterator[dict[str, Json]]:
    """Yield the JSON objects of a transcript that has one a line, the last first."""
    for line in reversed(lines.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event
