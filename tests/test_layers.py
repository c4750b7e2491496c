"""Imports point down the layer chart of docs/architecture.md, and heavy packages stay lazy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "swerl"

LAYERS = {
    "errors": 0, "chat": 0, "task": 0, "patch": 0, "grade": 0, "turn": 0, "tree": 0, "sample": 0,
    "episode": 0, "sandbox": 0, "learning": 0, "certificate": 0, "tarballs": 0,
    "interfaces": 1, "plugins": 1, "secrets": 1, "recipe": 1, "run": 1, "oci": 1,
    "sandboxes": 2, "harnesses": 2, "dialects": 2, "engines": 2, "graders": 2, "algorithms": 2,
    "families": 2,
    "gateway": 3,
    "rollout": 4, "training": 4, "images": 4, "cost": 4, "tasks": 4,
    "simulation": 4,
    "ledger": 4, "probe": 4, "redteam": 4, "e2b_server": 4, "lab": 4, "cluster": 4,
    "assemble": 5, "doctor": 5, "preflight": 5, "integrations": 5,
    "cli": 6,
}  # fmt: skip
PLURAL = {"sandboxes", "harnesses", "dialects", "engines", "graders", "algorithms", "families"}
HEAVY = {"torch", "megatron", "sglang", "docker", "e2b", "transformers", "pyarrow", "datasets",
         "matplotlib", "swebench", "tokenizers", "safetensors", "numpy", "trackio",
         "wandb", "ray"}  # fmt: skip
OWN_PROCESS = {
    "engines/_torch_server.py", "engines/_torch_model.py", "engines/_torch_batch.py",
    "engines/_torch_jobs.py", "engines/_torch_rows.py", "engines/_torch_sample.py",
    "engines/_torch_wire.py", "engines/_torch_app.py",
    "training/rank/worker.py",
}  # fmt: skip
"""Files that only ever run in a process of their own, where heavy imports belong at the top."""


def _files() -> Iterator[Path]:
    return (path for path in sorted(SRC.rglob("*.py")) if path.name != "__init__.py")


def _owner(parts: tuple[str, ...]) -> str:
    return parts[0]


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


@pytest.mark.parametrize("path", list(_files()), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(SRC).with_suffix("")
    owner = _owner(relative.parts)
    for module, line in _imports(ast.parse(path.read_text())):
        if not module.startswith("swerl."):
            continue
        parts = module.split(".")[1:]
        target = parts[0]
        assert LAYERS[target] <= LAYERS[owner], f"{path}:{line} imports up: {module}"
        if LAYERS[target] == LAYERS[owner] == 2 and target != owner:
            pytest.fail(f"{path}:{line}: {owner} imports {target}, its sibling")
        if target == owner and owner in PLURAL and len(parts) > 1:
            assert parts[1].startswith("_"), f"{path}:{line} imports a sibling choice: {module}"


@pytest.mark.parametrize("path", list(_files()), ids=lambda p: str(p.relative_to(SRC)))
def test_heavy_imports_are_lazy(path: Path) -> None:
    if str(path.relative_to(SRC)) in OWN_PROCESS or "# heavy imports" in path.read_text()[:2000]:
        return
    for node in ast.parse(path.read_text()).body:
        for module, line in _imports(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            assert module.split(".")[0] not in HEAVY, f"{path}:{line} imports {module} at the top"
