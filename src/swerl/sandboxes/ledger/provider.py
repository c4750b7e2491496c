"""Reaching again the provider that a dead process used, from what it wrote down."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr

from swerl.core import plugins
from swerl.core.chat import Json
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SwerlError
from swerl.core.sandbox import LiveSandbox
from swerl.recipe.check import plugin_options
from swerl.recipe.schema import PluginSection
from swerl.sandboxes.ledger.entry import Head

_SECRET = re.compile(
    r"(^|[_-])(secret|token|password|passwd|passphrase|credentials?|authorization|cookie|"
    r"api[_-]?key|access[_-]?key|private[_-]?key)s?$",
    re.IGNORECASE,
)
_LOGIN_IN_URL = re.compile(r"(\w://)[^/@\s]+@")
_ANSWER_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Provider:
    """A backend and its settings."""

    backend: str
    settings: str = "{}"
    """A JSON object with sorted keys, so that equal settings compare equal."""

    @classmethod
    def of(cls, head: Head) -> Provider:
        """Return where the sandboxes of a file live."""
        return cls(head.backend, json.dumps(head.settings, sort_keys=True))

    def build(self) -> SandboxBackend:
        """Build the backend. Raises SwerlError where it is gone or takes other settings."""
        section = PluginSection.model_validate({**json.loads(self.settings), "type": self.backend})
        options = plugin_options("sandboxes", section, section="sandbox")
        module = plugins.load("sandboxes", self.backend)
        return module.build(*([] if options is None else [options]))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a provider said."""

    provider: Provider
    backend: SandboxBackend | None = None
    live: Mapping[str, LiveSandbox] | None = None
    """Its sandboxes by name; None where it cannot be reached."""
    problem: str = ""
    """Why it cannot be reached, and what to do."""


def open_settings(options: BaseModel | None) -> dict[str, Json]:
    """Return a backend's settings as JSON, without its defaults and without any secret."""
    if options is None:
        return {}
    shown: dict[str, Json] = _without_secrets(options.model_dump(exclude_defaults=True))
    return shown


async def ask(providers: Iterable[Provider]) -> list[Answer]:
    """Ask every provider at once which sandboxes exist; none of them can fail the others."""
    return list(await asyncio.gather(*map(_ask, providers)))


def installed() -> Sequence[Provider]:
    """Return every installed backend with its default settings."""
    return [Provider(name) for name in plugins.names("sandboxes")]


def explain(error: BaseException) -> str:
    """Return an error and its hint in one line."""
    said = str(error).strip() or type(error).__name__
    hint = getattr(error, "hint", "")
    return " ".join(f"{said} ({hint})".split()) if hint else " ".join(said.split())


async def _ask(provider: Provider) -> Answer:
    try:
        backend = provider.build()
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            live = {each.name: each for each in await backend.live()}
    except TimeoutError:
        return Answer(provider, problem=f"no answer within {_ANSWER_TIMEOUT_S:g} s")
    except SwerlError as error:
        return Answer(provider, problem=explain(error))
    except Exception as error:  # noqa: BLE001  a plug-in of others may raise anything
        return Answer(provider, problem=f"{type(error).__name__}: {explain(error)}")
    return Answer(provider, backend, live)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _without_secrets(each)
            for key, each in value.items()
            if not _SECRET.search(str(key)) and not isinstance(each, SecretStr | SecretBytes)
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_without_secrets(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _LOGIN_IN_URL.sub(r"\1", str(value))
