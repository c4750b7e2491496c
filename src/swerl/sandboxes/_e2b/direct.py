"""Requests to a run's own server, which answers in one piece (`sandboxes/e2b_server`).

Other E2B services have no such endpoints; their sandboxes use streams (`runner.py`).
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from swerl.core.errors import SandboxError, SandboxFileError, SandboxFolderError, SandboxLostError
from swerl.core.sandbox import FROM_INSIDE, Exec
from swerl.sandboxes._e2b.sdk import CutError

if TYPE_CHECKING:
    import aiohttp

    from swerl.sandboxes._e2b.sdk import E2BAccess

_OK, _NO_CONTENT, _FAILED = 200, 204, 409
_CONNECT_S = 30.0
_FILE_S = 600.0
"""Seconds for one file; a server that is stopped keeps its connections open."""


@asynccontextmanager
async def open_direct(access: E2BAccess, sandbox_id: str, token: str) -> AsyncIterator[Direct]:
    """Open the connection; `token` is the sandbox's own, which opens no other."""
    import aiohttp

    headers = {"X-Access-Token": token, "E2b-Sandbox-Id": sandbox_id}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(access.api_url, headers=headers, timeout=timeout) as session:
        yield Direct(session, sandbox_id)


class Direct:
    """Runs commands, reads and writes files. Raises the errors of a Sandbox, and CutError."""

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
        """Run a command to its end. After CutError it may have run."""
        request = {
            "argv": list(argv),
            "cwd": cwd,
            "env": dict(env or {}),
            "user": user,
            "timeout_s": timeout_s,
            "stdin": None if stdin is None else base64.b64encode(stdin).decode(),
        }
        data = json.dumps(request).encode()
        result = json.loads(await self._request("POST", "/swerl/run", data=data))
        for name in ("stdout", "stderr"):
            result[name] = base64.b64decode(result[name])
        return Exec(**result)

    async def read(self, path: str) -> bytes:
        return await self._request("GET", "/swerl/file", _FILE_S, params={"path": path})

    async def write(self, path: str, data: bytes) -> None:
        await self._request("PUT", "/swerl/file", _FILE_S, params={"path": path}, data=data)

    async def _request(
        self, method: str, path: str, within_s: float | None = None, **more: Any
    ) -> bytes:
        import aiohttp

        try:
            async with (
                asyncio.timeout(within_s),
                self._session.request(method, path, **more) as reply,
            ):
                body = await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            raise CutError(
                f"sandbox {self._id}: the connection to its server broke: {error}",
                hint="see the server's log",
            ) from error
        if reply.status not in (_OK, _NO_CONTENT):
            raise self._error(reply.status, body)
        return body

    def _error(self, status: int, body: bytes) -> Exception:
        if status != _FAILED:  # the server has no such sandbox, or failed
            detail = body.decode(errors="replace")[:300]
            message = f"sandbox {self._id} is gone: {detail}"
            return SandboxLostError(
                message, hint="open a new sandbox", from_inside=FROM_INSIDE in detail
            )
        failure = json.loads(body)
        if "missing" in failure:
            return FileNotFoundError(failure["missing"])
        if "is_folder" in failure:
            bad = SandboxFolderError if failure["is_folder"] else SandboxFileError
            return bad(failure["message"], reason=failure["reason"], hint=failure["hint"])
        kind = SandboxLostError if failure["lost"] else SandboxError
        return kind(failure["message"], hint=failure["hint"], from_inside=failure["from_inside"])
