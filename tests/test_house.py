"""The shape of the code and of its texts stays within the bounds of bench/house.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def loaded(file: Path) -> ModuleType:
    """Return a program that is no part of a package as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOUSE = loaded(ROOT / "bench" / "house.py")


@pytest.fixture(scope="module")
def measures() -> dict[str, float]:
    return HOUSE.static()


@pytest.mark.parametrize("measure", sorted(set(HOUSE.BOUNDS) - HOUSE.MEASURED_BY_RUNNING))
def test_a_measure_is_within_its_bound(measure: str, measures: dict[str, float]) -> None:
    assert measures[measure] <= HOUSE.BOUNDS[measure], _offenders(measure)


@pytest.mark.parametrize("room", HOUSE.ROOM_BOUNDS)
def test_a_room_is_within_its_bound(room: str) -> None:
    assert HOUSE.room_lines()[room] <= HOUSE.ROOM_BOUNDS[room]


def test_every_room_has_a_bound() -> None:
    rooms = {path.parent.name for path in HOUSE.SRC.glob("*/__init__.py")}
    assert rooms == set(HOUSE.ROOM_BOUNDS)


def _offenders(measure: str) -> object:
    """Return the names behind a measure that is over its bound."""
    offenders = {
        "small modules with one importer": HOUSE.small_modules,
        "class names in several modules": HOUSE.repeated_class_names,
        "names that fit everything": lambda: HOUSE.vague_names().most_common(20),
        "long files": HOUSE.long_files,
        "commands": HOUSE.commands,
        "recipe keys": HOUSE.recipe_keys,
        "pages not in the index": HOUSE.pages_not_in_the_index,
        "longest function": lambda: max(HOUSE.functions()),
        "docstrings that begin with What": lambda: [
            f"{path.relative_to(ROOT)}: {text[:60]}"
            for path, text in HOUSE.docstrings()
            if text.lstrip().startswith("What")
        ],
    }
    return offenders.get(measure, str)()
