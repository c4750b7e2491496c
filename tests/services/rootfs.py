"""Files for a small machine, taken from this one: programs and the libraries that they load."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from .daemon import CannotRunError

AGENT_ID = 1000
WORKDIR = "/testbed"

_PROGRAMS = (
    "sh bash [ arch base64 basename cat chmod chown chroot cp cut date dd df dirname du echo env "
    "expr false find git grep gzip head hostname id kill ln ls md5sum mkdir mkfifo mknod mktemp "
    "mount mv nice nproc od paste pgrep pkill printenv printf ps pwd readlink realpath rm rmdir "
    "sed seq setpriv setsid sha256sum sleep sort stat stdbuf stty su sync tail tar tee test "
    "timeout top touch tr true truncate tty umount uname uniq unshare wc whoami xargs yes "
)
_AGENT_LIBRARIES = (
    "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1",
)  # fmt: skip
"""What Node.js loads, and every common image has."""
_FOLDERS = {
    "/root": (0, 0o700), "/tmp": (0, 0o1777), "/var/tmp": (0, 0o1777), "/opt": (0, 0o755),
    "/home": (0, 0o755), "/proc": (0, 0o555), "/sys": (0, 0o555), "/dev": (0, 0o755),
    "/run": (0, 0o755), "/etc": (0, 0o755),
}  # fmt: skip
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n"
    f"agent:x:{AGENT_ID}:{AGENT_ID}:agent:/home/agent:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{AGENT_ID}:\n",
    "gitconfig": "[user]\n\tname = Agent\n\temail = agent@sandbox.invalid\n"
    "[init]\n\tdefaultBranch = main\n",
    "os-release": 'ID=swerl-test\nPRETTY_NAME="swerl test image"\n',
}
_PYTHON_FACTS = """
import json, sqlite3, ssl, sys, sysconfig
print(json.dumps([sys.executable, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]))
"""
_SKIPPED = {"__pycache__", "test", "idlelib", "tkinter", "ensurepip", "dist-packages",
            "site-packages", "lib2to3", "turtledemo"}  # fmt: skip
_SKIPPED_ENDS = (".a", ".pyc")


def write_system(tar: tarfile.TarFile) -> None:
    """Add the programs, their libraries and /etc. Raises CannotRunError where one is missing."""
    for name in ("bin", "lib", "lib64", "sbin"):
        _add_link(tar, f"/{name}", f"usr/{name}")
    for path, (owner, mode) in _FOLDERS.items():
        add_folder(tar, path, owner, mode)
    for name, text in _ETC.items():
        _add_text(tar, f"/etc/{name}", text)
    python, library, *trees = _python()
    programs = {name: _which(name) for name in _PROGRAMS.split()} | {"python3": python}
    files = {Path(f"/usr/bin/{name}"): path for name, path in programs.items()}
    tree_files = [path for tree in {library, *trees} for path in _walk(tree)]
    modules = [path for path in tree_files if path.suffix == ".so"]
    files |= {path: path for path in (*tree_files, *_libraries([*programs.values(), *modules]))}
    merged = {_merged(target): source for target, source in files.items()}
    for path, source in sorted(merged.items()):
        _add_file(tar, path, source)


def add_folder(tar: tarfile.TarFile, path: str, owner: int = 0, mode: int = 0o755) -> None:
    """Add a folder."""
    entry = _entry(path, tarfile.DIRTYPE, owner)
    entry.mode = mode
    tar.addfile(entry)


def _add_text(tar: tarfile.TarFile, path: str, text: str) -> None:
    entry = _entry(path, tarfile.REGTYPE)
    entry.mode, entry.size = 0o644, len(text.encode())
    tar.addfile(entry, io.BytesIO(text.encode()))


def _add_link(tar: tarfile.TarFile, path: str, target: str) -> None:
    entry = _entry(path, tarfile.SYMTYPE)
    entry.linkname = target
    tar.addfile(entry)


def _add_file(tar: tarfile.TarFile, path: str, source: Path) -> None:
    entry = _entry(path, tarfile.REGTYPE)
    status = source.stat()
    entry.mode, entry.size = status.st_mode & 0o755, status.st_size  # no setuid
    with source.open("rb") as file:
        tar.addfile(entry, file)


def _entry(path: str, kind: bytes, owner: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.type, entry.uid, entry.gid, entry.mtime = kind, owner, owner, 1_700_000_000
    return entry


def _merged(path: Path) -> str:
    """Return a path as it is where /bin and /lib are links into /usr."""
    top = path.parts[1]
    return f"/usr{path}" if top in ("bin", "lib", "lib64", "sbin") else str(path)


def _which(name: str) -> Path:
    path = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
    if not path:
        message = f"{name} is not installed, and the test image needs it"
        raise CannotRunError(message)
    return Path(path).resolve()


def _python() -> tuple[Path, Path, Path]:
    """Return a Python with ssl and sqlite3, and the folders of its standard library."""
    for name in ("/usr/bin/python3", shutil.which("python3") or ""):
        asked = subprocess.run([name, "-I", "-S", "-c", _PYTHON_FACTS], capture_output=True)
        if asked.returncode == 0:
            found = [Path(text).resolve() for text in json.loads(asked.stdout)]
            return found[0], found[1], found[2]
    message = "no Python here has ssl and sqlite3, and the test image needs one"
    raise CannotRunError(message)


def _walk(tree: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (
            Path(folder, name)
            for name in names
            if not name.endswith(_SKIPPED_ENDS) and Path(folder, name).is_file()
        )


def _libraries(programs: Iterable[Path]) -> set[Path]:
    """Return what the dynamic loader would open for these programs and for the agents' own."""
    told = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
    words = [word for line in told.splitlines() if line[:1].isspace() for word in line.split()]
    found = {Path(word) for word in words if word.startswith("/") and not word.endswith(":")}
    beside = {path.parent for path in found if path.name.startswith("libc.so.")}
    more = [Path("/usr", *folder.parts[1:], name) for folder in beside for name in _AGENT_LIBRARIES]
    return found | {path for path in more if path.exists()}
