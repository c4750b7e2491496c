"""The wheel, installed alone into a fresh environment, works from another folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.11", "3.12", "3.13")


def called(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without this environment's packages."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["COLUMNS"] = "200"
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    for module in ("build", "twine"):
        pytest.importorskip(module, reason=f"the package {module} is not installed")
    done = called(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    if done.returncode:
        pytest.skip(f"the wheel cannot be built here: {done.stderr[-300:]}")
    return next(out.glob("*.whl"))


def test_the_index_would_accept_wheel_and_sdist(wheel: Path) -> None:
    files = sorted(wheel.parent.glob("swerl_rl-*"))
    assert {path.suffix for path in files} == {".whl", ".gz"}
    done = called(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=wheel.parent)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("engine", "other"), [("sglang", "vllm"), ("vllm", "sglang")])
def test_an_engine_resolves_with_all_other_extras(
    engine: str, other: str, version: str, tmp_path: Path
) -> None:
    """Both engines at once need two releases of one package: each has its own environment."""
    pytest.importorskip("uv", reason="the package uv is not installed")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [name for name in extras["optional-dependencies"] if name not in ("dev", other)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--python-version", version]
    chosen = (part for name in names for part in ("--extra", name))
    done = called(*command, *chosen, ROOT / "pyproject.toml", cwd=tmp_path)
    if "request" in done.stderr or "connect" in done.stderr:
        pytest.skip(f"no package index: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    # The resolver once chose SGLang 0.5.2 in silence.
    release = {"sglang": r"0\.5\.2[123]", "vllm": r"0\.32\.\d+"}[engine]
    assert re.search(rf"^{engine}=={release}$", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module", params=VERSIONS)
def swerl(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: object) -> Path:
    """Install the wheel with its core packages; return the command."""
    python = _interpreter(request.param)
    if python is None:
        pytest.skip(f"there is no python{request.param} here")
    venv = wheel.parent / f"venv-{request.param}"
    made = called(python, "-m", "venv", venv, cwd=wheel.parent)
    if made.returncode:
        pytest.skip(f"python{request.param} makes no environment: {made.stdout}{made.stderr}")
    done = called(venv / "bin" / "pip", "install", "-q", wheel, cwd=wheel.parent)
    if done.returncode:
        pytest.skip(f"pip installs nothing here: {done.stderr[-300:]}")
    return venv / "bin" / "swerl"


def _interpreter(version: str) -> str | None:
    """Return a Python of this version; pyenv's command exists for versions that are not on."""
    own = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    for python in (shutil.which(f"python{version}"), *map(str, own)):
        if python and not called(python, "-c", "", cwd=Path.cwd()).returncode:
            return python
    return None


def test_a_core_install_attempts_a_task_and_grades_it(swerl: Path, tmp_path: Path) -> None:
    done = called(swerl, "rollout", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "solved"


def test_its_recipes_have_names_and_say_what_training_needs(swerl: Path, tmp_path: Path) -> None:
    listed = called(swerl, "recipes", "--json", cwd=tmp_path)
    assert "twin_cpu" in {row["name"] for row in json.loads(listed.stdout)}
    planned = called(swerl, "train", "twin_cpu", "--dry-run", cwd=tmp_path)
    assert planned.returncode == 2
    assert "swerl_rl-0.1.0-py3-none-any.whl[twin]'" in planned.stdout
    started = called(swerl, "train", "twin_cpu", cwd=tmp_path)
    assert started.returncode == 2
    assert len(started.stderr.splitlines()) == 2


def test_a_page_that_a_hint_names_is_there(swerl: Path, tmp_path: Path) -> None:
    done = called(swerl, "train", "twin_cpu", "--set", "seed=x", "--dry-run", cwd=tmp_path)
    [page] = re.findall(r"\S+/docs/\S+\.md", done.stderr)
    assert Path(page).is_file()


@pytest.mark.parametrize(
    "command",
    [
        ("export", "runs/none", "-o", "model"),
        ("export", "runs/none", "--samples", "-o", "rows"),
    ],
)
def test_a_missing_extra_is_two_lines(
    swerl: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    run = tmp_path / "runs" / "none"
    (run / "samples").mkdir(parents=True)
    (run / "samples" / "00000.parquet").write_bytes(b"")
    (run / "turns").mkdir()
    (run / "recipe.resolved.json").write_text('{"name": "none"}')
    done = called(swerl, *command, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert ".whl[twin]'" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_doctor_tells_what_is_missing(swerl: Path, tmp_path: Path) -> None:
    done = called(swerl, "doctor", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert states["core packages"] == "ok"
    assert states["trainer"] == "missing"
    assert done.returncode == 1
