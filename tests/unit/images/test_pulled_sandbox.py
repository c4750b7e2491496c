"""From a registry into a running sandbox, with nothing in between."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import ImageError, SandboxUnavailableError
from swerl.core.sandbox import Limits
from swerl.images.gc import collect
from swerl.images.store import default_store
from swerl.recipe.check import plugin_options
from swerl.recipe.schema import PluginSection
from swerl.rollout import wiring
from tests.services import image as base_image
from tests.services.daemon import CannotRunError


@pytest.fixture
def reference(registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real image in a real registry, and an empty store."""
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed (apt-get install skopeo)")
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SWERL_STATE", str(tmp_path / "state"))
    try:
        made = base_image.build(tmp_path / "base")
    except CannotRunError as error:
        pytest.skip(str(error))
    name = f"{registry.host}/swe/base:1"
    copy = ["skopeo", "copy", "-q", "--dest-tls-verify=false", f"oci:{made.layout}:1"]
    subprocess.run([*copy, f"docker://{name}"], check=True)
    return name


def open_backend(**settings: Any) -> Any:
    options = plugin_options(
        "sandboxes", PluginSection(type="local", **settings), section="sandbox"
    )
    return wiring.open_backend("local", options, run="test", warn=lambda _: None)


async def test_first_sandbox_pulls_and_gc_waits_for_the_last(reference: str) -> None:
    backend = open_backend()
    try:
        async with backend.open(reference, Limits(), workdir="/testbed") as sandbox:
            done = await sandbox.run(["sh", "-c", "cat /etc/os-release; echo x > /etc/new"])
            assert b"swerl-test" in done.stdout
            freed = await asyncio.to_thread(collect, default_store(), [])
            assert [named.reference for named in freed.in_use] == [reference]
            assert (await sandbox.run(["git", "--version"])).exit_code == 0
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    async with backend.open(reference, Limits(), workdir="/testbed") as sandbox:
        assert (await sandbox.run(["ls", "/etc/new"])).exit_code != 0
    assert len(collect(default_store(), []).removed) == 1


async def test_never_names_the_command_that_pulls(reference: str) -> None:
    with pytest.raises(ImageError, match="is not on this machine") as caught:
        async with open_backend(pull="never").open(reference, Limits(), workdir="/testbed"):
            pass
    assert f"swerl images pull {reference}" in caught.value.hint
