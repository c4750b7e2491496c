"""The docs describe main: links lead somewhere, the reference is current, pages stay short."""

import re
from pathlib import Path

import pytest

from swerl.recipe.reference import as_markdown

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_the_recipe_reference_is_current() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert page == as_markdown(), "run: python -m swerl.recipe.reference > docs/recipes.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 150


def test_every_recipe_named_in_the_docs_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"recipes/\w+\.toml", page.read_text())}
    assert named
    assert all((ROOT / name).exists() for name in named)
