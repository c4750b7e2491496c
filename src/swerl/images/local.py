"""Image references of the `local` backend.

host          this machine's own programs, read-only; everything private is absent
built:<name>  those, with layers over them; kept in the cache folder by `images build`
dir:/folder   those, with the folder's content in the workdir
snapshot:<id> the image of a sandbox with its changes, a layer in the store
any other     the name of an OCI image in the store

A sandbox of an OCI image shows nothing of the host. A few files go over the image: the accounts,
with `agent` before the image's own, and names for a machine without a network.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from swerl.core.errors import ImageError, InputError
from swerl.core.image_reference import is_local, parse
from swerl.core.sandbox import Mount
from swerl.core.secrets import cache_dir
from swerl.images.layer_folder import OPAQUE
from swerl.images.store import Snapshot, StoredImage, default_store

_PROGRAM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix/store")
_SETTINGS = (
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "protocols", "services", "java-*-openjdk", "maven/m2.conf", "maven/logging",
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
_SHELLS = ("/bin/bash", "/usr/bin/bash")
_MAX_ACCOUNTS = 1 << 20
"""Largest number of bytes read of an account file; real ones have a few thousand."""
_SNAPSHOT = "snapshot"
_ANY_NAME = ("utf-8", "surrogateescape")
_MAX_FINGERPRINTED = 50_000
"""Most files of a `dir:` image that are compared, which takes about 0.3 s."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image, resolved to paths on this machine."""

    binds: tuple[Mount, ...]
    links: Mapping[str, str]
    """Symbolic links of the base: path -> target."""
    files: Mapping[str, str]
    """Small files of the base: path -> text."""
    env: Mapping[str, str]
    layers: tuple[Path, ...] = ()
    """Folders over the base, lowest first; if there are any, the whole root is writable."""
    content: Path | None = None
    """Folder with the initial content of the workdir."""
    is_whole: bool = False
    """True if the layers are a complete system. The base then goes over them, without programs."""
    over: tuple[Path, ...] = ()
    """Folders of snapshots over everything else, lowest first."""


@contextmanager
def use(image: str) -> Iterator[LocalImage]:
    """Yield the image of a reference, and keep it in the store meanwhile. Raises ImageError."""
    kind = image.partition(":")[0]
    if image == "host":
        yield host()
    elif kind == "built":
        yield _resolve_built(image)
    elif kind == "dir":
        yield _resolve_folder(image)
    elif kind == _SNAPSHOT:
        with _use_snapshot(image) as stored:
            yield stored
    else:
        with _use_stored(image) as stored:
            yield stored


def snapshot_id(name: str) -> str:
    """Return the layer id of the snapshot of this name; its reference is `snapshot:` and the id."""
    return f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"


def identify(image: str) -> str:
    """Return a text that changes with an image's content; empty if that is unknown."""
    kind, _, rest = image.partition(":")
    with suppress(OSError, ImageError, InputError):
        if kind == "dir":
            return _fingerprint(rest)
        if kind == "built":
            folder = image_folder(rest)
            layers = [layer.stat() for layer in _resolve_built(image).layers]
            stats = [(folder / "image.json").stat(), *layers]
            return " ".join(f"{status.st_ino}.{status.st_mtime_ns}" for status in stats)
        if kind == _SNAPSHOT:
            return image if default_store().has_layer(rest) else ""
        if kind != "host":
            return default_store().named(image).digest
    return ""


def snapshot_of(image: str, workdir: str, name: str) -> Snapshot:
    """Return the record of the snapshot `name` that is taken of a sandbox of `image`."""
    kind, _, rest = image.partition(":")
    digest, below = "", workdir if kind == "dir" else ""
    if kind == _SNAPSHOT:
        under = default_store().snapshot(rest)
        digest, below = under.digest, under.workdir
    elif not is_local(image):
        origin = default_store().named(image)
        digest, image = origin.digest, str(parse(origin.reference).pinned(origin.digest))
    return Snapshot(image, identify(image), digest, below, name)


def image_folder(name: str) -> Path:
    """Return the folder of `built:<name>`, whether it exists or not. Raises ImageError."""
    if not _NAME.fullmatch(name):
        raise ImageError(
            f"{name!r} cannot name an image",
            hint="use letters, digits, dots, dashes and underscores",
        )
    return cache_dir() / "images" / name


@functools.cache
def host() -> LocalImage:
    """Return the base of images without a system: this machine's programs and this Python."""
    binds, links = [], {}
    for name in _PROGRAM_FOLDERS:
        path = Path("/", name)
        # On most systems /bin and /lib are links into /usr.
        if path.is_symlink():
            links[str(path)] = str(path.readlink())
        elif path.is_dir():
            binds.append(Mount(path, str(path)))
    binds += [Mount(path, str(path)) for path in host_settings()]
    python = Path(sys.base_prefix).resolve()
    path_variable = SYSTEM_PATH
    # A Python elsewhere is in none of the program folders.
    if not python.is_relative_to("/usr"):
        binds.append(Mount(python, str(python)))
        path_variable = f"{python}/bin:{SYSTEM_PATH}"
    env = {"PATH": path_variable, "SHELL": "/bin/bash", **AGENT_ENV}
    return LocalImage(tuple(binds), links, _FILES, env)


def host_settings() -> list[Path]:
    """Return the files below /etc that programs of this machine need, none with a secret."""
    return sorted(path for name in _SETTINGS for path in Path("/etc").glob(name))


def _resolve_folder(image: str) -> LocalImage:
    folder = Path(image.removeprefix("dir:"))
    if not folder.is_absolute():
        raise ImageError(
            f"the local sandbox cannot open image {image!r}", hint="use `dir:/ABSOLUTE/FOLDER`"
        )
    if not folder.is_dir():
        raise ImageError(f"no folder at {folder}", hint="write the task's files again")
    return replace(host(), content=folder)


def _resolve_built(image: str) -> LocalImage:
    name = image.removeprefix("built:")
    folder = image_folder(name)
    try:
        body = json.loads((folder / "image.json").read_text())
        layers = tuple(folder / layer for layer in body["layers"])
        binds = tuple(Mount(Path(path), path) for path in body["binds"])
        env = dict(body["env"])
    except FileNotFoundError as error:
        raise ImageError(
            f"image built:{name} is not on this machine", hint="build it with `swerl images build`"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageError(
            f"image built:{name} has an unreadable image.json: {error}",
            hint=f"remove {folder} and build it again",
        ) from error
    for path in (*layers, *(bind.source for bind in binds)):
        if not path.exists():
            raise ImageError(
                f"image built:{name} lacks {path}", hint=f"remove {folder} and build it again"
            )
    base = host()
    if not layers:  # with one, even an empty one, the whole root is writable
        layers = (folder / "empty",)
        layers[0].mkdir(exist_ok=True)
    return replace(base, binds=base.binds + binds, env={**base.env, **env}, layers=layers)


@contextmanager
def _use_snapshot(image: str) -> Iterator[LocalImage]:
    store, layer_id = default_store(), image.partition(":")[2]
    with store.using([layer_id]):
        snapshot = store.snapshot(layer_id)
        if identify(snapshot.base) != snapshot.identity:
            raise ImageError(
                f"{snapshot.base} has other content than when snapshot {layer_id} was taken",
                hint="take the snapshot again",
            )
        with suppress(OSError):  # `gc` keeps the snapshots that were used last
            os.utime(store.layer(layer_id) / "layer.json")
        with use(snapshot.base) as base:
            yield replace(base, over=(*base.over, store.layer_tree(layer_id)))


def _fingerprint(folder: str) -> str:
    """Return a digest of the names, kinds, sizes and times of a folder's files; empty if many."""
    digest, todo, num = hashlib.sha256(b"%d" % Path(folder).stat().st_mode), [folder], 0
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                facts = status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns
                digest.update(f"{entry.path}\0{facts}{status.st_ctime_ns}\n".encode(*_ANY_NAME))
                num += 1
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
        if num > _MAX_FINGERPRINTED:
            return ""
    return digest.hexdigest()


@contextmanager
def _use_stored(reference: str) -> Iterator[LocalImage]:
    try:
        with default_store().use(reference) as stored:
            yield _describe(stored)
    except InputError as error:
        message = f"the local sandbox cannot open image {reference!r}"
        hint = "use `host`, `built:NAME`, `dir:/ABSOLUTE/FOLDER` or the name of an OCI image"
        raise ImageError(message, hint=hint) from error


def _describe(stored: StoredImage) -> LocalImage:
    accounts = _accounts(stored.layers)
    env = {"PATH": SYSTEM_PATH, **AGENT_ENV, "SHELL": _shell(stored.layers), **stored.env}
    account = ("HOME", "USER", "LOGNAME")
    # The account is always the agent's, whatever the image sets.
    env |= {name: AGENT_ENV[name] for name in account}
    return LocalImage(
        binds=(), links={}, files=accounts, env=env, layers=stored.layers, is_whole=True
    )


@functools.lru_cache(maxsize=1024)
def _accounts(layers: tuple[Path, ...]) -> dict[str, str]:
    """Return the small files that go over an image, which contain the user `agent`."""
    shell = _shell(layers)
    # The first matching line of an account file counts.
    passwd = f"agent:x:1000:1000:agent:/home/agent:{shell}\n" + _read(layers, "passwd")
    files = {
        "/etc/passwd": passwd,
        "/etc/group": "agent:x:1000:\n" + _read(layers, "group"),
        **NETWORK_FILES,
    }
    if not _read(layers, "gitconfig"):
        files["/etc/gitconfig"] = GITCONFIG
    return files


@functools.lru_cache(maxsize=1024)
def _shell(layers: tuple[Path, ...]) -> str:
    return "/bin/bash" if any(_has(layers, path) for path in _SHELLS) else "/bin/sh"


def _has(layers: Sequence[Path], path: str) -> bool:
    return any((layer / path.lstrip("/")).is_file() for layer in layers)


def _read(layers: Sequence[Path], name: str) -> str:
    """Return the text of a file of /etc from the highest layer that has it; empty for a link."""
    with suppress(OSError):  # a link, or the mark of a removed file
        for layer in reversed(layers):
            with suppress(FileNotFoundError), _opened(layer / "etc", os.O_DIRECTORY) as etc:
                with suppress(FileNotFoundError), _opened(name, os.O_NONBLOCK, etc) as fd:
                    text = os.read(fd, _MAX_ACCOUNTS).decode("utf-8", "replace")
                    return text if text.endswith("\n") or not text else text + "\n"
                if any(attribute in OPAQUE for attribute in os.listxattr(etc)):
                    break
    return ""


@contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open a file of a layer, which is never a link."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)
