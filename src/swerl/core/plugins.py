"""From a name that users type to the part that answers to it: built in, or an entry point.

A built-in is a module of the package that `_PACKAGES` names for its kind (a dash becomes an
underscore) with `Options`, a pydantic model of its settings, and `build(options, …)`.
A third party registers such a module under the entry point group `swerl.<kind>`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from swerl.core.contracts import Family, ParserChoice
from swerl.core.errors import unknown

_PACKAGES = {
    "sandboxes": "swerl.sandboxes",
    "harnesses": "swerl.harnesses",
    "dialects": "swerl.gateway.dialects",
    "engines": "swerl.engines",
    "graders": "swerl.grading.graders",
    "algorithms": "swerl.training.algorithms",
    "families": "swerl.engines.families",
}
"""Kind -> the package whose public modules are its built-in choices."""
_SINGULAR = {
    "sandboxes": "sandbox",
    "harnesses": "harness",
    "dialects": "dialect",
    "engines": "engine",
    "graders": "grader",
    "algorithms": "algorithm",
    "families": "family",
    "converters": "dataset",
}


def load(kind: str, name: str) -> ModuleType:
    """Return the module that implements `name`. Raises UnknownNameError with the nearest names."""
    module_name = name.replace("-", "_")
    if not module_name.startswith("_") and module_name in _built_in(kind):
        return importlib.import_module(f"{_PACKAGES[kind]}.{module_name}")
    for entry in entry_points(group=f"swerl.{kind}"):
        if entry.name == name:
            module = entry.load()
            assert isinstance(module, ModuleType)
            return module
    raise unknown(_SINGULAR[kind], name, names(kind))


def family(name: str, model: Path | None, parser: ParserChoice | None = None) -> Family:
    """Build a family for the model in this folder. Raises InputError where one does not fit."""
    build = load("families", name).build
    built: Family = build(model, parser) if parser else build(model)
    return built


def names(kind: str) -> Iterator[str]:
    """Yield every name of this kind, as users type it."""
    yield from (name.replace("_", "-") for name in _built_in(kind))
    yield from (entry.name for entry in entry_points(group=f"swerl.{kind}"))


def _built_in(kind: str) -> list[str]:
    found = pkgutil.iter_modules(importlib.import_module(_PACKAGES[kind]).__path__)
    return [info.name for info in found if not info.ispkg and info.name[0] != "_"]
