"""The distribution: its name, its extras, and the container file that installs it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from swerl.core.errors import DISTRIBUTION, EXTRAS
from swerl.engines.sglang import TESTED
from swerl.engines.vllm import VLLM

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRA = PROJECT["project"]["optional-dependencies"]
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}
FOREIGN = re.compile(r"(?<![\w./-])swerl\[[a-z]|pip install (-\w+ )*[\"']?swerl(?![\w-])")
"""A requirement of the project that has the name `swerl` on the package index."""
TEXTS = [
    path
    for name in ("src", "docs", "recipes", "examples", "data_converters", "bench")
    for path in (ROOT / name).rglob("*")
    if path.suffix in (".py", ".md", ".toml", ".json", ".sh") and path.is_file()
]
TEXTS += [*ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "Containerfile"]


def _instructions() -> list[tuple[str, str]]:
    """Return each instruction and its text, with continued lines joined."""
    text = (ROOT / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def test_no_text_installs_the_foreign_project() -> None:
    assert FOREIGN.search("pip install 'swerl[twin]'") and FOREIGN.search("pip install -U swerl")
    assert not FOREIGN.search("pip install 'swerl-rl[twin]'")
    lines = {str(path): FOREIGN.findall(path.read_text()) for path in TEXTS}
    assert not {name: found for name, found in lines.items() if found}
    for example in (ROOT / "examples").glob("*/pyproject.toml"):
        assert tomllib.loads(example.read_text())["project"]["dependencies"] == [DISTRIBUTION]


def test_every_extra_of_the_hints_exists() -> None:
    assert PROJECT["project"]["name"] == DISTRIBUTION
    assert EXTRAS.keys() <= EXTRA.keys()


def test_the_range_of_each_engine_is_one() -> None:
    assert EXTRA["vllm"] == [f"vllm{VLLM.tested}"]
    (requirement,) = EXTRA["sglang"]
    assert requirement == f"sglang{TESTED}"
    first = re.findall(r">=([\d.]+)", TESTED)
    assert re.findall(r"sglang==([\d.]+)", (ROOT / "noxfile.py").read_text()) == first


def test_every_line_of_the_container_file_is_an_instruction() -> None:
    found = _instructions()
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= INSTRUCTIONS


@pytest.mark.parametrize(("place", "extras"), [("sglang", {"sglang"}), ("swerl", {"twin", "gpu"})])
def test_the_container_installs_extras_that_exist(place: str, extras: set[str]) -> None:
    runs = " ".join(rest for name, rest in _instructions() if name == "RUN")
    (names,) = re.findall(rf"/opt/{place}/bin/pip install \"/opt/source\[([\w,]+)\]", runs)
    assert extras <= set(names.split(",")) <= set(EXTRA)


def test_the_container_copies_all_that_a_wheel_needs() -> None:
    copied = [rest.split()[:-1] for name, rest in _instructions() if name == "COPY"]
    names = {name for group in copied for name in group}
    assert all((ROOT / name).exists() for name in names)
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert set(included) | {"src", "pyproject.toml", PROJECT["project"]["readme"]} <= names
