"""Registry logins as `docker login` stores them: in Docker's config file or a helper program."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swerl.core.errors import ImageError
from swerl.core.image_reference import DOCKER_HUB

_HELPER_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    password: str = field(repr=False)


def default_config() -> Path:
    """Return the path of Docker's config file."""
    return Path.home() / ".docker" / "config.json"


async def find_login(registry: str, config: Path) -> Login | None:
    """Return the login for a registry, or None if the config has none.

    Raises ImageError if the config cannot be read or its helper program fails.
    """
    settings = _read(config)
    helper = settings.get("credHelpers", {}).get(registry) or settings.get("credsStore")
    if helper:
        found = await _ask_helper(helper, _helper_key(registry))
        if found:
            return found
    for key, entry in settings.get("auths", {}).items():
        if _host(key) == registry and entry.get("auth"):
            return _decode(entry["auth"], config, key)
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
        if process.returncode:
            return None
        entry = json.loads(answer)
        return Login(entry["Username"], entry["Secret"])
    except (OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise ImageError(
            f"Docker's config names the login helper {program}, which returns no login",
            hint="install it, or name another --docker-config",
        ) from error


def _helper_key(registry: str) -> str:
    return "https://index.docker.io/v1/" if registry == DOCKER_HUB else registry


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
