"""Generated pages agree with the code, and the commands in the docs exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from swerl.cli.main import whole_command
from swerl.core import plugins
from swerl.recipe.check import PLUGIN_SECTIONS
from swerl.recipe.schema import Recipe
from tests.test_house import loaded

HERE = Path(__file__).resolve().parents[1] / "docs" / "reference"


GENERATOR = loaded(HERE / "generate.py")


@pytest.mark.parametrize("name", GENERATOR.PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    page = (HERE / f"{name}.md").read_text()
    assert page == GENERATOR.PAGES[name](), f"run: python docs/reference/generate.py {name}"


def test_every_recipe_section_is_on_one_page() -> None:
    pages = [make() for name, make in GENERATOR.PAGES.items() if name.startswith("recipe")]
    for section in ("Top level", "`[tasks]`", "`[rollout.shaping]`", "`[trainer]`", "`[metrics]`"):
        assert sum(page.count(f"## {section}\n") for page in pages) == 1


def test_every_command_and_every_recipe_key_has_a_meaning() -> None:
    for name in set(GENERATOR.PAGES) - {"contracts"}:
        make = GENERATOR.PAGES[name]
        rows = [line for line in make().splitlines() if line.startswith("| `")]
        assert not [row for row in rows if row.endswith("|  |")]


ROOT = HERE.parents[1]
WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.toml")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
APP: Any = whole_command()
COMMAND = re.compile(r"(?:^|`|\s)swerl ((?:[a-z][a-z-]*)(?:[^`\n#|]|\\\n)*)", re.MULTILINE)


def _commands_in(page: Path) -> Iterator[list[str]]:
    for match in COMMAND.finditer(page.read_text()):
        with suppress(ValueError):  # a quote that the pattern cut
            yield shlex.split(match[1].replace("\\\n", " ").split(" > ")[0].split("&&")[0])


def _find(words: list[str]) -> tuple[Any, list[str]] | None:
    """Return the command that the words name and the words after it, or None for prose."""
    command = APP
    by_default = ("train", "eval")  # `train RECIPE` is short for `train run RECIPE`
    if words[0] in by_default and words[1:] and words[1] not in APP.commands[words[0]].commands:
        words = [words[0], "run", *words[1:]]
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return (command, words) if getattr(command, "invoke_without_command", False) else None
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_in_the_docs_exists(page: Path) -> None:
    for words in _commands_in(page):
        if (found := _find(words)) is None:
            continue
        command, rest = found
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        used = {word.split("=")[0].rstrip(".,:;)") for word in rest if word.startswith("-")}
        named = {option for option in used if option.strip("-")[:1].isalpha()}
        assert named - known - {"--help"} == set(), f"swerl {' '.join(words)}"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_a_code_block_exists(page: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in "\n".join(blocks).splitlines():
        words = line.split()
        if words[:1] == ["swerl"] and len(words) > 1 and not words[1].startswith("-"):
            assert _find(words[1:]) is not None, line


SOURCES = ("src/swerl", "")


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_the_code_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|toml))`", page.read_text())
    missing = [name for name in named if not any((ROOT / base / name).exists() for base in SOURCES)]
    invented = "src/swerl/grading/graders/last_line.py"  # the worked example of CONTRIBUTING.md
    assert [name for name in missing if name != invented] == []


def _recipe_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every key of a recipe; the plug-in sections get the keys of all built-in choices."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if name in PLUGIN_SECTIONS and not prefix:
            yield f"{name}.type"
            for choice in plugins.names(PLUGIN_SECTIONS[name]):
                options = plugins.options_of(PLUGIN_SECTIONS[name], choice)
                yield from _recipe_keys(options, f"{name}.") if options else ()
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _recipe_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


KEYS = set(_recipe_keys(Recipe))


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_recipe_key_in_the_docs_exists(page: Path) -> None:
    text = page.read_text()
    used = set(re.findall(r"--(?:recipe-)?set '?((?:[a-z_]+\.)+[a-z_]+)=", text))
    for block in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        section = ""
        for line in block.splitlines():
            if match := re.match(r"\[([a-z_.]+)\]", line):
                section = f"{match[1]}."
            elif (match := re.match(r"([a-z_]+) *=", line)) and section:
                used.add(f"{section}{match[1]}")
    # Assumptions of `swerl cost`, and a limit that only `swerl sandbox serve` has.
    others = ("sandbox_seconds.", "tool_s.", "cost.prices.", "limits.lifetime_s")
    assert not [key for key in used - KEYS if not key.startswith(others)]
