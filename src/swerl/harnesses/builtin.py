"""The built-in agent: a small loop of model and tools that runs in the controller's process.

It asks the gateway over HTTP like any agent, and uses its tools through the Sandbox's own calls. A
reply without a tool call ends the run, and so does `submit`.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict, Field

from swerl.chat import Json, Message, Role, ToolCall
from swerl.harnesses._editor_tools import BASH, DEFINITIONS, EDITOR, SUBMIT, Tools
from swerl.interfaces import Endpoint, Exit, Sandbox
from swerl.patch import FileEdit
from swerl.sandbox import Mount
from swerl.task import Task

_TIMED_OUT = 124
_MAX_ERROR_CHARS = 500


class Options(BaseModel):
    """Settings of the built-in agent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(50, ge=1)
    """Most model replies: a repair that takes longer has usually lost its way."""
    max_reply_tokens: int = Field(4096, ge=1)
    """Most tokens of one reply that the agent asks for; the gateway may allow fewer."""
    tool_timeout_s: float = Field(60.0, gt=0)
    """Most seconds of one bash call: a module's tests, not a project's whole suite."""
    max_output_chars: int = Field(10_000, ge=2)
    """Characters of a tool's output that the model sees; the middle of longer ones is left out."""
    system_prompt: str = (
        "You repair software. Look at the repository with your tools, change it so that the "
        "problem is solved, check the result, then call submit."
    )
    """What the model is told before the task; names no path, so it suits every task."""


def build(options: Options) -> Builtin:
    """Return the harness."""
    return Builtin(options)


class Builtin:
    """Implements Harness."""

    dialect = "anthropic"
    inside = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self._client = _Client()

    def mounts(self) -> Sequence[Mount]:
        """Return nothing: the agent does not live in the sandbox."""
        return ()

    async def install(self, sandbox: Sandbox) -> None:
        """Prepare nothing: every sandbox with bash and find will do."""

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Work on the Task until done or until `budget_s` seconds are over."""
        options = self._options
        tools = Tools(sandbox, task.workdir, options.tool_timeout_s, options.max_output_chars)
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        try:
            async with asyncio.timeout(budget_s) as clock, self._client.open() as http:
                model = _Model(http, endpoint, options)
                end = await _converse(model, tools, messages, options.max_turns)
        except TimeoutError:
            if not clock.expired():
                raise
            return Exit(_TIMED_OUT, timed_out=True, log=_log(messages))
        except (_RefusedError, aiohttp.ClientError) as error:
            return Exit(1, log=f"{_log(messages)}\n{type(error).__name__}: {error}")
        return Exit(0, limit=end == "limit", log=_log(messages))

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that show each file, make the edits one by one, and submit."""
        return script(edits)


def script(edits: Sequence[FileEdit]) -> list[Message]:
    """Return replies that show each file, make the edits one by one, and submit."""
    return [*_edit_calls(edits), _call(SUBMIT)]


class _RefusedError(Exception):
    """The gateway answered with an error."""


class _Client:
    """One HTTP session for all runs at a time, closed with the last of them."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._num_users = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[aiohttp.ClientSession]:
        if self._session is None:
            # Neither a cap on connections nor a timeout: the scheduler and the budget set those.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
            )
        self._num_users += 1
        try:
            yield self._session
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                session, self._session = self._session, None
                await session.close()


class _Model:
    """Asks the gateway for the next message."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint, options: Options) -> None:
        self._http = http
        self._url = f"{endpoint.url}/v1/messages"
        self._headers = {
            "x-api-key": endpoint.key,
            "anthropic-version": "2023-06-01",
            "content-type": "application/json",
        }
        self._body: dict[str, Any] = {
            "model": endpoint.model,
            "max_tokens": options.max_reply_tokens,
            "tools": DEFINITIONS,
        }
        if options.system_prompt:
            self._body["system"] = options.system_prompt

    async def reply(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the next message in Anthropic's form. Raises _RefusedError."""
        body = orjson.dumps({**self._body, "messages": messages})
        async with self._http.post(self._url, data=body, headers=self._headers) as response:
            data = await response.read()
            if response.status != 200:
                text = data.decode("utf-8", "replace")[:_MAX_ERROR_CHARS]
                message = f"the gateway answered {response.status}: {text}"
                raise _RefusedError(message)
            reply: dict[str, Any] = orjson.loads(data)
            return reply


async def _converse(
    model: _Model, tools: Tools, messages: list[dict[str, Any]], max_turns: int
) -> str:
    """Let model and tools take turns, appending to `messages`; return what ended it."""
    for _ in range(max_turns):
        reply = await model.reply(messages)
        messages.append({"role": "assistant", "content": reply["content"]})
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        if not calls:
            return "limit" if reply["stop_reason"] == "max_tokens" else "done"
        results: list[dict[str, Any]] = []
        for call in calls:
            if call["name"] == SUBMIT:
                return "submitted"
            text = await tools.use(call["name"], call["input"])
            results.append({"type": "tool_result", "tool_use_id": call["id"], "content": text})
        messages.append({"role": "user", "content": results})
    return "limit"


def _log(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the conversation, one message as JSON a line."""
    return b"\n".join(orjson.dumps(message) for message in messages).decode()


def _edit_calls(edits: Sequence[FileEdit]) -> Iterator[Message]:
    seen: set[str] = set()
    for edit in edits:
        if not edit.old:
            yield _call(EDITOR, command="create", path=edit.path, file_text=edit.new)
            seen.add(edit.path)
            continue
        if edit.path not in seen:
            seen.add(edit.path)
            yield _call(BASH, command=f"cat {shlex.quote(edit.path)}")
        yield _call(
            EDITOR, command="str_replace", path=edit.path, old_str=edit.old, new_str=edit.new
        )


def _call(name: str, **arguments: Json) -> Message:
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("", name, arguments),))
