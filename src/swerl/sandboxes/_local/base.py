"""What every image of the `local` backend is made of, and the base of those without a system."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swerl.core.sandbox import Mount

_PROGRAM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix/store")
_SETTINGS = (
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "protocols", "services",
)  # fmt: skip
NETWORK_FILES = {
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
    "/etc/hostname": "sandbox\n",
    "/etc/resolv.conf": "",
}
GITCONFIG = (
    "[user]\n\tname = agent\n\temail = agent@sandbox\n"
    "[safe]\n\tdirectory = *\n[init]\n\tdefaultBranch = main\n[gc]\n\tauto = 0\n"
)
_FILES = {
    "/etc/passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        "agent:x:1000:1000:agent:/home/agent:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "/etc/group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "/etc/gitconfig": GITCONFIG,
    **NETWORK_FILES,
}
AGENT_ENV = {
    "HOME": "/home/agent", "USER": "agent", "LOGNAME": "agent", "LANG": "C.UTF-8", "TERM": "dumb",
}  # fmt: skip
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class LocalImage:
    """What a reference stands for on this machine."""

    binds: tuple[Mount, ...]
    links: Mapping[str, str]
    """Symbolic links of the base: path -> target."""
    files: Mapping[str, str]
    """Small files of the base: path -> text."""
    env: Mapping[str, str]
    layers: tuple[Path, ...] = ()
    """Folders over the base, lowest first; with any, the whole root is writable."""
    content: Path | None = None
    """Folder whose content the workdir starts with."""
    is_whole: bool = False
    """Whether the layers are a whole system: the base then lies over them, without programs."""


@functools.cache
def host() -> LocalImage:
    """Return the base of all images: this machine's programs and this Python."""
    binds, links = [], {}
    for name in _PROGRAM_FOLDERS:
        path = Path("/", name)
        if path.is_symlink():
            links[str(path)] = str(path.readlink())
        elif path.is_dir():
            binds.append(Mount(path, str(path)))
    binds += [Mount(path, str(path)) for name in _SETTINGS if (path := Path("/etc", name)).exists()]
    python = Path(sys.base_prefix).resolve()
    path_variable = SYSTEM_PATH
    if not python.is_relative_to("/usr"):
        binds.append(Mount(python, str(python)))
        path_variable = f"{python}/bin:{SYSTEM_PATH}"
    env = {"PATH": path_variable, "SHELL": "/bin/bash", **AGENT_ENV}
    return LocalImage(tuple(binds), links, _FILES, env)
