"""The same program runs with the newest SDK, with an old one, and with the one for JavaScript."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from swerl.core.secrets import cache_dir

from ....services.shared import locked
from .helpers import KEY, Service

FLOW = Path(__file__).with_name("client_flow.py")
JS_FLOW = Path(__file__).with_name("client_flow.mjs")
OLD = "2.25.1"
JS = "2.51.0"


@pytest.fixture(scope="session")
def old_python() -> Path:
    """An interpreter with an old SDK: SWERL_E2B_OLD_PYTHON, or one installed into the cache."""
    if named := os.environ.get("SWERL_E2B_OLD_PYTHON"):
        return Path(named)
    folder = cache_dir() / "tests" / f"e2b-{OLD}"
    python = folder / "bin" / "python"
    with locked(_lock(folder)):
        if not (folder / "done").exists():
            venv.create(folder, with_pip=True, clear=True)
            _install([str(python), "-m", "pip", "install", "-q", f"e2b=={OLD}"])
            (folder / "done").touch()
    return python


@pytest.fixture(scope="session")
def js_folder() -> Path:
    """A folder with the JavaScript SDK, installed into the cache."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    folder = cache_dir() / "tests" / f"e2b-js-{JS}"
    with locked(_lock(folder)):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            quiet = ("--silent", "--no-audit", "--no-fund")
            _install(["npm", "install", *quiet, "--prefix", str(folder), f"e2b@{JS}"])
            (folder / "done").touch()
    return folder


def test_the_newest_sdk_runs_the_flow(service: Service) -> None:
    run_flow([sys.executable, str(FLOW), service.url, KEY])


def test_an_old_sdk_runs_the_flow(service: Service, old_python: Path) -> None:
    run_flow([str(old_python), str(FLOW), service.url, KEY])


def test_the_javascript_sdk_runs_the_flow(service: Service, js_folder: Path) -> None:
    script = js_folder / "client_flow.mjs"
    shutil.copyfile(JS_FLOW, script)
    run_flow(["node", str(script), service.url, KEY])


def run_flow(argv: list[str]) -> None:
    """Run a program that must succeed."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _lock(folder: Path) -> Path:
    """Return the file that holds back others who want to make this folder, too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_name(f"{folder.name}.lock")


def _install(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"cannot install the SDK: {done.stderr.strip()[-200:]}")
