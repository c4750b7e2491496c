"""Install an example package as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="builds the example packages")

ROOT = Path(__file__).parents[3]


def install(package: Path, work: Path) -> Path:
    """Install a package into a new folder below `work`; return that folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    # pip builds beside the sources, so it gets a copy.
    copy = work / "source"
    for path in [*package.glob("*.toml"), *package.glob("*/*.py")]:
        (copy / path.relative_to(package)).parent.mkdir(parents=True, exist_ok=True)
        (copy / path.relative_to(package)).write_bytes(path.read_bytes())
    subprocess.run([*pip, "-t", str(work / "site"), str(copy)], check=True, timeout=120)
    return work / "site"
