"""The container file installs the versions that the rest of the repository names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}


def _instructions() -> list[tuple[str, str]]:
    """Return each instruction and its text, with continued lines joined."""
    text = (ROOT / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def test_every_line_is_an_instruction() -> None:
    found = _instructions()
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= INSTRUCTIONS


def test_its_versions_are_those_of_the_repository() -> None:
    versions = dict(rest.split("=") for name, rest in _instructions() if name == "ARG")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch=={versions['TORCH']}" in extras["optional-dependencies"]["twin"]
    pinned = re.findall(r"sglang==([\d.]+)", (ROOT / "noxfile.py").read_text())
    assert pinned == [versions["SGLANG"]]
    doctor = (ROOT / "src" / "swerl" / "checks" / "doctor.py").read_text()
    assert f"sglang=={versions['SGLANG']}" in doctor


def test_the_extras_that_it_installs_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runs = " ".join(rest for name, rest in _instructions() if name == "RUN")
    (extras,) = re.findall(r"/opt/source\[([\w,]+)\]", runs)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert {"twin", "gpu"} <= set(extras.split(","))


def test_the_files_that_it_copies_exist_and_are_all_that_a_wheel_needs() -> None:
    copied = [rest.split()[:-1] for name, rest in _instructions() if name == "COPY"]
    names = {name for group in copied for name in group}
    assert all((ROOT / name).exists() for name in names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert set(included) | {"src", "pyproject.toml", project["project"]["readme"]} <= names
