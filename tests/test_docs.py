"""The docs describe main: links lead somewhere, the reference is current, pages stay short."""

import re
from pathlib import Path

import pytest

from swerl.recipe import reference

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_recipe_reference_is_current(name: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{name}.md").read_text()
    command = f"python -m swerl.recipe.reference {name} > docs/reference/{name}.md"
    assert page == reference.as_markdown(name), f"run: {command}"


def test_every_recipe_key_stands_on_one_page() -> None:
    pages = [reference.as_markdown(name) for name in reference.PAGES]
    for section in ("Top level", "`[tasks]`", "`[rollout.shaping]`", "`[trainer]`", "`[metrics]`"):
        assert sum(page.count(f"## {section}\n") for page in pages) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 150


def test_every_recipe_named_in_the_docs_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"recipes/\w+\.toml", page.read_text())}
    assert named
    assert all((ROOT / name).exists() for name in named)


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {index.parent / link for link in LINK.findall(index.read_text())}
    assert not [page for page in (ROOT / "docs").rglob("*.md") if page not in {index, *linked}]
