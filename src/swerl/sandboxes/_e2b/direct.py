"""One sandbox of a run's own server: whole answers in bytes (`sandboxes/e2b_server/direct.py`)."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import FROM_INSIDE, Exec
from swerl.sandboxes._e2b.errors import CutError

if TYPE_CHECKING:
    import aiohttp

    from swerl.sandboxes._e2b.sdk import Access

_OK, _NO_CONTENT, _FAILED = 200, 204, 409
_CONNECT_S = 30.0


@asynccontextmanager
async def open_direct(access: Access, sandbox_id: str) -> AsyncIterator[Direct]:
    """Yield a connection to one sandbox."""
    import aiohttp

    headers = {"X-API-Key": access.api_key, "E2b-Sandbox-Id": sandbox_id}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(access.api_url, headers=headers, timeout=timeout) as session:
        yield Direct(session, sandbox_id)


class Direct:
    """Runs commands, reads and writes files. Raises what a Sandbox does, and CutError."""

    def __init__(self, session: aiohttp.ClientSession, sandbox_id: str) -> None:
        self._session = session
        self._id = sandbox_id

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str] | None,
        user: str | None,
        timeout_s: float | None,
        stdin: bytes | None,
    ) -> Exec:
        """Run a command to its end. It may have run where the connection broke."""
        asked = {
            "argv": list(argv),
            "cwd": cwd,
            "env": dict(env or {}),
            "user": user,
            "timeout_s": timeout_s,
            "stdin": None if stdin is None else base64.b64encode(stdin).decode(),
        }
        told = json.loads(await self._ask("POST", "/swerl/run", data=json.dumps(asked).encode()))
        for name in ("stdout", "stderr"):
            told[name] = base64.b64decode(told[name])
        return Exec(**told)

    async def read(self, path: str) -> bytes:
        """Return a file. Raises FileNotFoundError."""
        return await self._ask("GET", "/swerl/file", params={"path": path})

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making its parents."""
        await self._ask("PUT", "/swerl/file", params={"path": path}, data=data)

    async def _ask(self, method: str, path: str, **more: Any) -> bytes:
        import aiohttp

        try:
            async with self._session.request(method, path, **more) as reply:
                body = await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            raise CutError(
                f"sandbox {self._id}: the connection to its server broke: {error}",
                hint="the server's log says whether it died",
            ) from error
        if reply.status not in (_OK, _NO_CONTENT):
            raise self._error(reply.status, body)
        return body

    def _error(self, status: int, body: bytes) -> Exception:
        if status != _FAILED:  # the server does not know the sandbox, or failed
            said = body.decode(errors="replace")[:300]
            message = f"sandbox {self._id} is gone: {said}"
            return SandboxLostError(
                message, hint="open a fresh sandbox", from_inside=FROM_INSIDE in said
            )
        told = json.loads(body)
        if "missing" in told:
            return FileNotFoundError(told["missing"])
        kind = SandboxLostError if told["lost"] else SandboxError
        return kind(told["message"], hint=told["hint"], from_inside=told["from_inside"])
