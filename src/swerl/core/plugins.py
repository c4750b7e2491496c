"""Resolve the name of a plug-in to its implementation: built in, an entry point, or a file.

A built-in is a public module of its kind's package (a dash in the name becomes an underscore) with
`Options`, a pydantic model of its settings, and `build(options, …)`; an engine has `open(options,
setup)` instead, and a reward is a function. A third party registers such a part under the entry
point group `swerl.<kind>`. `path/to/file.py` and `path/to/file.py:function` name one in a file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast, overload

from swerl.core.contracts import (
    Algorithm,
    ChatEngine,
    Dialect,
    Engine,
    Family,
    Grader,
    Harness,
    Reward,
    SandboxBackend,
)
from swerl.core.errors import InputError, PluginError, SwerlError, unknown

if TYPE_CHECKING:
    from pydantic import BaseModel

T_co = TypeVar("T_co", covariant=True)
_KINDS = {
    "sandboxes": ("sandbox", "swerl.sandboxes"),
    "harnesses": ("agent", "swerl.harnesses"),
    "dialects": ("dialect", "swerl.gateway.dialects"),
    "engines": ("engine", "swerl.engines"),
    "graders": ("grader", "swerl.grading.graders"),
    "algorithms": ("algorithm", "swerl.training.algorithms"),
    "families": ("family", "swerl.engines.families"),
    "rewards": ("reward", "swerl.rollout.rewards"),
    "converters": ("dataset", "swerl.data_converters"),
}
"""Kind -> its word in errors, and the package whose public modules are the built-in choices."""
KINDS = tuple(_KINDS)
_ENTRY = {"engines": "open", "rewards": "reward", "converters": "to_task"}
"""Kind -> the function that a module of it must have; `build` for all others."""
_FILE = re.compile(r"(?P<file>.+\.py)(?::(?P<function>[A-Za-z_]\w*))?")
AUTO_FAMILY = "auto"
"""Value of `model.family` that stands for the family of the model's folder."""
_ANY_FAMILY = "template"
"""The family that reads any chat template."""


class PartPlugin(Protocol[T_co]):
    """A module of sandboxes, harnesses, algorithms, dialects or graders."""

    Options: type[BaseModel]

    def build(self, *options: BaseModel) -> T_co:
        """Return the part with these settings: one, or none if the module has no `Options`."""


class EnginePlugin(Protocol):
    """A module of `swerl.engines`."""

    Options: type[BaseModel]

    open: Callable[..., AbstractAsyncContextManager[Engine | ChatEngine]]
    """`open(options, setup)` connects to the engine or launches it; leaving the context ends what
    was launched. Without `Options` it takes the EngineSetup alone."""


class FamilyPlugin(Protocol):
    """A module of `swerl.families`.

    An optional function `fits(model)` returns True if the family was written for the model in this
    folder; `model.family = "auto"` asks it.
    """

    def build(self, model: Path | None, /) -> Family:
        """Return the family for the model in this folder. Raises InputError if it does not fit."""


@overload
def load(kind: Literal["sandboxes"], name: str) -> PartPlugin[SandboxBackend]: ...
@overload
def load(kind: Literal["harnesses"], name: str) -> PartPlugin[Harness]: ...
@overload
def load(kind: Literal["engines"], name: str) -> EnginePlugin: ...
@overload
def load(kind: Literal["algorithms"], name: str) -> PartPlugin[Algorithm]: ...
@overload
def load(kind: Literal["dialects"], name: str) -> PartPlugin[Dialect]: ...
@overload
def load(kind: Literal["graders"], name: str) -> PartPlugin[Grader]: ...
@overload
def load(kind: Literal["families"], name: str) -> FamilyPlugin: ...
def load(kind: str, name: str) -> object:
    """Return the module that implements `name`. Raises UnknownNameError with the nearest names."""
    return module(kind, name)


def module(kind: str, name: str) -> ModuleType:
    """Return the same module for the parts that only some plug-ins have."""
    built_in = _built_in(kind)
    if (entry := outside(kind, name, built_in)) is not None:
        return cast(ModuleType, entry)
    base, _, choice = name.partition(":")
    if base in built_in:
        part = importlib.import_module(f"{_KINDS[kind][1]}.{built_in[base]}")
        if name == base:
            return part
        if hasattr(part, "choose"):  # a module of several parts
            return cast(ModuleType, part.choose(choice))
    raise unknown(_KINDS[kind][0], name, names(kind))


def reward(name: str) -> Reward:
    """Return a reward. Raises UnknownNameError, and InputError on a broken one."""
    rule = module("rewards", name)
    function: Reward = rule if callable(rule) else rule.reward
    return function


def outside(kind: str, name: str, built_in: Collection[str]) -> object | None:
    """Return a part from a file or of another package; None if no package has one of this name.

    Raises InputError if it does not load, or if its name is taken.
    """
    if match := _FILE.fullmatch(name):
        return _in_file(kind, Path(match["file"]), match["function"])
    entries = [entry for entry in _entries(kind) if entry.name == name]
    if not entries:
        return None
    if name in built_in or len(entries) > 1:
        raise _taken(kind, entries, is_built_in=name in built_in)
    remedy = f"correct it, or pip uninstall {_package_of(entries[0])}"
    with _loading(kind, _described(entries[0]), remedy):
        return _checked(kind, entries[0].load(), _described(entries[0]))


def absolute(name: str) -> str:
    """Return a name whose file, if it is one, does not depend on the working folder."""
    match = _FILE.fullmatch(name)
    return name if match is None else str(Path(match["file"]).resolve()) + name[match.end("file") :]


def short(name: str) -> str:
    """Return a name without the folder and ending of its file, for the names of runs."""
    match = _FILE.fullmatch(name)
    return name if match is None else Path(match["file"]).stem


def _in_file(kind: str, path: Path, function: str | None) -> object:
    """Return the part in a file; `function` replaces the function that modules of its kind have."""
    word, where = _KINDS[kind][0], str(path)
    if not path.is_file():
        raise InputError(f"the {word} {where} does not exist", hint="give the path of a file")
    path = path.resolve()
    # The name is new for each path, so two files may have one name.
    name = f"swerl_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        with _loading(kind, where, "correct it", forget=name):
            spec.loader.exec_module(sys.modules[name])
    module = sys.modules[name]
    if function is None:
        return _checked(kind, module, where)
    chosen = getattr(module, function, None)
    if not callable(chosen):
        raise InputError(f"{where} has no function {function!r}", hint=f"define it in {where}")
    if kind == "rewards":
        return chosen
    part = ModuleType(name)
    vars(part).update(vars(module))
    setattr(part, _ENTRY.get(kind, "build"), chosen)
    return part


def _checked(kind: str, part: object, where: str) -> object:
    """Return a part if it has the function of its kind. Raises InputError."""
    function = _ENTRY.get(kind, "build")
    if hasattr(part, function) or (kind == "rewards" and callable(part)):
        return part
    raise InputError(
        f"the {_KINDS[kind][0]} {where} has no function `{function}`",
        hint="docs/guides/plug-ins.md lists the functions of each kind",
    )


@contextmanager
def _loading(kind: str, where: str, remedy: str, *, forget: str = "") -> Iterator[None]:
    """Turn any error of a foreign module into one InputError with its line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the boundary: a module may raise anything
        sys.modules.pop(forget, None)
        raise InputError(
            f"the {_KINDS[kind][0]} {where} does not load: {type(error).__name__}: {error}",
            hint=f"{_line_of(error)}; {remedy}",
        ) from error


@contextmanager
def blaming(kind: str, part: object) -> Iterator[None]:
    """Turn an error in the file of another package's part into a PluginError with its line.

    All other errors are raised as they are.
    """
    try:
        yield
    except SwerlError:
        raise
    except Exception as error:  # the boundary: a part may raise anything
        file = getattr(sys.modules.get(part.__module__), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        if part.__module__.startswith("swerl.") or not lines:
            raise
        raise PluginError(
            f"{_KINDS[kind][0].upper()} FAILED {file}:{lines[-1]}: {type(error).__name__}: {error}",
            hint="correct it, and run the same command again",
        ) from error


def _line_of(error: Exception) -> str:
    """Return file and line of an error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


def _taken(kind: str, entries: list[EntryPoint], *, is_built_in: bool) -> InputError:
    word, shown = _KINDS[kind][0], " and ".join(map(_described, entries))
    fault = "has the name of a built-in one" if is_built_in else "have one name"
    return InputError(f"the {word} {shown} {fault}", hint="rename the entry point")


def _described(entry: EntryPoint) -> str:
    """Return an entry point as its package wrote it."""
    return f"{entry.name!r} ({_package_of(entry)}: {entry.group}: {entry.name} = {entry.value})"


def _package_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "unknown"


def _entries(kind: str) -> tuple[EntryPoint, ...]:
    return _entries_on(tuple(sys.path))[kind]


@cache
def _entries_on(path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points by kind; one pass for all, because it reads every package."""
    entries = entry_points()
    return {kind: tuple(entries.select(group=f"swerl.{kind}")) for kind in _KINDS}


def options_of(kind: str, name: str) -> type[BaseModel] | None:
    """Return the model of a plug-in's settings, or None if it has none. Raises UnknownNameError."""
    options: type[BaseModel] | None = getattr(module(kind, name), "Options", None)
    return options


def family(name: str, model: Path | None) -> Family:
    """Build a family for the model in this folder. Raises InputError if it does not fit."""
    return load("families", family_name(name, model)).build(model)


def family_name(name: str, model: Path | None) -> str:
    """Return the name of a family; `auto` becomes that of the model in this folder.

    Raises InputError if there is no folder to look at.
    """
    if name != AUTO_FAMILY:
        return name
    if model is None:
        hint = "set model.path, or name a family"
        raise InputError("model.family = 'auto' needs a model folder", hint=hint)
    for family in names("families"):
        fits = getattr(module("families", family), "fits", None)
        if fits is not None and fits(model):
            return family
    return _ANY_FAMILY


def names(kind: str) -> Iterator[str]:
    """Yield every name of this kind, as users type it."""
    yield from (name.replace("_", "-") for name in sorted({*_built_in(kind).values()}))
    yield from outside_names(kind)


def outside_names(kind: str) -> list[str]:
    """Return the names of this kind that other packages registered."""
    return sorted({entry.name for entry in _entries(kind)})


@dataclass(frozen=True, slots=True)
class FoundPlugin:
    """One entry point of a package outside swerl."""

    kind: str
    name: str
    package: str
    version: str
    value: str
    """Module, and function of a reward."""
    problem: str
    """Why it cannot be used; empty if it can."""


def found_plugins(built_in: Mapping[str, Collection[str]]) -> list[FoundPlugin]:
    """Return every entry point for swerl, loaded once to see if it works.

    `built_in` has the built-in names of kinds that are not modules of a package.
    """
    plugins = []
    for kind in KINDS:
        names = built_in[kind] if kind in built_in else _built_in(kind)
        for entry in _entries(kind):
            problem = ""
            try:
                outside(kind, entry.name, names)
            except InputError as error:
                problem = error.explained()
            version = entry.dist.version if entry.dist else ""
            plugins.append(
                FoundPlugin(kind, entry.name, _package_of(entry), version, entry.value, problem)
            )
    return plugins


def _built_in(kind: str) -> dict[str, str]:
    """Return the names of the built-in choices, each with its module.

    Names in code, such as those of dialects and graders, have underscores.
    """
    infos = pkgutil.iter_modules(importlib.import_module(_KINDS[kind][1]).__path__)
    modules = [info.name for info in infos if not info.ispkg and info.name[0] != "_"]
    typed = {name.replace("_", "-"): name for name in modules}
    return typed | {name: name for name in modules} if kind in ("dialects", "graders") else typed
