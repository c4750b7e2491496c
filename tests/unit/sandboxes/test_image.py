"""The images of the `local` backend, and the layers made from sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.core.errors import ImageError, SandboxError
from swerl.core.sandbox import Limits
from swerl.images.local import image_folder
from swerl.sandboxes import local

from .helpers import refuse, sh, write_image

LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=60)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "odd, name: repo"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "a.py").write_text("a = 1\n")
    (folder / "link").symlink_to("pkg/a.py")
    return folder


async def test_a_folder_fills_the_workdir_and_is_never_changed(
    backend: local.LocalBackend, repository: Path
) -> None:
    for _ in range(2):
        async with backend.open(f"dir:{repository}", LIMITS, workdir="/work/repo") as sandbox:
            assert await sh(sandbox, "pwd; cat link") == "/work/repo\na = 1\n"
            await sh(sandbox, "echo b > pkg/a.py && rm link && rm -r pkg && mkdir pkg && ls -A pkg")
            await sandbox.write("/work/repo/new", b"")
            assert await sh(sandbox, "ls -A") == "new\npkg\n"
    assert (repository / "pkg" / "a.py").read_text() == "a = 1\n"
    assert sorted(path.name for path in repository.iterdir()) == ["link", "pkg"]


async def test_captured_changes_can_become_a_layer(backend: local.LocalBackend) -> None:
    write_image("base", [])
    folder = image_folder("base")
    async with backend.open("built:base", LIMITS, workdir="/testbed") as sandbox:
        await sh(sandbox, "mkdir -p /opt/tool && echo 1 > /opt/tool/keep && echo 2 > gone")
        await sh(sandbox, "echo temporary > /tmp/f")
        await sandbox.capture(folder / "first")
    write_image("base", ["first"])
    assert not (folder / "first" / "tmp").exists()
    async with backend.open("built:base", LIMITS, workdir="/testbed") as sandbox:
        await sh(sandbox, "rm gone && rm -r /opt/tool && mkdir /opt/tool && echo 3 > /opt/tool/new")
        await sandbox.capture(folder / "second")
    write_image("base", ["first", "second"])
    async with backend.open("built:base", LIMITS, workdir="/testbed") as sandbox:
        assert await sh(sandbox, "ls -A . /opt/tool") == ".:\n\n/opt/tool:\nnew\n"


async def test_a_sandbox_without_an_overlay_has_nothing_to_capture(
    backend: local.LocalBackend, tmp_path: Path
) -> None:
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        with pytest.raises(SandboxError, match="its changes are not recorded"):
            await sandbox.capture(tmp_path / "layer")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("built:absent", "not on this machine"),
        ("built:../up", "cannot name an image"),
        ("dir:/no/such/folder", "no folder"),
        ("dir:relative", "cannot open image"),
        ("ubuntu:22.04", "not on this machine"),
        ("Not An Image", "cannot open image"),
    ],
)
async def test_a_missing_image_is_one_clear_error(image: str, message: str) -> None:
    error = await refuse(local.build(local.Options()), image, ImageError)
    assert message in str(error)


@pytest.mark.parametrize(
    "body", ["not json", "{}", '{"layers": ["absent"], "binds": [], "env": {}}']
)
async def test_a_broken_image_names_its_folder(body: str) -> None:
    folder = write_image("broken", [])
    (folder / "image.json").write_text(body)
    error = await refuse(local.build(local.Options()), "built:broken", ImageError)
    assert str(folder) in error.hint
