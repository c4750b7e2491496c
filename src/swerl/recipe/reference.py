"""Generate the reference pages of all recipe keys from the schema and the algorithms."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from swerl.core import plugins
from swerl.recipe import schema
from swerl.recipe.schema import Recipe

_HEADS = {
    "recipe": """# Recipe keys

A recipe is a TOML file. `swerl train a.toml b.toml --set trainer.lr=1e-4` merges from left to
right. Write only the keys that differ from the defaults. This page has the keys of the learning
problem. [recipe-infrastructure.md](recipe-infrastructure.md) has the keys of the machines, and
[recipe-algorithm.md](recipe-algorithm.md) the keys of `[algorithm]`. The page is generated:
`python -m swerl.recipe.reference recipe > docs/reference/recipe.md`.
""",
    "recipe-infrastructure": """# Recipe keys: infrastructure

[recipe.md](recipe.md) has the other keys. This page is generated:
`python -m swerl.recipe.reference recipe-infrastructure > docs/reference/recipe-infrastructure.md`.
""",
    "recipe-algorithm": """# Recipe keys: `[algorithm]`

`algorithm.type` names the loss; [algorithms](../guides/algorithms.md) explains each one.
[recipe.md](recipe.md) has the other keys. If a key is in two tables, the algorithm's own default
applies. This page is generated:
`python -m swerl.recipe.reference recipe-algorithm > docs/reference/recipe-algorithm.md`.
""",
}
PAGES = tuple(_HEADS)
"""Names of the pages, without `.md`."""
_LEARNING = ("Top level", "`[tasks", "`[model", "`[rollout", "`[schedule", "`[eval")
"""Prefixes of the section titles on the first page; the second page has the others."""


def as_markdown(page: str) -> str:
    """Return a page with one table per section, in the order of the schema."""
    if page == "recipe-algorithm":
        tables = list(_plugins("algorithms"))
    else:
        tables = [
            (name, text)
            for name, text in _sections(Recipe, "")
            if name.startswith(_LEARNING) == (page == PAGES[0])
        ]
    texts = [f"## {name}\n{text}" for name, text in tables]
    return "\n\n".join([_HEADS[page].strip(), *texts]) + "\n"


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    inner = {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, schema.Section)
    }
    if keys := [name for name in kinds if name not in inner]:
        yield f"`[{prefix.rstrip('.')}]`" if prefix else "Top level", _table(model, keys)
    for name, kind in inner.items():
        yield from _sections(kind, f"{prefix}{name}.")


def _plugins(kind: str) -> Iterator[tuple[str, str]]:
    """Yield a table of each plug-in's own keys, then of the keys that several share."""
    shared: dict[type[BaseModel], list[str]] = {}
    for name in plugins.names(kind):
        options = plugins.options_of(kind, name)
        assert options is not None
        yield f'`type = "{name}"`', _table(options, options.__annotations__)
        for base in options.__mro__[1:]:
            if issubclass(base, BaseModel) and base is not BaseModel:
                shared.setdefault(base, []).append(f"`{name}`")
    for base, names in shared.items():
        yield "Keys of " + ", ".join(names), _table(base, base.__annotations__)


def _table(model: type[BaseModel], keys: Iterable[str]) -> str:
    meanings = _meanings(Path(inspect.getfile(model)).read_text(encoding="utf-8"))
    rows = []
    for name in keys:
        if name not in model.model_fields:
            continue
        meaning = " ".join(meanings.get((model.__name__, name), "").split())
        default = model.model_fields[name].get_default(call_default_factory=True)
        rows.append(f"| `{name}` | {_shown(default)} | {meaning} |")
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _shown(default: object) -> str:
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, schema.PluginSection):
        return f'`type = "{default.type}"`'
    return "none" if default is None else f"`{default}`"


def _meanings(source: str) -> dict[tuple[str, str], str]:
    """Return (class, field) -> the string right below the field."""
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
