"""Find converters by the name that users type.

Converters are the modules of the top-level folder `data_converters/` (in a wheel:
`swerl/data_converters`), or modules registered under the entry point group `swerl.converters`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import swerl
from swerl.core import plugins
from swerl.core.chat import Json
from swerl.core.errors import InputError, unknown
from swerl.core.task import Task

Row: TypeAlias = Mapping[str, Json]

_PACKAGE = "swerl.data_converters"


@dataclass(frozen=True, slots=True)
class Converter:
    """One dataset's converter."""

    name: str
    source: str
    """Hub id for a conversion without a file; empty if the dataset is on no hub."""
    splits: tuple[str, ...]
    """Splits of the dataset; the first is the default."""
    to_task: Callable[[Row], Task]
    also: tuple[str, ...] = ()
    """Further hub ids with rows that it reads."""
    files: str = ""
    """Pattern of the hub's files to read one by one, for datasets without a table of rows."""
    with_assets: Callable[[Row, Path], Row] | None = None
    """Adds data from the folder of `--assets` to a row."""

    def tasks(self, rows: Iterable[Row]) -> Iterator[Task]:
        """Yield a Task per row. Raises TaskError on a row that cannot be used."""
        return map(self.to_task, rows)


def find_converter(name: str) -> Converter:
    """Return the converter of this name, or in this file.

    Raises UnknownNameError with the nearest names, InputError if it does not load.
    """
    built_in = built_in_names()
    if converter := plugins.outside("converters", name, built_in):
        return _converter(plugins.short(name), converter)
    if name in built_in:
        return _converter(name, importlib.import_module(f"{_package().__name__}.{built_in[name]}"))
    raise unknown("dataset", name, converter_names())


def converter_names() -> list[str]:
    return sorted([*built_in_names(), *plugins.outside_names("converters")])


def built_in_names() -> dict[str, str]:
    """Return the names of the built-in converters, each with its module."""
    modules = [path.stem for path in _folder().glob("*.py") if not path.stem.startswith("_")]
    return {name.replace("_", "-"): name for name in modules}


def _converter(name: str, module: Any) -> Converter:
    return Converter(
        name,
        getattr(module, "SOURCE", ""),
        tuple(getattr(module, "SPLITS", ("train",))),
        module.to_task,
        also=tuple(getattr(module, "ALSO", ())),
        files=getattr(module, "FILES", ""),
        with_assets=getattr(module, "with_assets", None),
    )


def _folder() -> Path:
    package = Path(swerl.__file__).parent
    in_wheel = package / "data_converters"
    return in_wheel if in_wheel.is_dir() else package.parents[1] / "data_converters"


def _package() -> ModuleType:
    """Import the folder as `swerl.data_converters`, from the source tree or the wheel."""
    if _PACKAGE in sys.modules:
        return sys.modules[_PACKAGE]
    init = _folder() / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, init, submodule_search_locations=[str(init.parent)]
    )
    if spec is None or spec.loader is None:
        raise InputError("the built-in converters are missing", hint="install swerl again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)
    return module
