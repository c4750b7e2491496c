"""The way to a server of swerl's own (`sandboxes/e2b_server`).

It keeps snapshots by name, and a run's own server answers some requests in one piece. Other E2B
services have no such endpoints; their sandboxes use streams (`runner.py`). It may also listen where
the SDK cannot connect: on a Unix socket, or with a certificate that no authority signed. A tunnel
carries the SDK's connections there.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from swerl.core.errors import (
    SandboxError,
    SandboxFileError,
    SandboxFolderError,
    SandboxLostError,
    SandboxUnavailableError,
)
from swerl.core.sandbox import FROM_INSIDE, Exec
from swerl.sandboxes._e2b.sdk import CutError

if TYPE_CHECKING:
    import aiohttp

    from swerl.sandboxes._e2b.sdk import E2BAccess

ANSWERS = "Swerl-Answer"
"""Header of an answer to `ask`: some servers answer 200 on any path."""
_OK, _NO_CONTENT, _FAILED = 200, 204, 409
_BUSY = {502, 503, 504}
"""Statuses of a server, or of a proxy before it, that may answer otherwise later."""
_CONNECT_S = 30.0
_FILE_S = 600.0
"""Seconds for one file; a server that is stopped keeps its connections open."""
_PIECE_BYTES = 1 << 16


@asynccontextmanager
async def open_direct(access: E2BAccess, sandbox_id: str, token: str) -> AsyncIterator[Direct]:
    """Open the connection; `token` is the sandbox's own, which opens no other."""
    import aiohttp

    headers = {"X-Access-Token": token, "E2b-Sandbox-Id": sandbox_id}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(access.url, headers=headers, timeout=timeout) as session:
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


async def ask(access: E2BAccess, method: str, path: str, **more: Any) -> str:
    """Return a server's answer about images and snapshots.

    Raises CutError if it does not answer, and SandboxError if it refuses, as other servers do.
    """
    import aiohttp

    headers = {"X-API-Key": access.api_key}
    timeout = aiohttp.ClientTimeout(access.request_timeout_s)
    try:
        async with (
            access.opened(),
            aiohttp.ClientSession(access.url, headers=headers, timeout=timeout) as session,
            session.request(method, path, **more) as reply,
        ):
            body = await reply.text(errors="replace")
    except (aiohttp.ClientError, OSError) as error:
        raise CutError(f"{path}: no answer: {error}", hint="see the server's log") from error
    if reply.status == _OK and reply.headers.get(ANSWERS):
        return body
    kind = CutError if reply.status in _BUSY else SandboxError
    raise kind(f"{path}: {reply.status} {body[:300]}", hint="see the server's log")


class Tunnel:
    """Carries connections of this process from a loopback port to a server.

    It listens while somebody uses it. Who else connects to the port has no key.
    """

    def __init__(self, address: str, fingerprint: str) -> None:
        """Lead to `unix:PATH`, or to an https URL whose certificate has this SHA-256."""
        self.url = ""
        """Where it listens."""
        self._address = address
        self._fingerprint = fingerprint.removeprefix("sha256:").replace(":", "").lower()
        self._num_users = 0
        self._listener: asyncio.Server | None = None
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Use it. Raises SandboxUnavailableError if the server has another certificate."""
        async with self._opening:
            if self._listener is None:
                _, probe = await self._connect()
                probe.close()
                self._listener = await asyncio.start_server(self._carry, "127.0.0.1", 0)
                self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
            self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users and self._listener:
                self._listener.close()
                self._listener = None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        kind, _, path = self._address.partition(":")
        try:
            async with asyncio.timeout(_CONNECT_S):
                if kind == "unix":
                    return await asyncio.open_unix_connection(path)
                parts = urlsplit(self._address)
                # The fingerprint replaces authorities and names.
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                reader, writer = await asyncio.open_connection(
                    parts.hostname, parts.port or 443, ssl=context
                )
        except (OSError, TimeoutError) as error:
            message = f"cannot connect to the sandbox server at {self._address}: {error}"
            raise CutError(message, hint="does it run? is the address right?") from error
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        found = hashlib.sha256(certificate).hexdigest()
        if found != self._fingerprint:
            writer.close()
            raise SandboxUnavailableError(
                f"the certificate of {self._address} is another one: sha256 {found}",
                hint="`swerl sandbox serve` prints the fingerprint for sandbox.fingerprint; if it "
                "is not this one, somebody answers in its place",
            )
        return reader, writer

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await self._connect()
        except SandboxError:  # the client sees a broken connection
            writer.close()
            return
        try:
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
        finally:
            writer.close()
            there_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes to their end, and then end the other side: neither needs half of a connection."""
    with suppress(OSError):
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
