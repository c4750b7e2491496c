"""Requests to one registry: logins of Docker's config, authorization, errors and retries.

A request is one attempt, plus one answer to an authentication challenge. An error that may pass is
an ImageError marked retryable; `patiently` is the only place that retries.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from swerl.core.errors import ImageError
from swerl.core.image_reference import DOCKER_HUB, base_url
from swerl.core.secrets import secret

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=120)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Patience:
    """The retry policy for errors that may pass."""

    tries: int = 5
    first_wait_s: float = 0.5
    """Wait before the second attempt; doubles each time, plus up to half of it at random."""
    max_wait_s: float = 900.0
    """Longest wait that a registry may request. Docker Hub counts pulls over six hours, so a longer
    wait is not worth it."""


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """How a command works with registries."""

    workers: int = 4
    """Layers or images at once: enough to fill a gigabit line, few enough for registries."""
    rewrites: Mapping[str, str] = field(default_factory=dict)
    """Start of an image name -> its replacement, such as a nearby mirror."""
    docker_config: Path = field(default_factory=lambda: default_config())
    patience: Patience = field(default_factory=Patience)


class RegistryBusyError(ImageError):
    """The registry requests a wait of `wait_s` seconds; None if it gives no time."""

    retryable = True

    def __init__(self, message: str, *, hint: str, wait_s: float | None) -> None:
        super().__init__(message, hint=hint)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request. `path` is below the API's root, or a whole URL from the registry."""

    method: str
    path: str
    scope: str = ""
    """Requests with the same scope share an authorization. A repository alone is read with a token
    for the challenge's scope: `repository:NAME:pull,push` asks for this one at once."""
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes | None = None


@asynccontextmanager
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open the connections that registries share; proxies are read from the environment."""
    # The addresses of signed redirects must stay as they are, byte for byte.
    options: dict[str, Any] = {"trust_env": True, "requote_redirect_url": False}
    async with aiohttp.ClientSession(timeout=_TIMEOUT, **options) as session:
        yield session


def own_login(site: URL, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a request that sends `headers` to this site alone."""

    async def send(request: Any, handler: Any) -> Any:
        request.headers.pop("Authorization", None)  # aiohttp reads logins of ~/.netrc
        if request.url.host == site.host and request.url.scheme in {"https", site.scheme}:
            request.headers.update(headers)
        return await handler(request)

    return {"middlewares": (send,)}


async def patiently(call: Callable[[], Awaitable[_T]], patience: Patience) -> _T:
    """Return the result of `call`; retry after errors marked retryable."""
    for attempt in range(1, patience.tries + 1):
        try:
            return await call()
        except ImageError as error:
            wait_s = patience.first_wait_s * 2 ** (attempt - 1) * (1 + random.random() / 2)
            if isinstance(error, RegistryBusyError) and error.wait_s is not None:
                wait_s = error.wait_s
            if not error.retryable or attempt == patience.tries or wait_s > patience.max_wait_s:
                raise
            await asyncio.sleep(wait_s)
    raise ImageError("no attempt was made", hint="set patience.tries to 1 or more")


class RegistryConnection:
    def __init__(self, host: str, http: aiohttp.ClientSession, docker_config: Path) -> None:
        self.host = host
        self._http = http
        self._auth = Auth(host, http, docker_config)

    @asynccontextmanager
    async def send(self, ask: ApiCall) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the response, whatever its status. Raises ImageError."""
        try:
            response = await self._once(ask)
            if response.status == 401:
                response.release()
                response = await self._challenged(ask, response)
            async with response:
                yield response
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise self._lost(ask, error) from error

    async def _once(self, ask: ApiCall) -> aiohttp.ClientResponse:
        url = ask.path if "://" in ask.path else f"{base_url(self.host)}/v2/{ask.path}"
        login = own_login(URL(base_url(self.host)), self._auth.headers(ask.scope))
        return await self._http.request(
            ask.method, URL(url, encoded=True), headers=ask.headers, data=ask.data, **login
        )

    async def _challenged(
        self, ask: ApiCall, response: aiohttp.ClientResponse
    ) -> aiohttp.ClientResponse:
        self._auth.forget(ask.scope)
        challenges = read_challenges(response.headers.getall("WWW-Authenticate", []))
        if await self._auth.answer(ask.scope, challenges):
            return await self._once(ask)
        return response

    def _lost(self, ask: ApiCall, error: Exception) -> ImageError:
        if isinstance(error, aiohttp.ClientPayloadError):
            message = f"registry {self.host} closed the connection within {ask.path}"
            return ImageError(message, hint="run the same command again", retryable=True)
        message = f"registry {self.host} does not answer: {_reason(error)}"
        hint = "check the name and the network, then run the same command again"
        is_unknown = isinstance(error, aiohttp.ClientConnectorDNSError)
        return ImageError(message, hint=hint, retryable=not is_unknown)


def expect(response: aiohttp.ClientResponse, statuses: set[int], *, host: str, what: str) -> None:
    """Raise the ImageError of an HTTP status unless the status is one of `statuses`."""
    status = response.status
    if status in statuses:
        return
    if status == 404:
        hint = "check the name and the tag; private images need `docker login`"
        raise ImageError(f"registry {host} has no {what}", hint=hint)
    if status in {401, 403}:
        raise ImageError(
            f"registry {host} refuses access to {what} ({status})",
            hint=f"run `docker login {host}`, or check the name",
        )
    if status == 429:
        message = f"registry {host} limits the rate of requests, here for {what}"
        hint = "log in for a higher limit, or run the same command later: finished images are kept"
        raise RegistryBusyError(
            message, hint=hint, wait_s=_seconds(response.headers.get("Retry-After"))
        )
    raise ImageError(
        f"registry {host} answered {status} for {what}",
        hint="run the same command again",
        retryable=status >= 500,
    )


def _reason(error: Exception) -> str:
    """Return the cause in plain words, without the HTTP library's internals."""
    number = error.os_error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    return os.strerror(number) if number and number > 0 else str(error) or type(error).__name__


def _seconds(retry_after: str | None) -> float | None:
    """Read a `Retry-After` header of seconds; a date is ignored."""
    return float(retry_after) if retry_after and retry_after.isdecimal() else None


_CHALLENGE = re.compile(
    r'(?P<name>[\w-]+)\s*=\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^\s,"]+))'
    r"|(?P<scheme>[\w-]+)"
)


def read_challenges(headers: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read `WWW-Authenticate` headers: scheme -> its parameters (RFC 9110, section 11.6.1)."""
    challenges: dict[str, dict[str, str]] = {}
    for header in headers:
        parameters: dict[str, str] = {}
        for match in _CHALLENGE.finditer(header):
            if scheme := match["scheme"]:
                parameters = challenges.setdefault(scheme.lower(), {})
            else:
                quoted = match["quoted"]
                value = match["plain"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
                parameters[match["name"].lower()] = value
    return challenges


class Auth:
    """Answers a registry's challenges and keeps the authorization of each scope."""

    def __init__(self, registry: str, http: aiohttp.ClientSession, config: Path) -> None:
        self._registry = registry
        self._http = http
        self._config = config
        self._headers: dict[str, str] = {}

    def headers(self, scope: str) -> dict[str, str]:
        """Return the authorization of a scope; empty before the first challenge."""
        value = self._headers.get(scope)
        return {"Authorization": value} if value else {}

    def forget(self, scope: str) -> None:
        """Drop an authorization that the registry rejected: tokens live for minutes."""
        self._headers.pop(scope, None)

    async def answer(self, scope: str, challenges: Mapping[str, Mapping[str, str]]) -> bool:
        """Answer a registry's challenges; return whether there is a new authorization to try."""
        login = await find_login(self._registry.removeprefix("http://"), self._config)
        bearer = dict(challenges.get("bearer", {}))
        if ":" in scope:  # the challenge to a first HEAD names only `pull`
            bearer["scope"] = scope
        if "realm" in bearer:
            self._headers[scope] = f"Bearer {await self._token(bearer, login)}"
            return True
        if "basic" in challenges and login:
            self._headers[scope] = _basic(login)
            return True
        return False

    async def _token(self, parameters: Mapping[str, str], login: Login | None) -> str:
        query = [("service", parameters["service"])] if "service" in parameters else []
        scopes, realm = parameters.get("scope", ""), parameters["realm"]
        request: dict[str, Any] = {"params": [*query, *(("scope", s) for s in scopes.split())]}
        if login and login.identity_token:
            form = {"grant_type": "refresh_token", "client_id": "swerl", "scope": scopes}
            request = {"data": {**form, **dict(query), "refresh_token": login.identity_token}}
        elif login:
            request["headers"] = {"Authorization": _basic(login)}
        if (
            login
            and realm.startswith("http://")
            and not base_url(self._registry).startswith("http://")
        ):
            raise ImageError(
                f"registry {self._registry} requests the login without encryption, at {realm}",
                hint="a proxy in between may be hostile; check the registry's name",
            )
        try:
            method = "POST" if "data" in request else "GET"
            request |= own_login(URL(realm), request.pop("headers", {}))
            async with self._http.request(method, realm, **request) as response:
                if response.status != 200:
                    raise self._refused(realm, response)
                return _read_token(await response.read(), realm)
        except ValueError as error:  # no URL
            raise ImageError(
                f"registry {self._registry} names no address for tokens: {realm!r}",
                hint="check the registry's name; a proxy may be in between",
            ) from error

    def _refused(self, realm: str, response: aiohttp.ClientResponse) -> ImageError:
        message = f"registry {self._registry} gave no token: {realm} answered {response.status}"
        hint = f"log in with `docker login {self._registry}`, or correct the login"
        if response.status == 429:
            wait_s = _seconds(response.headers.get("Retry-After"))
            return RegistryBusyError(message, hint=hint, wait_s=wait_s)
        return ImageError(message, hint=hint, retryable=response.status >= 500)


def _read_token(body: bytes, realm: str) -> str:
    try:
        answer = json.loads(body)
        token = str(answer.get("token") or answer["access_token"])
        if not token.isprintable():
            raise ValueError
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ImageError(
            f"{realm} answered without a token", hint="a proxy or a login page may be in between"
        ) from error
    return token


def _basic(login: Login) -> str:
    pair = f"{login.user}:{login.password}".encode()
    return "Basic " + base64.b64encode(pair).decode()


_HELPER_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)
    """A token in place of the password, which is exchanged for others (OAuth 2)."""


def default_config() -> Path:
    """Return the path of Docker's config file; DOCKER_CONFIG names its folder, as for Docker."""
    return Path(secret("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"


async def find_login(registry: str, config: Path) -> Login | None:
    """Return the login for a registry, or None if the config has none.

    Raises ImageError if the config cannot be read or its helper program fails.
    """
    settings = _read(config)
    helpers = {_host(key): name for key, name in settings.get("credHelpers", {}).items()}
    if helper := helpers.get(registry) or settings.get("credsStore"):
        key = "https://index.docker.io/v1/" if registry == DOCKER_HUB else registry
        login = await _ask_helper(helper, key)
        if login:
            return login
    for key, entry in settings.get("auths", {}).items():
        if _host(key) != registry:
            continue
        login = _decode(entry["auth"], config, key) if entry.get("auth") else None
        if not login and entry.get("username"):  # as tools write it, and Docker reads it
            login = Login(str(entry["username"]), str(entry.get("password", "")))
        if token := entry.get("identitytoken"):
            return Login(login.user if login else "", "", str(token))
        if login:
            return login
    return None


def logged_in(config: Path) -> list[str]:
    """Return the registries that the config names, without calls to helper programs."""
    try:
        settings = _read(config)
    except ImageError:
        return []
    keys = [*settings.get("auths", {}), *settings.get("credHelpers", {})]
    return sorted({_host(key) for key in keys})


def _read(config: Path) -> Mapping[str, Any]:
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ImageError(
            f"cannot read Docker's config {config}: {error}",
            hint="write it again with `docker login`",
        ) from error
    if not isinstance(settings, dict):
        return {}
    return {key: value for key, value in settings.items() if value}  # null means absent


async def _ask_helper(name: str, key: str) -> Login | None:
    program = f"docker-credential-{name}"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "get",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(_HELPER_TIMEOUT_S):
                answer, _ = await process.communicate(key.encode())
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode or not (entry := json.loads(answer)) or not entry["Secret"]:
            return None
        if entry["Username"] == "<token>":
            return Login("", "", entry["Secret"])
        return Login(entry["Username"], entry["Secret"])
    except (OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise ImageError(
            f"Docker's config names the login helper {program}, which returns no login",
            hint="install it, or set DOCKER_CONFIG to a folder with another config",
        ) from error


def _host(key: str) -> str:
    host = key.removeprefix("https://").removeprefix("http://").partition("/")[0]
    return DOCKER_HUB if host in {"index.docker.io", "registry-1.docker.io"} else host


def _decode(auth: str, config: Path, key: str) -> Login:
    try:
        user, _, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ImageError(
            f"the login for {key} in {config} is damaged",
            hint=f"write it again with `docker login {key}`",
        ) from error
    return Login(user, password.rstrip("\0"))
