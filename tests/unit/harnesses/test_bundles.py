"""Bundles: made once, checked, never half there."""

from __future__ import annotations

import io
import json
import shutil
import stat
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swerl.core.errors import ImageError, InputError
from swerl.harnesses import _bundles

_NPM = """#!{python}
import pathlib, shutil, sys
calls = pathlib.Path({folder!r}, "calls")
calls.open("a").write(sys.argv[1] + "\\n")
if "9.9.9" in "".join(sys.argv):
    sys.exit("npm error code ETARGET")
if "8.8.8" in "".join(sys.argv) and sys.argv[1] == "install":
    missing = "No matching version found for @some/ui@8.8.8."
    sys.exit("npm error code ETARGET\\nnpm error notarget " + missing)
if "0.0.0" in "".join(sys.argv):
    sys.exit("npm warn old lockfile\\nnpm error network request failed")
if sys.argv[1] in ("ci", "install"):
    folder = pathlib.Path(sys.argv[sys.argv.index("--prefix") + 1])
    program = folder / "node_modules" / "tool"
    program.mkdir(parents=True)
    for name in ("cli.js", "cli.js.map", "cli.d.ts"):
        (program / name).write_text((folder / "package.json").read_text())
    if sys.argv[1] == "install":
        (folder / "package-lock.json").write_text("npm's own")
elif sys.argv[1] == "pack":
    target = sys.argv[sys.argv.index("--pack-destination") + 1]
    shutil.copy(pathlib.Path({folder!r}, "tool.tgz"), target)
elif "dependencies" in sys.argv:
    print('{{"@some/ui": "^1.2.3", "@some/old": "^1.0.0", "other": "^1.2.3"}}')
else:
    print(pathlib.Path({folder!r}, "integrity").read_text())
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an `npm` that serves one package from disk, first on PATH."""
    folder = tmp_path / "registry"
    folder.mkdir()
    with tarfile.open(folder / "tool.tgz", "w:gz") as archive:
        for name, text in (("package/cli.js", b"go()"), ("package/vendor/rg", b"search")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    (folder / "integrity").write_text(f'"{_bundles._sha512(folder / "tool.tgz")}"')
    npm = folder / "npm"
    npm.write_text(_NPM.format(python=sys.executable, folder=str(folder)))
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    return folder


def _packs(registry: Path) -> int:
    return (registry / "calls").read_text().split().count("pack")


def test_programs_may_be_executed_whatever_the_tarball_says(registry: Path) -> None:
    package = _bundles.fetch("@some/tool", "1.2.5", programs=r".*/rg")
    assert (package / "vendor" / "rg").stat().st_mode & stat.S_IXUSR
    assert not (package / "cli.js").stat().st_mode & stat.S_IXUSR


def test_tree_is_installed_once_without_what_never_runs(registry: Path) -> None:
    tree = _bundles.fetch_tree("@some/tool", "1.2.3")
    assert [path.name for path in (tree / "node_modules" / "tool").iterdir()] == ["cli.js"]
    assert tree.parts[-3:] == ("agents", "tool", "1.2.3")
    assert _bundles.fetch_tree("@some/tool", "1.2.3") == tree
    assert (registry / "calls").read_text().split() == ["view", "install"]
    assert json.loads((tree / "package.json").read_text())["dependencies"] == {
        "@some/tool": "1.2.3"
    }


def test_what_is_released_with_a_program_is_taken_of_its_release(registry: Path) -> None:
    tree = _bundles.fetch_tree("@some/tool", "1.2.3")
    assert json.loads((tree / "package.json").read_text())["overrides"] == {"@some/ui": "1.2.3"}


def test_a_package_that_is_missing_below_a_program_is_named(registry: Path) -> None:
    with pytest.raises(InputError, match=r"no @some/ui@8\.8\.8, which @some/tool@8\.8\.8 needs"):
        _bundles.fetch_tree("@some/tool", "8.8.8")


def test_a_lock_pins_the_whole_tree_and_is_recorded(registry: Path) -> None:
    lock = registry / "tool.json"
    lock.write_text("{}")
    tree = _bundles.fetch_tree("@some/tool", "1.2.3", lock=lock)
    assert (registry / "calls").read_text().split() == ["ci"]
    assert json.loads((tree / "bundle.json").read_text())["integrity"] == _bundles._sha512(lock)


def test_the_users_settings_of_npm_are_not_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    monkeypatch.setenv("npm_config_dry_run", "true")
    (tmp_path / "package.json").write_text('{"name": "tool", "version": "1.2.3"}')
    npm = ["npm", "pack", str(tmp_path), *_bundles._QUIET, "--pack-destination", str(tmp_path)]
    _bundles.call(npm, "tool")
    assert (tmp_path / "tool-1.2.3.tgz").exists()


def test_package_is_unpacked_once_under_its_name_and_version(registry: Path) -> None:
    package = _bundles.fetch("@some/tool", "1.2.3")
    assert (package / "cli.js").read_bytes() == b"go()"
    assert package.parts[-4:] == ("agents", "tool", "1.2.3", "package")
    assert _bundles.fetch("@some/tool", "1.2.3") == package
    assert _packs(registry) == 1


def test_concurrent_fetches_download_once(registry: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: _bundles.fetch("tool", "1.2.3"), range(8)))
    assert len(found) == 1
    assert _packs(registry) == 1


def test_tarball_with_another_hash_is_refused_and_leaves_nothing(registry: Path) -> None:
    with pytest.raises(ImageError, match="sha512"):
        _bundles.fetch("tool", "1.2.3", integrity="sha512-AAAA")
    assert not list(Path(registry.parent, "cache").rglob("cli.js"))


def test_damaged_bundle_is_made_again(registry: Path) -> None:
    package = _bundles.fetch("tool", "1.2.3")
    (package / "vendor" / "rg").write_bytes(b"cut")
    assert (_bundles.fetch("tool", "1.2.3") / "vendor" / "rg").read_bytes() == b"search"
    assert _packs(registry) == 2


def test_bundle_left_half_made_by_a_killed_process_is_replaced(registry: Path) -> None:
    leftover = registry.parent / "cache" / "agents" / "tool" / ".making-1.2.3"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("x")
    package = _bundles.fetch("tool", "1.2.3")
    assert not (package.parent / "junk").exists()
    assert not leftover.exists()


def test_network_failure_shows_npms_own_reason(registry: Path) -> None:
    with pytest.raises(ImageError, match="network request failed") as caught:
        _bundles.fetch("tool", "0.0.0")
    assert "network" in caught.value.hint


@pytest.mark.parametrize(
    ("package", "version"), [("../up", "1.0.0"), ("tool", "latest"), ("--flag", "1.0.0")]
)
def test_names_that_could_reach_elsewhere_are_refused(package: str, version: str) -> None:
    for fetch in (_bundles.fetch, _bundles.fetch_tree):
        with pytest.raises(InputError, match="does not name one npm package version"):
            fetch(package, version)


def test_hosts_node_becomes_a_bundle_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if _bundles._host_node(_bundles._MIN_NODE) is None:
        pytest.skip("this machine has no self-contained Node")
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path))
    node = _bundles.node() / "bin" / "node"
    assert subprocess.run([node, "-p", "6 * 7"], capture_output=True, text=True).stdout == "42\n"
