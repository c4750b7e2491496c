"""Write the pages of docs/reference/ from the code: `python docs/reference/generate.py`.

The CLI page comes from the Typer app, the recipe pages from the schema and the plug-ins' Options,
the contracts page from `core/contracts.py`. `tests/test_reference.py` compares the pages with it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from swerl.core import contracts, plugins
from swerl.core.grade import Grade
from swerl.core.learning import LossInputs, LossResult
from swerl.core.sandbox import Exec, Limits
from swerl.core.task import GradingSpec, Task
from swerl.recipe import schema
from swerl.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "docs" / "reference"
PACKAGES = {
    "sandboxes": "swerl.sandboxes",
    "harnesses": "swerl.harnesses",
    "engines": "swerl.engines",
    "algorithms": "swerl.training.algorithms",
    "families": "swerl.engines.families",
    "graders": "swerl.grading.graders",
    "dialects": "swerl.gateway.dialects",
}
"""Kind of plug-in -> the package of its built-in choices."""
NOTE = "This page is generated: `python docs/reference/generate.py`."
LEARNING = ("Top level", "`[tasks", "`[model", "`[rollout", "`[sft", "`[schedule", "`[eval")
"""The sections of the first recipe page, by the beginning of their titles."""


def recipe() -> str:
    """Return the page of the learning problem's keys."""
    head = f"""# Recipe keys

A recipe is a TOML file. Write only the keys that differ from the defaults. Several files merge from
left to right, and `--set` overrides them all:

```sh
swerl train base.toml mine.toml --set trainer.lr=1e-4
```

This page has the keys of the learning problem. The other keys:
[infrastructure](recipe-infrastructure.md), [`[sandbox]`, `[harness]` and
`[engine]`](recipe-plug-ins.md), [`[algorithm]`](recipe-algorithm.md). {NOTE}"""
    return _page(head, [each for each in _sections(Recipe, "") if each[0].startswith(LEARNING)])


def recipe_infrastructure() -> str:
    """Return the page of the other sections' keys."""
    head = f"""# Recipe keys: infrastructure

Trainer, cluster, gateway, budgets, limits, cost and metrics. [Recipe keys](recipe.md) has the
sections of the learning problem. {NOTE}"""
    found = [each for each in _sections(Recipe, "") if not each[0].startswith(LEARNING)]
    return _page(head, found)


def recipe_plug_ins() -> str:
    """Return the page of the keys that sandboxes, agents and engines add to their sections."""
    head = f"""# Recipe keys: `[sandbox]`, `[harness]`, `[engine]`

`type` in these sections names a plug-in, and the plug-in defines the section's other keys. A
plug-in without a table has none. {NOTE}"""
    titles = {"sandboxes": "sandbox", "harnesses": "harness", "engines": "engine"}
    several = _table(schema.AgentSection, schema.AgentSection.__annotations__)
    found = [("`[[harness]]`: [several agents](../guides/agents.md)", several)]
    found += [
        (f"`[{section}]` {title}", table)
        for kind, section in titles.items()
        for title, table in _plugins(kind)
    ]
    return _page(head, found)


def recipe_algorithm() -> str:
    """Return the page of the keys of `[algorithm]`."""
    head = f"""# Recipe keys: `[algorithm]`

`algorithm.type` names the loss; [algorithms](../guides/algorithms.md) explains each one. If a key
is in two tables, the algorithm's own default applies. {NOTE}"""
    return _page(head, list(_plugins("algorithms")))


def cli() -> str:
    """Return the page of all commands with their arguments and options."""
    from swerl.cli.main import whole_command

    head = f"""# Commands

```sh
swerl --help
swerl train --help
```

Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted. If a command uses codes in another
way, its text below states it. {NOTE}"""
    commands = list(_commands(whole_command(), "swerl"))
    return _page(head, [(f"`{name}`", _command(each)) for name, each in commands])


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if not inner or getattr(command, "invoke_without_command", False):
        yield name, command
    for word, each in inner.items():
        if word == "run":  # the default: `train RECIPE` and `eval TASKS` are short for it
            yield f"{name} {'TASKS' if name.endswith('eval') else 'RECIPE'}", each
        elif not each.hidden:
            yield from _commands(each, f"{name} {word}")


def _command(command: Any) -> str:
    """Return a command's text and the table of its parameters."""
    context = click.Context(command)
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        shown, meaning = record or (parameter.make_metavar(context), "")
        rows.append(f"| `{shown.replace('|', ', ')}` | {_cell(meaning)} |")
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    if not rows:
        return text
    return "\n".join([text, "", "| option | meaning |", "|---|---|", *rows])


def _cell(text: str) -> str:
    """Return a text as one table cell; Typer's notes on defaults stay."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def contract_page() -> str:
    """Return the page of the Protocols and of the plug-ins that implement them."""
    head = """# Contracts

A plug-in is a Python module with `build(options)` (an engine: `open(options, setup)`) and, if it
has settings, a pydantic model `Options`. [Plug-ins](../guides/plug-ins.md) shows a whole package.
The Protocols below are `swerl.core.contracts`, the dataclasses are in `swerl.core`.

| entry point group | built-in names |
|---|---|
"""
    names = {kind: ", ".join(f"`{name}`" for name in built_in(kind)) for kind in PACKAGES}
    converters = (ROOT / "data_converters").glob("[!_]*.py")
    names["converters"] = ", ".join(
        f"`{name}`" for name in sorted(path.stem.replace("_", "-") for path in converters)
    )
    names["rewards"] = "`solved`, `solved-in-time`; a function `(Attempt) -> float`"
    head += "\n".join(f"| `swerl.{kind}` | {found} |" for kind, found in names.items())
    found: list[tuple[str, str]] = [
        (f"`{name}`", _protocol(value))
        for name, value in vars(contracts).items()
        if getattr(value, "_is_protocol", False) and value.__module__ == contracts.__name__
    ]
    values = [Task, GradingSpec, Exec, Limits, Grade, LossInputs, LossResult]
    values += [contracts.Endpoint, contracts.Exit, contracts.EngineSetup]
    found += [(f"`{value.__module__}.{value.__name__}`", _protocol(value)) for value in values]
    return _page(f"{head}\n\n{NOTE}", found)


def _protocol(protocol: type) -> str:
    """Return the docstring of a Protocol or a dataclass, and a table of its members."""
    [node] = ast.parse(inspect.getsource(protocol)).body
    assert isinstance(node, ast.ClassDef)
    rows = []
    for member, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            text = getattr(after.value, "value", "") if isinstance(after, ast.Expr) else ""
            rows.append((f"{member.target.id}: {ast.unparse(member.annotation)}", str(text)))
        elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            mark = "async " if isinstance(member, ast.AsyncFunctionDef) else ""
            arguments = ast.unparse(member.args).removeprefix("self, ").removeprefix("self")
            returns = f" -> {ast.unparse(member.returns)}" if member.returns else ""
            shown = f"{mark}{member.name}({arguments}){returns}"
            if member.decorator_list:
                shown = f"{member.name}{returns.replace(' -> ', ': ')}"
            rows.append((shown, ast.get_docstring(member) or ""))
    lines = [f"| `{_cell(shown)}` | {_cell(text)} |" for shown, text in rows]
    return "\n".join([inspect.getdoc(protocol) or "", "", "| member | |", "|---|---|", *lines])


def _page(head: str, sections: Iterable[tuple[str, str]]) -> str:
    texts = [f"## {title}\n\n{text}" for title, text in sections if text]
    return "\n\n".join([head.strip(), *texts]) + "\n"


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
    for name in built_in(kind):
        options = plugins.options_of(kind, name)
        if options is None:
            continue
        if table := _table(options, options.__annotations__):
            yield f'`type = "{name}"`', table
        for base in options.__mro__[1:]:
            if issubclass(base, BaseModel) and base is not BaseModel:
                shared.setdefault(base, []).append(f"`{name}`")
    for base, names in shared.items():
        yield "Keys of " + ", ".join(names), _table(base, base.__annotations__)


def built_in(kind: str) -> list[str]:
    """Return the names of this repository: a plug-in that happens to be installed is left out."""
    package = ROOT / "src" / PACKAGES[kind].replace(".", "/")
    return sorted(path.stem.replace("_", "-") for path in package.glob("[!_]*.py"))


def _table(model: type[BaseModel], keys: Iterable[str]) -> str:
    meanings = _meanings(Path(inspect.getfile(model)).read_text(encoding="utf-8"))
    rows = []
    for name in keys:
        if name not in model.model_fields:
            continue
        meaning = " ".join(meanings.get((model.__name__, name), "").split())
        default = model.model_fields[name].get_default(call_default_factory=True)
        if isinstance(default, schema.PluginSection):
            page = "recipe-algorithm" if name == "algorithm" else "recipe-plug-ins"
            meaning = f"The plug-in of `[{name}]` and its [keys]({page}.md)."
        rows.append(f"| `{name}` | {_shown(default)} | {meaning} |")
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) if rows else ""


def _shown(default: object) -> str:
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, schema.PluginSection):
        return f'`type = "{default.type}"`'
    if str(default) == sys.executable:
        return "swerl's own Python"
    return "none" if default in (None, "") else f"`{default}`"


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


PAGES: dict[str, Callable[[], str]] = {
    "cli": cli,
    "recipe": recipe,
    "recipe-infrastructure": recipe_infrastructure,
    "recipe-plug-ins": recipe_plug_ins,
    "recipe-algorithm": recipe_algorithm,
    "contracts": contract_page,
}
"""Name of a page, without `.md` -> its text."""


def main() -> None:
    """Write the pages that the arguments name, or all."""
    for name in sys.argv[1:] or PAGES:
        (HERE / f"{name}.md").write_text(PAGES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
