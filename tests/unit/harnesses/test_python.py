"""The Python for sandboxes: it runs where there is nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from swerl.core.errors import ImageError
from swerl.core.sandbox import Mount
from swerl.harnesses import mini_swe_agent as _python


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Mount:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWERL_CACHE", str(tmp_path_factory.mktemp("cache")))
        return _python.mount()


def test_it_runs_in_an_image_without_libraries_or_a_shell(bundle: Mount, tmp_path: Path) -> None:
    shutil.copytree(bundle.source, tmp_path / bundle.target.lstrip("/"))
    code = "import asyncio, ssl, subprocess, sys; print(sys.prefix, *sys.path)"
    words = ["unshare", "--user", "--map-root-user", f"--root={tmp_path}", "--wd=/"]
    if subprocess.run([*words[:3], "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run([*words, *_python.command("-c", code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word.startswith(bundle.target) for word in done.stdout.split())


def test_a_host_without_ldd_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match="ldd") as caught:
        _python.mount()
    assert caught.value.hint


def test_it_takes_nothing_from_an_environment(bundle: Mount, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the image was asked')")
    done = subprocess.run(
        _python.command("-c", "import json; print(json.dumps(1))", home=str(bundle.source)),
        env={"PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nowhere", "PYTHONSTARTUP": "/nowhere"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1\n", done.stderr
