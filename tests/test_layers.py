"""Imports follow the table of rooms in docs/design/architecture.md; heavy packages stay lazy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "swerl"
HEAVY = {"torch", "megatron", "sglang", "docker", "e2b", "transformers", "pyarrow", "datasets",
         "swebench", "tokenizers", "safetensors", "numpy", "trackio",
         "wandb", "ray"}  # fmt: skip
OWN_PROCESS = {
    "engines/_torch_server.py", "engines/_torch_batch.py", "engines/_torch_model.py",
    "training/rank/worker.py",
}  # fmt: skip
"""Files that only ever run in a process of their own, where heavy imports belong at the top."""


def _order() -> list[str]:
    """Return the rooms as the table "Rooms" of the architecture page lists them, lowest first."""
    page = (ROOT / "docs" / "design" / "architecture.md").read_text()
    table = page.split("## Rooms", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(\w+)/` \|", table, flags=re.MULTILINE)


ORDER = _order()
CHOICES = {"sandboxes", "harnesses", "engines", "engines.families", "gateway.dialects",
           "grading.graders", "training.algorithms"}  # fmt: skip
"""Packages whose public modules are choices that users type; choices never import each other."""


def _files() -> Iterator[Path]:
    return iter(sorted(SRC.rglob("*.py")))


def _name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path) for path in _files()}


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every swerl module that the code imports, in functions and for types, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full.removeprefix("swerl.") in MODULES
                yield (full if is_module else node.module), node.lineno


def test_the_page_lists_every_room() -> None:
    rooms = {path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert sorted(ORDER) == sorted(rooms)


@pytest.mark.parametrize("path", sorted(SRC.glob("*/**/*.py")), ids=_name)
def test_imports_point_down(path: Path) -> None:
    owner = _name(path)
    room = owner.split(".")[0]
    for module, line in _imports(ast.parse(path.read_text())):
        target = module.removeprefix("swerl.")
        if not module.startswith("swerl.") or target.split(".")[0] not in ORDER:
            continue
        below = target.split(".")[0]
        if below != room:
            assert ORDER.index(below) < ORDER.index(room), f"{path}:{line} imports up: {module}"
        package, _, leaf = target.rpartition(".")
        own_package = owner.rpartition(".")[0]
        if package == own_package and package in CHOICES and not leaf.startswith("_"):
            is_choice = (SRC / target.replace(".", "/")).with_suffix(".py").exists()
            assert not is_choice, f"{path}:{line} imports a sibling choice: {module}"


@pytest.mark.parametrize("path", list(_files()), ids=_name)
def test_heavy_imports_are_lazy(path: Path) -> None:
    if str(path.relative_to(SRC)) in OWN_PROCESS or "# heavy imports" in path.read_text()[:2000]:
        return
    for node in ast.parse(path.read_text()).body:
        for module, line in _imports(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            assert module.split(".")[0] not in HEAVY, f"{path}:{line} imports {module} at the top"
