"""Authorization headers for one registry: basic logins and bearer tokens, kept per scope."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import aiohttp

from swerl.core.errors import ImageError
from swerl.images._login import Login, find_login

_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class Auth:
    """Answers a registry's challenges and remembers the answers."""

    def __init__(self, registry: str, http: aiohttp.ClientSession, config: Path) -> None:
        self._registry = registry
        self._http = http
        self._config = config
        self._headers: dict[str, str] = {}

    def headers(self, scope: str) -> dict[str, str]:
        """Return what is known to open this scope; empty before the first challenge."""
        value = self._headers.get(scope)
        return {"Authorization": value} if value else {}

    def forget(self, scope: str) -> None:
        """Drop what the registry stopped taking: tokens live for minutes."""
        self._headers.pop(scope, None)

    async def answer(self, scope: str, challenge: str) -> bool:
        """Answer a `WWW-Authenticate` header; return whether there is something new to try."""
        login = await find_login(self._registry, self._config)
        kind = challenge.partition(" ")[0].lower()
        parameters = dict(_PARAMETER.findall(challenge))
        if kind == "bearer" and "realm" in parameters:
            self._headers[scope] = f"Bearer {await self._token(parameters, login)}"
            return True
        if kind == "basic" and login:
            self._headers[scope] = _basic(login)
            return True
        return False

    async def _token(self, parameters: dict[str, str], login: Login | None) -> str:
        query = [("service", parameters["service"])] if "service" in parameters else []
        query += [("scope", scope) for scope in parameters.get("scope", "").split()]
        headers = {"Authorization": _basic(login)} if login else {}
        realm = parameters["realm"]
        async with self._http.get(realm, params=query, headers=headers) as response:
            if response.status != 200:
                message = (
                    f"registry {self._registry} gives no token: {realm} says {response.status}"
                )
                busy = response.status == 429 or response.status >= 500
                hint = f"log in with `docker login {self._registry}`, or correct the login"
                raise ImageError(message, hint=hint, retryable=busy)
            return _read_token(await response.read(), realm)


def _read_token(body: bytes, realm: str) -> str:
    try:
        answer = json.loads(body)
        return str(answer.get("token") or answer["access_token"])
    except (ValueError, KeyError, AttributeError) as error:
        raise ImageError(
            f"{realm} answers without a token", hint="a proxy or a login page may be in between"
        ) from error


def _basic(login: Login) -> str:
    pair = f"{login.user}:{login.password}".encode()
    return "Basic " + base64.b64encode(pair).decode()
