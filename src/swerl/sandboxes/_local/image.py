"""Image references of the `local` backend.

host          this machine's own programs, read-only; everything private is absent
built:<name>  those, with layers over them; kept in the cache folder by `write_image`
dir:/folder   those, with the folder's content in the workdir
any other     the name of an OCI image in the store, which shows nothing of the host
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from swerl.core.errors import ImageError
from swerl.core.sandbox import Mount
from swerl.core.secrets import cache_dir
from swerl.sandboxes._local import stored
from swerl.sandboxes._local.base import LocalImage, host

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@contextmanager
def use(image: str) -> Iterator[LocalImage]:
    """Find what a reference stands for and keep it meanwhile. Raises ImageError."""
    kind = image.partition(":")[0]
    if image == "host":
        yield host()
    elif kind == "built":
        yield _resolve_built(image)
    elif kind == "dir":
        yield _resolve_folder(image)
    else:
        with stored.use(image) as found:
            yield found


def image_folder(name: str) -> Path:
    """Return where `built:<name>` lies, present or not. Raises ImageError on a bad name."""
    if not _NAME.fullmatch(name):
        raise ImageError(
            f"{name!r} cannot name an image",
            hint="use letters, digits, dots, dashes and underscores",
        )
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


def _resolve_folder(image: str) -> LocalImage:
    folder = Path(image.removeprefix("dir:"))
    if not folder.is_absolute():
        raise ImageError(
            f"the local sandbox cannot open image {image!r}", hint="write `dir:/ABSOLUTE/FOLDER`"
        )
    if not folder.is_dir():
        raise ImageError(f"no folder at {folder}", hint="make the task's files again")
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
    layers = layers or (_empty_layer(folder),)
    return replace(base, binds=base.binds + binds, env={**base.env, **env}, layers=layers)


def _empty_layer(folder: Path) -> Path:
    layer = folder / "empty"
    layer.mkdir(exist_ok=True)
    return layer
