"""Task folders become images of a real dockerd, under the names that their Tasks ask for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.errors import ImageError, InputError
from swerl.core.sandbox import Limits
from swerl.images.docker_build import Network, build_folders
from swerl.sandboxes import docker
from swerl.tasks.datasets import find_converter
from swerl.tasks.rows import file_rows


@pytest.fixture
def daemon(dockerd: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The daemon that the program `docker` talks to."""
    if not shutil.which("docker"):
        pytest.skip("needs the program docker")
    monkeypatch.setenv("DOCKER_HOST", dockerd)
    return dockerd


def make_folder(root: Path, name: str, dockerfile: str) -> Path:
    folder = root / name
    for path, text in {
        "instruction.md": "Mend it.",
        "task.toml": 'version = "1.0"\n',
        "tests/test.sh": "echo 1 >/logs/verifier/reward.txt\n",
        "environment/Dockerfile": dockerfile,
        "environment/words.txt": f"for {name}\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


async def test_a_folders_image_boots_under_its_tasks_name(
    daemon: str, docker_image: str, tmp_path: Path
) -> None:
    dockerfile = f"FROM {docker_image}\nCOPY words.txt /words.txt\nWORKDIR /\n"
    make_folder(tmp_path, "one", dockerfile)
    make_folder(tmp_path, "published", f"FROM {docker_image}\n")
    rows = {row["task_id"]: row for row in file_rows(tmp_path)}  # type: ignore[index]
    task = find_converter("harbor").to_task(rows["one"])  # type: ignore[arg-type]

    first, again = (list(build_folders(tmp_path, network=Network.NONE)) for _ in range(2))

    assert [(one.image, one.is_new) for one in first] == [(task.image, True)]
    assert [(one.image, one.is_new) for one in again] == [(task.image, False)]
    backend = docker.build(docker.Options(base_url=daemon))
    async with backend.open(task.image, Limits(), workdir="/") as sandbox:
        assert await sandbox.read("/words.txt") == b"for one\n"


def test_a_folder_that_does_not_build_stops_no_other(
    daemon: str, docker_image: str, tmp_path: Path
) -> None:
    make_folder(tmp_path, "bad", f"FROM {docker_image}\nCOPY absent /absent\n")
    make_folder(tmp_path, "good", f"FROM {docker_image}\nCOPY words.txt /w\n")

    bad, good = build_folders(tmp_path, network=Network.NONE)

    assert "absent" in str(bad.error) and "--network default" in bad.error.hint  # type: ignore[union-attr]
    assert good.image and not good.error


def test_without_a_daemon_there_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    make_folder(tmp_path, "one", "FROM x\nRUN true\n")
    with pytest.raises(ImageError, match=r"no Docker daemon is running|not installed") as caught:
        list(build_folders(tmp_path, network=Network.NONE))
    assert "swerl doctor" in caught.value.hint


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no task folder"):
        list(build_folders(tmp_path, network=Network.NONE))


def test_the_command_builds_and_prints_failures_and_the_next_step(
    daemon: str, docker_image: str, tmp_path: Path
) -> None:
    make_folder(tmp_path, "bad", f"FROM {docker_image}\nCOPY absent /absent\n")
    make_folder(tmp_path, "fine", f"FROM {docker_image}\nCOPY words.txt /w\n")

    done = CliRunner().invoke(typer_app, ["images", "build", str(tmp_path)])

    assert done.exit_code == 1, done.output
    for part in ("localhost/fine:", "bad: docker build failed", "1 image built, 0 stood, 1 failed"):
        assert part in done.output
    assert f"swerl convert harbor --rows {tmp_path}" in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{folder}", "--network", "host"], "unknown network 'host'"),
        (["{folder}/absent.json"], "absent.json"),
    ],
)
def test_wrong_input_is_one_clear_error(tmp_path: Path, words: list[str], told: str) -> None:
    words = [word.format(folder=tmp_path) for word in words]
    with pytest.raises(InputError, match=told):
        CliRunner().invoke(typer_app, ["images", "build", *words], catch_exceptions=False)
