"""Resolve the name of a plug-in to its implementation: built in, or an entry point.

A built-in is a public module of its kind's package (a dash in the name becomes an underscore) with
`Options`, a pydantic model of its settings, and `build(options, …)`; an engine has `open(options,
setup)` instead. A third party registers such a module under the entry point group `swerl.<kind>`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

from swerl.core.contracts import (
    Algorithm,
    ChatEngine,
    Dialect,
    Engine,
    Family,
    Grader,
    Harness,
    ParserChoice,
    SandboxBackend,
)
from swerl.core.errors import unknown

if TYPE_CHECKING:
    from pydantic import BaseModel

_KINDS = {
    "sandboxes": ("sandbox", "swerl.sandboxes"),
    "harnesses": ("harness", "swerl.harnesses"),
    "dialects": ("dialect", "swerl.gateway.dialects"),
    "engines": ("engine", "swerl.engines"),
    "graders": ("grader", "swerl.grading.graders"),
    "algorithms": ("algorithm", "swerl.training.algorithms"),
    "families": ("family", "swerl.engines.families"),
}
"""Kind -> its word in errors, and the package whose public modules are the built-in choices."""


class SandboxPlugin(Protocol):
    """A module of `swerl.sandboxes`."""

    Options: type[BaseModel]

    def build(self, *options: BaseModel) -> SandboxBackend:
        """Return the backend with these settings: one, or none if it has no `Options`."""


class HarnessPlugin(Protocol):
    """A module of `swerl.harnesses`."""

    Options: type[BaseModel]

    def build(self, *options: BaseModel) -> Harness:
        """Return the harness with these settings."""


class EnginePlugin(Protocol):
    """A module of `swerl.engines`."""

    Options: type[BaseModel]

    open: Callable[..., AbstractAsyncContextManager[Engine | ChatEngine]]
    """`open(options, setup)` connects to the engine or launches it; leaving the context ends what
    was launched. Without `Options` it takes the EngineSetup alone."""


class AlgorithmPlugin(Protocol):
    """A module of `swerl.algorithms`."""

    Options: type[BaseModel]

    def build(self, *options: BaseModel) -> Algorithm:
        """Return the algorithm with these settings."""


class DialectPlugin(Protocol):
    """A module of `swerl.dialects`."""

    def build(self) -> Dialect:
        """Return the dialect."""


class GraderPlugin(Protocol):
    """A module of `swerl.graders`."""

    def build(self) -> Grader:
        """Return the grader."""


class FamilyPlugin(Protocol):
    """A module of `swerl.families`."""

    def build(self, model: Path | None, parser: ParserChoice | None = None, /) -> Family:
        """Return the family for the model in this folder. Raises InputError if it does not fit."""


@overload
def load(kind: Literal["sandboxes"], name: str) -> SandboxPlugin: ...
@overload
def load(kind: Literal["harnesses"], name: str) -> HarnessPlugin: ...
@overload
def load(kind: Literal["engines"], name: str) -> EnginePlugin: ...
@overload
def load(kind: Literal["algorithms"], name: str) -> AlgorithmPlugin: ...
@overload
def load(kind: Literal["dialects"], name: str) -> DialectPlugin: ...
@overload
def load(kind: Literal["graders"], name: str) -> GraderPlugin: ...
@overload
def load(kind: Literal["families"], name: str) -> FamilyPlugin: ...
def load(kind: str, name: str) -> object:
    """Return the module that implements `name`. Raises UnknownNameError with the nearest names."""
    return module(kind, name)


def module(kind: str, name: str) -> ModuleType:
    """Return the same module for the parts that only some plug-ins have."""
    word, package = _KINDS[kind]
    module_name = name.replace("-", "_")
    if not module_name.startswith("_") and module_name in _built_in(kind):
        return importlib.import_module(f"{package}.{module_name}")
    for entry in entry_points(group=f"swerl.{kind}"):
        if entry.name == name:
            return cast(ModuleType, entry.load())
    raise unknown(word, name, names(kind))


def options_of(kind: str, name: str) -> type[BaseModel] | None:
    """Return the model of a plug-in's settings, or None if it has none. Raises UnknownNameError."""
    found: type[BaseModel] | None = getattr(module(kind, name), "Options", None)
    return found


def family(name: str, model: Path | None, parser: ParserChoice | None = None) -> Family:
    """Build a family for the model in this folder. Raises InputError if it does not fit."""
    build = load("families", name).build
    return build(model, parser) if parser else build(model)


def names(kind: str) -> Iterator[str]:
    """Yield every name of this kind, as users type it."""
    yield from (name.replace("_", "-") for name in _built_in(kind))
    yield from (entry.name for entry in entry_points(group=f"swerl.{kind}"))


def _built_in(kind: str) -> list[str]:
    found = pkgutil.iter_modules(importlib.import_module(_KINDS[kind][1]).__path__)
    return [info.name for info in found if not info.ispkg and info.name[0] != "_"]
