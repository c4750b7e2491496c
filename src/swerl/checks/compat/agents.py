"""The agents of the lab: which releases, and the settings by which a case comes about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from swerl.checks.compat.cases import Case
from swerl.core import plugins
from swerl.core.contracts import Harness
from swerl.core.errors import InputError


@dataclass(frozen=True, slots=True)
class _Traits:
    """What the lab knows of an agent."""

    releases: tuple[str, ...] = ()
    """Releases to try; none is the tested one alone."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What a case needs -> settings of the harness that make the agent do it."""


_NO_SETTINGS: Mapping[str, Any] = {}
_WINDOW_TOKENS = 70_000
"""A context well over every agent's first prompt, so that one compaction is enough."""
_TRAITS: Mapping[str, _Traits] = {
    "claude-code": _Traits(
        ("2.1.112", "2.1.143", "2.1.330"),
        {"sub-agents": _NO_SETTINGS, "compaction": {"compact_at": _WINDOW_TOKENS}},
    ),
    "codex": _Traits(
        ("0.169.0", "0.94.0"),
        {
            "sub-agents": {"sub_agents": True},
            "compaction": {"compact_at": 30_000},
        },
    ),
    "pi": _Traits(("0.73.1", "0.87.1")),
    "opencode": _Traits(
        settings={
            "sub-agents": _NO_SETTINGS,
            "compaction": {"context_window": _WINDOW_TOKENS},
        },
    ),
    "qwen-code": _Traits(
        settings={
            "sub-agents": _NO_SETTINGS,
            "compaction": {"context_window": _WINDOW_TOKENS},
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent in one release."""

    harness: str
    release: str = ""
    """Empty where an agent comes with swerl or has one tested release."""

    @property
    def name(self) -> str:
        """Return the name that tables and users write."""
        return f"{self.harness} {self.release}".strip()

    def can(self, need: str) -> bool:
        """Say whether the lab knows how to make the agent do what a case needs."""
        return not need or need in _TRAITS.get(self.harness, _Traits()).settings

    def build(self, case: Case) -> Harness:
        """Build its harness for a case, fetching its bundle. Raises SwerlError."""
        settings = _TRAITS.get(self.harness, _Traits()).settings.get(case.needs, _NO_SETTINGS)
        built: Harness = plugins.load("harnesses", self.harness).build(self.options(settings))
        return built

    def options(self, settings: Mapping[str, Any] = _NO_SETTINGS) -> BaseModel:
        """Return its harness's settings. Raises InputError on what the harness does not take."""
        given = {**settings, **({"version": self.release} if self.release else {})}
        try:
            options: BaseModel = plugins.load("harnesses", self.harness).Options(**given)
        except ValidationError as error:
            raise InputError(
                f"{self.name} takes no settings {given}: {error.errors()[0]['msg']}",
                hint="give a release such as codex@0.169.0",
            ) from error
        return options


def choose(names: tuple[str, ...]) -> list[Agent]:
    """Return the agents of these names, `agent` or `agent@release`; without any, all of them.

    Raises UnknownNameError, and InputError on what cannot be a release.
    """
    every = names or tuple(plugins.names("harnesses"))
    chosen = list(dict.fromkeys(agent for name in every for agent in _named(name)))
    for agent in chosen:
        agent.options()
    return chosen


def _named(name: str) -> Iterator[Agent]:
    harness, _, release = name.partition("@")
    module = plugins.load("harnesses", harness)
    releases = _TRAITS.get(harness, _Traits()).releases
    if release:
        yield Agent(harness, release)
    elif releases:
        yield from (Agent(harness, each) for each in releases)
    else:
        yield Agent(harness, getattr(module, "DEFAULT_VERSION", ""))
