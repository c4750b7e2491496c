"""Image names: registry, repository, tag, digest, and their names in a mirror."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from swerl.core.errors import ImageError, InputError

DOCKER_HUB = "docker.io"
_HUB_API = "registry-1.docker.io"
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """One image name in parts; `str` returns the full name."""

    registry: str
    """Host, with a port if it has one; with `http://` before it, a mirror without encryption."""
    repository: str
    tag: str = "latest"
    digest: str = ""
    """Digest of the manifest; it takes precedence over the tag."""

    def __str__(self) -> str:
        ending = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{self.registry}/{self.repository}{ending}"

    @property
    def version(self) -> str:
        """The digest if known, otherwise the tag."""
        return self.digest or self.tag

    def pinned(self, digest: str) -> Reference:
        """Return the same image by digest."""
        return replace(self, digest=digest)


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of mirrored images: a registry and a prefix of repository names."""

    registry: str
    prefix: str = ""

    def place(self, source: Reference) -> Reference:
        """Return the name of the image `source` in this mirror."""
        repository = f"{self.prefix}/{source.repository}".strip("/")
        return Reference(self.registry, repository, source.tag)


def parse(text: str) -> Reference:
    """Read an image name as Docker does. Raises InputError on an invalid name."""
    name, _, digest = text.partition("@")
    registry, repository = _split_registry(name)
    head, _, last = repository.rpartition("/")
    last, colon, tag = last.partition(":")
    repository = f"{head}/{last}" if head else last
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    well_formed = (
        _REPOSITORY.fullmatch(repository)
        and (not colon or _TAG.fullmatch(tag))
        and ("@" not in text or _DIGEST.fullmatch(digest))
    )
    if not well_formed:
        raise InputError(
            f"{text!r} is not an image name",
            hint="write [HOST[:PORT]/]NAME[:TAG][@sha256:…], in lower case",
        )
    return Reference(registry, repository, tag or "latest", digest)


def parse_target(text: str) -> Target:
    """Read `HOST[:PORT][/PREFIX]`. Raises InputError on anything else."""
    registry, _, prefix = text.strip("/").partition("/")
    if not _is_host(registry) or (prefix and not _REPOSITORY.fullmatch(prefix)):
        raise InputError(
            f"{text!r} is not a registry with an optional prefix",
            hint="write HOST:PORT/PREFIX, for example 127.0.0.1:5000/swe",
        )
    return Target(registry, prefix)


def is_local(image: str) -> bool:
    """True if the image exists only on this machine and in no registry."""
    return image == "host" or image.startswith(("built:", "dir:", "snapshot:"))


def base_url(registry: str) -> str:
    """Return the root of a registry's API: plain http on loopback, https elsewhere."""
    if registry.startswith("http://"):
        return registry
    if registry == DOCKER_HUB:
        return f"https://{_HUB_API}"
    return f"{'http' if _is_loopback(registry) else 'https'}://{registry}"


def _split_registry(name: str) -> tuple[str, str]:
    first, slash, rest = name.partition("/")
    if not slash or not _is_host(first):
        return DOCKER_HUB, name
    return (DOCKER_HUB if first == "index.docker.io" else first), rest


def _is_host(text: str) -> bool:
    match = re.fullmatch(r"(\[[0-9a-f:]+\]|[\w.-]+)(?::(\d+))?", text, re.I | re.ASCII)
    if not match or int(match[2] or 1) not in range(1, 1 << 16):
        return False
    return "." in text or ":" in text or text == "localhost"


def _is_loopback(registry: str) -> bool:
    host = re.sub(r":\d+$", "", registry).strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def checked_digest(digest: object, owner: str) -> str:
    """Return a digest that is safe in a request and as a file name. Raises ImageError."""
    if isinstance(digest, str) and _DIGEST.fullmatch(digest):
        return digest
    message = f"{owner} names {digest!r:.80}, which is not a SHA-256 digest"
    raise ImageError(message, hint="build and push the image again")
