"""Source images: built from an archive, whole or not at all; specs of real instances."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swerl.core import plugins
from swerl.core.errors import ImageError, InputError
from swerl.core.sandbox import Limits
from swerl.images.build import (
    SourceLayer,
    SourceSpec,
    _check_sum,
    build,
    make_task,
    read_specs,
    run_inside,
    shipped,
    unpack,
)
from swerl.images.wheels import fetch_sdist, fetch_wheels, find_python

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: tinycalc\nVersion: 1.0\n",
    "pyproject.toml": (
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    ),
    "backend.py": (
        "from pathlib import Path\n\n\n"
        "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
        "    info = Path(folder, 'tinycalc-1.0.dist-info')\n"
        "    info.mkdir()\n"
        "    Path(info, 'METADATA').write_text(Path('PKG-INFO').read_text())\n"
        "    return info.name\n"
    ),
    "tinycalc.py": "def add(a, b):\n    return a - b\n",
}
SPEC = SourceSpec(
    instance_id="example__tinycalc-1",
    sdist="tinycalc==1.0",
    python=THIS_PYTHON,
    install="mkdir build && cp tinycalc.py build",
    env={"TINYCALC": "yes"},
    test_cmd="python -c 'import tinycalc'",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder, and a package index of one small project of our own."""
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    folder = tmp_path_factory.mktemp("cache")
    index = tmp_path_factory.mktemp("index")
    with tarfile.open(index / "tinycalc-1.0.tar.gz", "w:gz") as archive:
        for name, text in FILES.items():
            entry = tarfile.TarInfo(f"tinycalc-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWERL_CACHE", str(folder))
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index))
        yield folder


@pytest.fixture(scope="module")
def builds(home: Path) -> list[list[str]]:
    """The steps of two builds of one image that began at the same time."""
    steps: list[list[str]] = [[], []]
    with ThreadPoolExecutor() as pool:
        references = list(pool.map(lambda said: build(SPEC, said.append), steps))
    assert references == ["built:example__tinycalc-1"] * 2
    return steps


@pytest.fixture(scope="module")
def image(home: Path, builds: list[list[str]]) -> Path:
    return home / "images" / "example__tinycalc-1"


@pytest.mark.integration
def test_two_builds_of_one_image_do_the_work_once(builds: list[list[str]]) -> None:
    assert sorted(map(len, builds)) == [0, 4]


@pytest.mark.integration
def test_work_tree_is_one_commit_and_clean(image: Path) -> None:
    testbed = image / "layer" / "testbed"
    git = ["git", "-c", "safe.directory=*", "-C", str(testbed)]
    log = subprocess.run([*git, "log", "--format=%s"], capture_output=True, text=True, check=True)
    status = subprocess.run([*git, "status", "--short"], capture_output=True, text=True, check=True)
    assert (log.stdout, status.stdout) == ("base\n", "")
    assert (testbed / "build").is_dir(), "what the install step wrote belongs to the base"


@pytest.mark.integration
def test_a_failed_build_keeps_the_standing_image(image: Path) -> None:
    before = (image / "image.json").read_text()
    with pytest.raises(ImageError, match="exit code 7"):
        build(SPEC.model_copy(update={"install": "exit 7"}))
    assert (image / "image.json").read_text() == before
    assert not list(image.parent.glob(".example__tinycalc-1.?*/*"))


@pytest.mark.integration
def test_steps_have_no_network(image: Path) -> None:
    layer = SourceLayer(image / "layer", find_python(THIS_PYTHON), image, {"PATH": "/usr/bin:/bin"})
    reach = "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
    with pytest.raises(ImageError, match="Network is unreachable"):
        run_inside(layer, ["/opt/venv/bin/python", "-c", reach])


@pytest.mark.integration
async def test_sandbox_runs_the_image_at_its_paths(image: Path) -> None:
    local = plugins.load("sandboxes", "local")
    backend = local.build(local.Options())
    async with backend.open("built:example__tinycalc-1", Limits(), workdir="/testbed") as sandbox:
        code = (
            "import os, sys, tinycalc as t; print(sys.prefix, t.add(3, 1), os.environ['TINYCALC'])"
        )
        done = await sandbox.run(["python", "-c", code], cwd="/testbed")
    assert done.text == "/opt/venv 2 yes\n"


def test_missing_python_says_how_to_get_it() -> None:
    with pytest.raises(ImageError, match=r"no Python 2\.4") as caught:
        find_python("2.4")
    assert "pyenv install 2.4" in caught.value.hint


def test_broken_archive_is_one_clear_error(tmp_path: Path) -> None:
    archive = tmp_path / "tinycalc-1.0.tar.gz"
    archive.write_bytes(b"no archive")
    layer = SourceLayer(tmp_path / "layer", find_python(THIS_PYTHON), tmp_path, {})
    with pytest.raises(ImageError, match="cannot be unpacked"):
        unpack(layer, archive)


NO_NAME = '[{"instance_id": "../a", "sdist": "a==1", "python": "3.9", "test_cmd": "true"}]'


@pytest.mark.parametrize("text", ["{", '[{"instance_id": "a"}]', '[{"sdist": 3}]', NO_NAME])
def test_broken_specs_are_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "specs.json"
    path.write_text(text)
    with pytest.raises(InputError, match="not a list of instance specs"):
        read_specs(path)


# Real instances


def test_real_specs_and_rows_make_tasks(shared_dir: Path) -> None:
    folder = shared_dir / "instances"
    lines = (folder / "rows.jsonl").read_text().splitlines()
    rows = {row["instance_id"]: row for row in map(json.loads, lines)}
    for spec in read_specs(folder / "instances.json"):
        task = make_task(spec, rows[spec.instance_id])
        assert task.grading.fail_to_pass
        assert not set(task.grading.pass_to_pass) & {e.test for e in spec.p2p_exceptions}


def test_a_missing_package_is_one_clear_error(home: Path, tmp_path: Path) -> None:
    python = find_python(THIS_PYTHON)
    with pytest.raises(ImageError, match=r"source archive tinycalc==9\.9.*No matching") as caught:
        fetch_sdist(python.executable, "tinycalc==9.9", tmp_path)
    assert "pip config list" in caught.value.hint
    with pytest.raises(ImageError, match="cannot fetch wheels"):
        fetch_wheels(python, ["no-such-project-here==1.0"], tmp_path)


FLASK = "pallets__flask-4045"


def rollout(rows: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["rollout", "--instance", FLASK, "--tasks", str(rows), *options]
    command = [sys.executable, "-m", "swerl", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("spec", shipped().values(), ids=shipped())
def test_an_environment_is_pinned_whole(spec: SourceSpec) -> None:
    assert spec.frozen and spec.sha256 and spec.dataset and spec.split
    assert all(pin.count("==") == 1 for pin in spec.pins)


def test_a_file_without_the_row_is_two_lines(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instance_id": "a__b-1"}\n')
    done = rollout(rows, tmp_path)
    assert done.returncode == 2
    _, error, hint = done.stderr.splitlines()
    assert FLASK in error
    assert "--tasks" in hint


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a-1.tar.gz"
    archive.write_bytes(b"other")
    with pytest.raises(ImageError, match="another checksum"):
        _check_sum(archive, "0" * 64)


@pytest.mark.integration
def test_one_command_takes_a_row_to_its_verdict(shared_dir: Path, tmp_path: Path) -> None:
    rows = shared_dir / "instances" / "rows.jsonl"
    for script, verdict in (("gold", "solved"), ("noop", "unsolved")):
        done = rollout(rows, tmp_path, "--json", "--engine", f"scripted:{script}")
        if any(reason in done.stderr for reason in ("no Python", "cannot fetch", "bubblewrap")):
            pytest.skip(done.stderr.strip())
        assert json.loads(done.stdout)["verdict"] == verdict, done.stderr
