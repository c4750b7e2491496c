"""A Python that runs in every sandbox: the one that runs swerl, made portable.

Images of coding tasks have an old Python, another one, or none. So the interpreter, its standard
library, every shared library that these need and the C library's own loader become one bundle.
Started through that loader it takes nothing from the image, whatever C library that has.
"""

from __future__ import annotations

import platform
import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from swerl.core.errors import ImageError
from swerl.core.sandbox import Mount
from swerl.harnesses import _bundles

HOME = "/opt/swerl/agents/python"
_LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "tkinter",
    "turtledemo", "lib2to3", "ensurepip", "distutils", "pydoc_data", "lib-dynload", "sqlite3",
    "curses", "dbm",
}  # fmt: skip
"""Folders of the standard library that no agent imports."""
_LEFT_OUT_MODULES = re.compile(
    r"_tkinter|_test|_?xx|_ctypes_test|_curses|readline|_sqlite3|_g?dbm|nis|_crypt|ossaudio|spwd"
)
"""Compiled modules that need libraries of their own, or nobody needs."""
_CHECK = "import asyncio, ctypes, decimal, json, socket, ssl, subprocess, zlib"
_TIMEOUT_S = 120.0


def mount() -> Mount:
    """Return the bundle's mount, made on the first call. Raises ImageError where it cannot be."""
    version = f"{platform.python_version()}-{platform.machine()}"
    return Mount(_bundles.bundle("python", version, _fill), HOME)


def command(*arguments: str, home: str = HOME) -> list[str]:
    """Return the command line that runs the bundle's Python, apart from any environment."""
    loader = [f"{home}/lib/ld.so", "--library-path", f"{home}/lib", f"{home}/bin/python3"]
    return [*loader, "-I", "-S", "-B", "-X", "utf8", *arguments]


def _fill(folder: Path) -> str:
    if not sys.platform.startswith("linux"):
        raise ImageError(
            f"a Python for sandboxes cannot be made on {sys.platform}", hint="run swerl on Linux"
        )
    program = Path(sys.executable).resolve()
    stdlib = Path(sysconfig.get_path("stdlib"))
    _copy(program, folder / "bin" / "python3")
    library = folder / "lib" / stdlib.name
    shutil.copytree(stdlib, library, ignore=_unwanted)
    compiled = library / "lib-dynload"
    for module in _compiled_modules(stdlib.name):
        _copy(module, compiled / module.name)
    for source in _needed([program, *compiled.glob("*.so")]):
        name = "ld.so" if source.name.startswith("ld-") else source.name
        _copy(source, folder / "lib" / name)
    if roots := ssl.get_default_verify_paths().cafile:
        _copy(Path(roots), folder / "etc" / "cert.pem")
    _try_out(folder)
    return f"host python {platform.python_version()}"


def _unwanted(_: str, names: list[str]) -> set[str]:
    wanted = (".py", ".pyc")
    return {
        name
        for name in names
        if name in _LEFT_OUT
        or name.startswith("config-")
        or name.endswith((".opt-1.pyc", ".opt-2.pyc"))
        or (Path(name).suffix and not name.endswith(wanted))
    }


def _compiled_modules(library: str) -> Iterator[Path]:
    folder = Path(sys.base_exec_prefix, sys.platlibdir, library, "lib-dynload")
    for module in sorted(folder.glob("*.so")):
        if not _LEFT_OUT_MODULES.match(module.name):
            yield module


def _needed(programs: Sequence[Path]) -> Iterator[Path]:
    """Yield every shared library that these programs load, and the loader itself."""
    if not shutil.which("ldd"):
        raise ImageError(
            "ldd is not installed, so the libraries of this Python cannot be found",
            hint="install the C library's programs (libc-bin)",
        )
    listed = subprocess.run(
        ["ldd", *map(str, programs)], capture_output=True, text=True, timeout=_TIMEOUT_S
    ).stdout
    found = set(re.findall(r"(?:=> )?(/\S+) \(0x", listed))
    yield from map(Path, sorted(found))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _try_out(folder: Path) -> None:
    done = subprocess.run(
        command("-c", _CHECK, home=str(folder)), capture_output=True, text=True, env={}
    )
    if done.returncode:
        raise ImageError(
            f"this Python cannot be taken along: {done.stderr.strip()[-300:]}",
            hint="run swerl with a CPython for glibc",
        )
