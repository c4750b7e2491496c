"""Each line of docs/design/threats.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "design" / "threats.md").read_text()


def test_every_line_of_a_table_names_a_test_that_exists() -> None:
    heads = ("| it tries", "| they try", "| danger", "|---")
    lines = [line for line in PAGE.splitlines() if line[:1] == "|" and not line.startswith(heads)]
    for line in lines:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)
        assert named, line
        for file, test in named:
            tree = ast.parse((ROOT / file).read_text())
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            assert test in {node.name for node in tree.body if isinstance(node, kinds)}, line
    assert len(lines) > 15
