"""Archives of host folders, for sandboxes that cannot mount them: packed once and cached."""

from __future__ import annotations

import fcntl
import tarfile
from pathlib import Path

from swerl.core import secrets
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Mount


def packed_folder(mount: Mount) -> Path:
    """Return the archive of a folder from the cache; one process creates it if it is missing."""
    source = mount.source.resolve()
    packed = secrets.cache_dir() / "e2b" / f"{mount.fingerprint()}.tar.gz"
    try:
        packed.parent.mkdir(parents=True, exist_ok=True)
        with packed.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not packed.exists():
                partial = packed.with_suffix(".part")
                with tarfile.open(partial, "w:gz", compresslevel=4) as archive:
                    archive.add(source, arcname=".")
                partial.replace(packed)
    except OSError as error:
        message = f"cannot pack {source} for upload: {error.strerror or error}"
        hint = "free space there, or set SWERL_CACHE to another folder"
        raise SandboxError(message, hint=hint) from error
    return packed
