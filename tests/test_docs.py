"""The docs describe main: links lead somewhere, pages are indexed and stay short."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UNBOUNDED = ("reference", "measurements")
"""Shelves whose pages are generated or hold whole tables."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short(page: Path) -> None:
    if page.parent.name not in UNBOUNDED:
        assert len(page.read_text().splitlines()) <= 150


def test_the_readme_has_four_links_narrow_prose_and_the_commands_that_explain_a_run() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"(?<!!)\[[^\]]+\]\(", text)) == 4
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    assert not [line for line in prose if len(line) > 100 and not line.startswith("|")]
    start = "".join(page.read_text() for page in (ROOT / "docs" / "start").glob("*.md"))
    assert "\npython3 bootstrap.py train " in text and "\npython3 bootstrap.py test " in text
    for command in ("view", "why", "eval"):
        assert f"\n| `swerl {command}` |" in text
        assert f"swerl {command} " in start


def test_every_recipe_named_in_the_docs_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"recipes/\w+\.toml", page.read_text())}
    assert named
    assert all((ROOT / name).exists() for name in named)


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {index.parent / link for link in LINK.findall(index.read_text())}
    assert not [page for page in (ROOT / "docs").rglob("*.md") if page not in {index, *linked}]


EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_import_names_that_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "swerl":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


WRITTEN = [page for page in PAGES if page.parent.name not in UNBOUNDED]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_something_to_run_within_25_lines(page: Path) -> None:
    if page.name not in ("CHANGELOG.md",) and page != ROOT / "docs" / "README.md":
        assert any(line.startswith("```") for line in page.read_text().splitlines()[:25])


def test_the_docs_that_the_code_names_exist() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "recipes").glob("*.toml")]
    named = {name for file in files for name in re.findall(r"docs/[\w/-]+\.md", file.read_text())}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
