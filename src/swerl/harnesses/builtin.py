"""The built-in agent: a small loop of model and tools that runs in the controller's process.

It calls the gateway over HTTP like any agent and runs its tools by the Sandbox's own calls. A
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

from swerl.core.changes import FileEdit
from swerl.core.chat import Message
from swerl.core.contracts import Endpoint, Exit, Sandbox
from swerl.core.sandbox import Mount
from swerl.core.task import Task
from swerl.harnesses import _cli
from swerl.harnesses._builtin_tools import BASH, EDITOR, SUBMIT, Shell, Tools, definitions

_TIMED_OUT = 124
_MAX_REPLY_TOKENS = 4096
"""Tokens that the agent requests per reply: room for a whole file. The gateway may allow fewer."""
_SYSTEM = (
    "You repair software. Look at the repository with your tools, change it so that the problem is "
    "solved, check the result, then call submit."
)
"""It names no path, so it fits every task."""


class Options(BaseModel):
    """Settings of the built-in agent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(50, ge=1)
    """Maximum model replies; longer repairs rarely succeed."""
    tool_timeout_s: float = Field(60.0, gt=0)
    """Time limit of one bash call in seconds: enough for a module's tests, not a whole suite."""


def build(options: Options) -> Builtin:
    return Builtin(options)


class Builtin:
    """The loop of model and tools."""

    dialect = "anthropic"
    inside = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self._client = Client()

    def mounts(self) -> Sequence[Mount]:
        """Return nothing: the agent runs outside of the sandbox."""
        return ()

    async def install(self, sandbox: Sandbox) -> None:
        """Do nothing: bash and find are enough."""

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Run the agent on the Task for at most `budget_s` seconds."""
        shell = Shell(sandbox, task.workdir, self._options.tool_timeout_s)
        tools = Tools(sandbox, shell, task.workdir)
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        try:
            async with asyncio.timeout(budget_s) as clock, self._client.open() as http:
                model = Model(http, endpoint, self._settings())
                end = await self._converse(model, tools, messages)
        except TimeoutError:
            if not clock.expired():
                raise
            return Exit(_TIMED_OUT, timed_out=True, log=_log(messages))
        except (RefusedError, aiohttp.ClientError) as error:
            return Exit(1, log=f"{_log(messages)}\n{type(error).__name__}: {error}")
        return Exit(0, limit=end == "limit", log=_log(messages))

    async def _converse(self, model: Model, tools: Tools, messages: list[dict[str, Any]]) -> str:
        """Alternate model and tools and append to `messages`; return the reason of the end."""
        for _ in range(self._options.max_turns):
            reply = await model.reply(messages)
            messages.append({"role": "assistant", "content": reply["content"]})
            calls = [block for block in reply["content"] if block["type"] == "tool_use"]
            if not calls:
                return "limit" if reply["stop_reason"] == "max_tokens" else "done"
            results = await _results(calls, tools)
            if results is None:
                return "submitted"
            messages.append({"role": "user", "content": results})
        return "limit"

    def _settings(self) -> dict[str, Any]:
        return {"max_tokens": _MAX_REPLY_TOKENS, "tools": definitions(), "system": _SYSTEM}

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that show each file, make the edits one by one, and submit."""
        return script(edits)


def script(edits: Sequence[FileEdit]) -> list[Message]:
    """Return replies that show each file, make the edits one by one, and submit."""
    return [*_edit_calls(edits), _cli.call(SUBMIT)]


async def _results(calls: Sequence[Any], tools: Tools) -> list[dict[str, Any]] | None:
    """Execute the calls of one reply in order; return None if one of them submits."""
    results: list[dict[str, Any]] = []
    for call in calls:
        if call["name"] == SUBMIT:
            return None
        text = await tools.use(call["name"], call["input"])
        results.append({"type": "tool_result", "tool_use_id": call["id"], "content": text})
    return results


def _log(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the conversation as JSON lines, one per message."""
    return b"\n".join(orjson.dumps(message) for message in messages).decode()


def _edit_calls(edits: Sequence[FileEdit]) -> Iterator[Message]:
    paths: set[str] = set()
    for edit in edits:
        if not edit.old:
            yield _cli.call(EDITOR, command="create", path=edit.path, file_text=edit.new)
            paths.add(edit.path)
            continue
        if edit.path not in paths:
            paths.add(edit.path)
            yield _cli.call(BASH, command=f"cat {shlex.quote(edit.path)}")
        yield _cli.call(
            EDITOR, command="str_replace", path=edit.path, old_str=edit.old, new_str=edit.new
        )


_MAX_ERROR_CHARS = 500
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses between attempts in seconds; a restarting engine needs about a minute."""


class RefusedError(Exception):
    """The gateway returned an error."""


class _LaterError(RefusedError):
    """The gateway has no capacity at the moment."""


class Client:
    """One HTTP session for all current runs, closed with the last of them."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._num_users = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Return the session; it closes when its last user leaves."""
        if self._session is None:
            # No cap on connections and no timeout: the scheduler and the budget have both.
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


class Model:
    """Client of the gateway's Messages API; `settings` are part of every request."""

    def __init__(
        self, http: aiohttp.ClientSession, endpoint: Endpoint, settings: Mapping[str, Any]
    ) -> None:
        self._http = http
        self._url = f"{endpoint.url}/v1/messages"
        self._headers = {
            "x-api-key": endpoint.key,
            "anthropic-version": "2023-06-01",
            "content-type": "application/json",
        }
        self._body = {"model": endpoint.model, **settings}

    async def reply(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the next message in Anthropic's form. Raises RefusedError.

        Retries if the gateway has no capacity.
        """
        body = orjson.dumps({**self._body, "messages": messages})
        for pause_s in _PAUSES_S:
            try:
                return await self._ask(body)
            except _LaterError:
                await asyncio.sleep(pause_s)
        return await self._ask(body)

    async def _ask(self, body: bytes) -> dict[str, Any]:
        async with self._http.post(self._url, data=body, headers=self._headers) as response:
            data = await response.read()
            if response.status != 200:
                text = data.decode("utf-8", "replace")[:_MAX_ERROR_CHARS]
                raise (_LaterError if "retry-after" in response.headers else RefusedError)(
                    f"the gateway answered {response.status}: {text}"
                )
            reply: dict[str, Any] = orjson.loads(data)
            return reply
