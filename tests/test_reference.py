"""The pages of docs/reference/ that are generated agree with the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parents[1] / "docs" / "reference"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", HERE / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = _generator()


@pytest.mark.parametrize("name", GENERATOR.PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    page = (HERE / f"{name}.md").read_text()
    assert page == GENERATOR.PAGES[name](), f"run: python docs/reference/generate.py {name}"


def test_every_recipe_section_is_on_one_page() -> None:
    pages = [make() for name, make in GENERATOR.PAGES.items() if name.startswith("recipe")]
    for section in ("Top level", "`[tasks]`", "`[rollout.shaping]`", "`[trainer]`", "`[metrics]`"):
        assert sum(page.count(f"## {section}\n") for page in pages) == 1


def test_every_command_and_every_recipe_key_has_a_meaning() -> None:
    for name, make in GENERATOR.PAGES.items():
        rows = [line for line in make().splitlines() if line.startswith("| `")]
        if name.startswith(("cli", "recipe-plug")):
            assert not [row for row in rows if row.endswith("|  |")]
