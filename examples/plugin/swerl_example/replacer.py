"""An agent with two tools, `bash` and `replace`, over OpenAI Chat Completions.

Its loop runs in the controller and uses the sandbox from outside. An agent that is a program of its
own is installed in `install`, started by `sandbox.run` and sets `inside = True`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from swerl.core.changes import FileEdit
from swerl.core.chat import Message, Role, ToolCall
from swerl.core.contracts import Endpoint, Exit, Sandbox
from swerl.core.sandbox import Mount
from swerl.core.task import Task


class Options(BaseModel):
    """Settings of the agent: the keys of `[harness]` with `type = "replacer"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(20, ge=1)
    """Most model replies: a one-line bug needs few."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Most seconds of one `bash` call."""


def _tool(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [_tool("bash", "command"), _tool("replace", "path", "old", "new")]


class Replacer:
    """Implements Harness."""

    dialect = "openai_chat"
    inside = False

    def __init__(self, options: Options) -> None:
        self._options = options

    def mounts(self) -> Sequence[Mount]:
        """Return no mounts: nothing of the agent is in the sandbox."""
        return ()

    async def install(self, sandbox: Sandbox) -> None:
        """Prepare nothing."""

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Let the model and the tools take turns until a reply has no tool call."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        try:
            async with asyncio.timeout(budget_s), aiohttp.ClientSession() as http:
                for _ in range(self._options.max_turns):
                    reply = await _ask(http, endpoint, messages)
                    messages.append(reply)
                    calls = reply.get("tool_calls") or []
                    if not calls:
                        return Exit(0, log=json.dumps(messages))
                    for call in calls:
                        result = await self._use(sandbox, task.workdir, call["function"])
                        messages.append(
                            {"role": "tool", "tool_call_id": call["id"], "content": result}
                        )
        except TimeoutError:
            return Exit(124, timed_out=True, log=json.dumps(messages))
        except aiohttp.ClientError as error:
            return Exit(1, log=f"{json.dumps(messages)}\n{error}")
        return Exit(0, limit=True, log=json.dumps(messages))

    async def _use(self, sandbox: Sandbox, workdir: str, call: dict[str, str]) -> str:
        """Run a tool call and return its result. A wrong call is an answer, never an end."""
        try:
            arguments = json.loads(call["arguments"])
            if call["name"] == "bash":
                command = ["bash", "-c", arguments["command"]]
                timeout_s = self._options.tool_timeout_s
                done = await sandbox.run(command, cwd=workdir, timeout_s=timeout_s)
                return (done.stdout + done.stderr).decode("utf-8", "replace")
            path = f"{workdir}/{arguments['path']}"
            text = (await sandbox.read(path)).decode()
            if text.count(arguments["old"]) != 1:
                return "error: `old` must occur exactly once in the file"
            await sandbox.write(path, text.replace(arguments["old"], arguments["new"]).encode())
            return "ok"
        except (KeyError, TypeError, ValueError, FileNotFoundError) as error:
            return f"error: {error!r}"

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return the replies that make these edits, for the engine `scripted:gold`."""
        arguments = [{"path": each.path, "old": each.old, "new": each.new} for each in edits]
        calls = [ToolCall("", "replace", each) for each in arguments]
        return [*(Message(Role.ASSISTANT, tool_calls=(call,)) for call in calls), _DONE]


_DONE = Message(Role.ASSISTANT, "Done.")


async def _ask(
    http: aiohttp.ClientSession, endpoint: Endpoint, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    body = {"model": endpoint.model, "messages": messages, "tools": TOOLS}
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    url = f"{endpoint.url}/v1/chat/completions"
    async with http.post(url, json=body, headers=headers, raise_for_status=True) as response:
        message: dict[str, Any] = (await response.json())["choices"][0]["message"]
        return message


def build(options: Options) -> Replacer:
    """Build the agent from its validated settings."""
    return Replacer(options)
