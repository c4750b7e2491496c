"""Image references of the `local` backend: `host`, `built:<name>` and `dir:/folder`.

host          this machine's own programs, read-only; everything private is absent
built:<name>  those, with layers over them; kept in the cache folder by `write_image`
dir:/folder   those, with the folder's content in the workdir
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerl.errors import ImageError
from swerl.sandbox import Mount
from swerl.secrets import cache_dir

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PROGRAM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix/store")
_SETTINGS = (
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "protocols", "services",
)  # fmt: skip
_FILES = {
    "/etc/passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        "agent:x:1000:1000:agent:/home/agent:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "/etc/group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
    "/etc/hostname": "sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "/etc/resolv.conf": "",
    "/etc/gitconfig": (
        "[user]\n\tname = agent\n\temail = agent@sandbox\n"
        "[safe]\n\tdirectory = *\n[init]\n\tdefaultBranch = main\n[gc]\n\tauto = 0\n"
    ),
}
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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


def resolve(image: str) -> LocalImage:
    """Return what a reference stands for. Raises ImageError, also where nothing is there."""
    kind, _, rest = image.partition(":")
    if image == "host":
        return host()
    if kind == "built" and rest:
        return _resolve_built(rest)
    if kind == "dir" and rest.startswith("/"):
        folder = Path(rest)
        if not folder.is_dir():
            message = f"no folder at {folder}"
            raise ImageError(message, hint="make the task's files again")
        base = host()
        return LocalImage(base.binds, base.links, base.files, base.env, content=folder)
    message = f"the local sandbox cannot open image {image!r}"
    raise ImageError(message, hint="it opens `host`, `built:NAME` and `dir:/ABSOLUTE/FOLDER`")


def image_folder(name: str) -> Path:
    """Return where `built:<name>` lies, present or not. Raises ImageError on a bad name."""
    if not _NAME.fullmatch(name):
        message = f"{name!r} cannot name an image"
        raise ImageError(message, hint="use letters, digits, dots, dashes and underscores")
    return cache_dir() / "images" / name


def write_image(
    name: str,
    layers: Sequence[str | Path],
    binds: Sequence[str | Path] = (),
    env: Mapping[str, str] | None = None,
) -> Path:
    """Write `image.json` of `built:<name>` last and at once, and return its folder.

    `layers` are folders, lowest first, relative to the image's folder or absolute; `binds` are
    host folders that the sandbox sees read-only at the same path.
    """
    folder = image_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    body = {"layers": [*map(str, layers)], "binds": [*map(str, binds)], "env": dict(env or {})}
    part = folder / "image.json.part"
    part.write_text(json.dumps(body, indent=2) + "\n")
    part.replace(folder / "image.json")
    return folder


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
    path_variable = _SYSTEM_PATH
    if not python.is_relative_to("/usr"):
        binds.append(Mount(python, str(python)))
        path_variable = f"{python}/bin:{_SYSTEM_PATH}"
    env = {
        "PATH": path_variable, "HOME": "/home/agent", "USER": "agent", "LOGNAME": "agent",
        "SHELL": "/bin/bash", "LANG": "C.UTF-8", "TERM": "dumb",
    }  # fmt: skip
    return LocalImage(tuple(binds), links, _FILES, env)


def _resolve_built(name: str) -> LocalImage:
    folder = image_folder(name)
    try:
        body = json.loads((folder / "image.json").read_text())
        layers = tuple(folder / layer for layer in body["layers"])
        binds = tuple(Mount(Path(path), path) for path in body["binds"])
        env = dict(body["env"])
    except FileNotFoundError as error:
        message = f"image built:{name} is not on this machine"
        raise ImageError(message, hint="build it with `swerl images build`") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"image built:{name} has an unreadable image.json: {error}"
        raise ImageError(message, hint=f"remove {folder} and build it again") from error
    for path in (*layers, *(bind.source for bind in binds)):
        if not path.exists():
            message = f"image built:{name} lacks {path}"
            raise ImageError(message, hint=f"remove {folder} and build it again")
    base = host()
    layers = layers or (_empty_layer(folder),)
    return LocalImage(base.binds + binds, base.links, base.files, {**base.env, **env}, layers)


def _empty_layer(folder: Path) -> Path:
    layer = folder / "empty"
    layer.mkdir(exist_ok=True)
    return layer
