"""The trainer's numerics on the newest Megatron-Core, which is published for Python 3.12 and later.

Nothing compiled in its wheel is used on a CPU, so it also runs under Python 3.11: unpacked, beside
the Triton that it imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
RELEASE, TRITON = "0.19.2", "3.7.1"
FILES = (
    "rank/test_families.py",
    "rank/test_gated_delta.py",
    "rank/test_moe.py",
    pytest.param("rank/test_lora.py", marks=pytest.mark.nightly),
    pytest.param("checkpoint/test_checkpoint_families.py", marks=pytest.mark.nightly),
)
"""Layouts of every line, delta nets, experts; in the night adapters and checkpoints."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, to be imported before the installed ones."""
    wheels, folder = (tmp_path_factory.mktemp(name) for name in ("wheels", "packages"))
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    wanted = ((f"megatron-core=={RELEASE}", "3.12"), (f"triton=={TRITON}", running))
    for requirement, python in wanted:
        command = [*pip, "--python-version", python, "-d", str(wheels), requirement]
        if subprocess.run(command, check=False).returncode:
            pytest.skip(f"{requirement} cannot be downloaded")
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
    return folder


@pytest.mark.parametrize("file", FILES)
def test_the_newest_release_computes_the_same(packages: Path, file: str) -> None:
    env = os.environ | {"PYTHONPATH": str(packages), "PYTEST_ADDOPTS": ""}
    version = [sys.executable, "-c", "import megatron.core as core; print(core.__version__)"]
    printed = subprocess.run(version, env=env, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == RELEASE
    path = ROOT / "tests" / "unit" / "training" / file
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    marks = ["-m", "not gpu", "--basetemp", str(packages.parent / f"pytest-{path.stem}")]
    run = subprocess.run(
        [*pytest_command, *marks], cwd=ROOT, env=env, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
