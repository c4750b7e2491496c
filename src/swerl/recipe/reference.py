"""Every recipe key as pages of Markdown, read from the schema itself."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from swerl.recipe import schema
from swerl.recipe.schema import Recipe

_HEADS = {
    "recipes": """# Recipe keys

A recipe is a TOML file; `swerl train a.toml b.toml --set trainer.lr=1e-4` merges from left to
right. Only what differs from the defaults needs to be written. What a run learns from stands here,
the machinery that it runs on in [recipes-machinery.md](recipes-machinery.md). This page is made
from `src/swerl/recipe/schema.py` by `python -m swerl.recipe.reference > docs/recipes.md`.
""",
    "recipes-machinery": """# Recipe keys: machinery

The other keys stand in [recipes.md](recipes.md). This page is made from
`src/swerl/recipe/schema.py` by
`python -m swerl.recipe.reference recipes-machinery > docs/recipes-machinery.md`.
""",
}
PAGES = tuple(_HEADS)
"""Names of the pages, without `.md`."""
_LEARNING = ("Top level", "`[tasks", "`[model", "`[rollout", "`[eval")
"""How the titles of the first page's sections begin; the second page has the rest."""


def as_markdown(page: str) -> str:
    """Return a page: one table a section, in the order of the schema."""
    meanings = _meanings(Path(inspect.getfile(schema)).read_text(encoding="utf-8"))
    tables = [
        f"## {name}\n{text}"
        for name, text in _tables(Recipe, "", meanings)
        if name.startswith(_LEARNING) == (page == PAGES[0])
    ]
    return "\n\n".join([_HEADS[page].strip(), *tables]) + "\n"


def _tables(
    model: type[BaseModel], prefix: str, meanings: dict[tuple[str, str], str]
) -> Iterator[tuple[str, str]]:
    rows, inner = [], []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, schema.Section):
            inner.append((f"{prefix}{name}.", kind))
            continue
        meaning = " ".join(meanings.get((model.__name__, name), "").split())
        default = field.get_default(call_default_factory=True)
        rows.append(f"| `{name}` | {_shown(default)} | {meaning} |")
    title = f"`[{prefix.rstrip('.')}]`" if prefix else "Top level"
    if rows:
        yield title, "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])
    for inner_prefix, kind in inner:
        yield from _tables(kind, inner_prefix, meanings)


def _shown(default: object) -> str:
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, schema.PluginSection):
        return f'`type = "{default.type}"`'
    return "none" if default is None else f"`{default}`"


def _meanings(source: str) -> dict[tuple[str, str], str]:
    """Return (class, field) -> the string that stands right below the field."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and is_text:
                    assert isinstance(field.target, ast.Name)
                    assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                    found[node.name, field.target.id] = str(text.value.value)
    return found


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown(*sys.argv[1:] or PAGES[:1]))
