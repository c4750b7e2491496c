"""Weight deltas over HTTP: to engines on machines that share no disk with the trainer.

`swerl train receive` runs a Receiver on such a machine. Before each load the controller sends it
the deltas that it lacks and asks it to rebuild the version; the engine beside it then loads that
folder. A broken connection continues at the last byte that arrived, a receiver that was away gets
all that it missed. Both sides hold a key and sign with it: a changed request is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from swerl.core.errors import EngineError, EngineLostError, InputError, SwerlError
from swerl.core.files import disk_errors
from swerl.core.learning import WeightRef
from swerl.core.secrets import secret
from swerl.engines._delta import NAME, SUFFIX, chain, fetch

KEY = "SWERL_WEIGHTS_KEY"
"""Environment variable of the key, on both machines."""
_SHORTEST_KEY = 16
_PIECE = 1 << 24
"""Bytes of one request: small enough to sign and to send again, large for few round trips."""
_ROUNDS = 4
"""Times to ask for a version: for what is missing, after sending it, and after a damaged delta."""
AWAY_S = 60.0
"""Seconds that a receiver may be away, as during its restart, before its engine is given up."""
_CONNECT_S = 10.0
_SILENT_S = 60.0
"""Seconds without a byte after which a connection is taken for broken."""


def weights_key() -> str:
    """Return the key from the environment. Raises InputError if there is none, or a short one."""
    key = secret(KEY) or ""
    if len(key) < _SHORTEST_KEY:
        raise InputError(
            f"{KEY} is {'too short' if key else 'not set'}: weights over HTTP are signed with it",
            hint=f"export {KEY}=$(openssl rand -hex 20), the same on every machine",
        )
    return key


def _signature(key: str, method: str, target: str, body: bytes) -> str:
    """Return the HMAC-SHA256 of a request; `target` is its path with the query."""
    signed = hmac.new(key.encode(), f"{method} {target}\n".encode(), hashlib.sha256)
    signed.update(body)
    return signed.hexdigest()


class Receiver:
    """Takes deltas and rebuilds versions in a folder of this machine."""

    def __init__(self, folder: Path, key: str) -> None:
        self._local = folder.resolve()
        self._key = key
        self._lock = asyncio.Lock()
        """Held while files change: two engines of a machine have one receiver."""

    @asynccontextmanager
    async def listen(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve until the block ends; yield the port. Raises InputError if it is taken."""
        with disk_errors(self._local):
            self._local.mkdir(parents=True, exist_ok=True)
        app = web.Application(client_max_size=_PIECE + 1)
        app.add_routes([
            web.put("/deltas/{name}", self._answering(self._put)),
            web.post("/rebuild", self._answering(self._rebuild)),
        ])  # fmt: skip
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                message = f"cannot listen on {host}:{port}: {error.strerror}"
                raise InputError(message, hint="choose another --host or --port") from error
            yield int(runner.addresses[0][1])
        finally:
            await runner.cleanup()

    def _answering(
        self, answer: Callable[[web.Request, bytes], dict[str, Any]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return a handler that checks the signature and calls `answer` in a thread."""

        async def handle(request: web.Request) -> web.Response:
            body = await request.read()
            given, target = request.headers.get("X-Signature", ""), request.path_qs
            made = await asyncio.to_thread(_signature, self._key, request.method, target, body)
            if not hmac.compare_digest(given.encode(errors="replace"), made.encode()):
                why = "the receiver has another key, or the request was changed on its way"
                return _refusal(401, why, f"set {KEY} alike on both machines")
            try:
                async with self._lock:
                    return web.json_response(await asyncio.to_thread(answer, request, body))
            except SwerlError as error:
                return _refusal(507, str(error), error.hint)
            except (ValueError, KeyError, TypeError) as error:
                return _refusal(400, f"not a request for weights: {error!r}", "update swerl")

        return handle

    def _put(self, request: web.Request, body: bytes) -> dict[str, Any]:
        """Append a piece that begins at byte `at` of `of`; return the bytes that are here."""
        name = _checked(request.match_info["name"])
        at, of = int(request.query["at"]), int(request.query["of"])
        whole = self._local / f"{name}{SUFFIX}"
        if whole.exists():
            return {"size": of}
        part = whole.with_suffix(".part")
        with disk_errors(part):
            self._local.mkdir(parents=True, exist_ok=True)
            size = part.stat().st_size if at and part.exists() else 0
            # A piece that comes twice, late or out of turn is not the next one.
            if at == size:
                with part.open("ab" if at else "wb") as file:
                    size += file.write(body)
            if size == of:
                part.replace(whole)
        return {"size": size}

    def _rebuild(self, request: web.Request, body: bytes) -> dict[str, Any]:
        """Rebuild the last one of `names`, each based on the one before; return its folder.

        If deltas are missing or damaged, return them with the bytes that are here.
        """
        ask = json.loads(body)
        names = [_checked(name) for name in ask["names"]]
        path, why = self._local / names[-1], ""
        if not self._missing(names):
            delta = self._local / f"{names[-1]}{SUFFIX}"
            try:
                fetch(WeightRef(path, ask["version"], ask["checksum"], delta))
            except EngineError as error:
                why = str(error)
            # Rebuilt, they are no longer needed; damaged or of another start, they come again.
            for old in self._local.iterdir():
                if NAME.fullmatch(old.stem) and old.suffix in (SUFFIX, ".part"):
                    old.unlink()
        if path.is_dir():
            return {"path": str(path)}
        return {"missing": self._missing(names), "why": why}

    def _missing(self, names: list[str]) -> dict[str, int]:
        """Return the deltas that are not here, oldest first, with the bytes that are."""
        held = [place for place, name in enumerate(names) if (self._local / name).is_dir()]
        missing = {}
        for name in names[held[-1] + 1 if held else 0 :]:
            if not (whole := self._local / f"{name}{SUFFIX}").exists():
                part = whole.with_suffix(".part")
                missing[name] = part.stat().st_size if part.exists() else 0
        return missing


def _checked(name: str) -> str:
    """Return the name of a version. Raises ValueError on one that could leave the folder."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no version")
    return name


def _refusal(status: int, error: str, hint: str) -> web.Response:
    return web.json_response({"error": error, "hint": hint}, status=status)


@dataclass(frozen=True, slots=True)
class _Link:
    """Signed requests to one receiver."""

    url: str
    key: str
    away_s: float
    client: aiohttp.ClientSession

    async def ask(
        self, method: str, target: str, body: bytes, *, silent_s: float | None = None
    ) -> dict[str, Any]:
        """Send a request, again while the receiver is away. Raises EngineError."""
        signature = await asyncio.to_thread(_signature, self.key, method, target, body)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silent_s)
        clock, wait_s = asyncio.get_running_loop().time, 0.1
        began = clock()
        while True:
            try:
                async with self.client.request(
                    *(method, self.url + target),
                    data=body,
                    headers={"X-Signature": signature},
                    timeout=limits,
                ) as response:
                    answer: dict[str, Any] = await response.json(content_type=None)
                if response.status == 200:
                    return answer
                raise EngineError(f"{self.url}: {answer['error']}", hint=answer["hint"])
            except (aiohttp.ClientError, TimeoutError) as error:
                if clock() - began >= self.away_s:
                    raise _gone(self.url, repr(error)) from error
            except (ValueError, KeyError, TypeError) as error:
                raise EngineError(
                    f"no `swerl train receive` answers at {self.url}",
                    hint="start it on the engine's machine; engine.receiver_port is its port",
                ) from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)

    async def send(self, delta: Path, size: int) -> None:
        """Send a delta from byte `size` on."""
        of, name = delta.stat().st_size, delta.name.removesuffix(SUFFIX)
        # Too many bytes there are those of an older delta of that name.
        size = size if size < of else 0
        with delta.open("rb") as file:
            while size < of:
                file.seek(size)
                piece = await asyncio.to_thread(file.read, _PIECE)
                target = f"/deltas/{name}?at={size}&of={of}"
                size = int((await self.ask("PUT", target, piece, silent_s=_SILENT_S))["size"])


def _gone(url: str, why: str) -> EngineLostError:
    hint = "is `swerl train receive` running there? The engine is used again once it answers"
    return EngineLostError(f"the receiver of weights at {url} is gone: {why}", hint=hint)


async def send(
    ref: WeightRef, url: str, *, key: str, timeout_s: float, away_s: float = AWAY_S
) -> Path:
    """Bring a version to the receiver at `url`; return its folder on that machine.

    Raises EngineLostError if the receiver is away for longer than `away_s` or not done in
    `timeout_s`, EngineError if it refuses.
    """
    if ref.delta is None:
        raise EngineError(
            f"weights {ref.version!r} have no delta, and the machine of {url} shares no disk",
            hint="set cluster.weight_delta to a folder",
        )
    names, why = await asyncio.to_thread(chain, ref.delta), ""
    asked = {"names": names, "version": ref.version, "checksum": ref.checksum}
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as client:
            link = _Link(url, key, away_s, client)
            for _ in range(_ROUNDS):
                answer = await link.ask("POST", "/rebuild", json.dumps(asked).encode())
                if "path" in answer:
                    return Path(answer["path"])
                why = answer["why"] or why
                for name, size in answer["missing"].items():
                    await link.send(ref.delta.with_name(f"{name}{SUFFIX}"), size)
    except TimeoutError as error:
        raise _gone(url, f"it did not take weights within {timeout_s:g} s") from error
    raise EngineError(
        f"{url} could not rebuild weights {ref.version!r}: {why}",
        hint="a delta in the run folder changed; a new start of the run sends whole weights",
    )
