"""A model with prepared replies, and runs of the built-in agent in a sandbox without walls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from swerl.core.contracts import Endpoint, Exit
from swerl.core.errors import SandboxLostError
from swerl.core.task import GradingSpec, Task
from swerl.harnesses.builtin import Options, build
from tests.unit.grading._folder_sandbox import FolderSandbox


class LostSandbox(FolderSandbox):
    """A Sandbox that died."""

    async def read(self, path: str) -> bytes:
        raise SandboxLostError("the sandbox is gone")


@dataclass
class Model:
    """A server that gives prepared replies and keeps what it was asked."""

    replies: list[list[dict[str, Any]]]
    stop_reason: str = "end_turn"
    delay_s: float = 0.0
    status: int = 200
    busy: int = 0
    """Requests to put off first."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)

    async def answer(self, request: web.Request) -> web.Response:
        if self.busy:
            self.busy -= 1
            return web.json_response({}, status=529, headers={"retry-after": "1"})
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.connections.add(request.transport)
        await asyncio.sleep(self.delay_s)
        content = self.replies[len(self.bodies) - 1] if self.status == 200 else []
        body = {"content": content, "stop_reason": self.stop_reason}
        return web.json_response(body, status=self.status)

    def results(self) -> list[str]:
        """Every tool result that the agent sent back, in order."""
        blocks = self.bodies[-1]["messages"][2::2]
        return [block["content"] for message in blocks for block in message["content"]]


_NUMBERS = itertools.count()


def use(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"call_{next(_NUMBERS)}", "name": name, "input": arguments}


def edit(command: str, **arguments: Any) -> dict[str, Any]:
    return use("str_replace_editor", command=command, **arguments)


@asynccontextmanager
async def serve(model: Model) -> AsyncIterator[Endpoint]:
    app = web.Application()
    app.router.add_post("/v1/messages", model.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield Endpoint(f"http://{host}:{port}", "key-1", "policy")
    finally:
        await runner.cleanup()


def task_at(folder: Path) -> Task:
    return Task("t", "r", "host", str(folder), "Fix it.", GradingSpec("command"))


async def run(
    model: Model,
    folder: Path,
    *,
    sandbox: FolderSandbox | None = None,
    budget_s: float = 20,
    **options: Any,
) -> Exit:
    """Let the agent work with a model on a folder's task."""
    async with serve(model) as endpoint:
        agent = build(Options(**options))
        return await agent.run(sandbox or FolderSandbox(), task_at(folder), endpoint, budget_s)


async def calls(folder: Path, *uses: dict[str, Any], **options: Any) -> list[str]:
    """Let a model make these calls one a turn; return what it read."""
    model = Model([[one] for one in uses] + [[{"type": "text", "text": "Done."}]])
    done = await run(model, folder, **options)
    assert done.code == 0, done.log
    return model.results()
