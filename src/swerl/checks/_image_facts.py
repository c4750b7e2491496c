"""Digest and size of an image, from whoever keeps it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel

from swerl.checks.smoke import ImageFacts
from swerl.core.errors import SwerlError
from swerl.core.image_reference import is_local, parse
from swerl.images.oci.store import default_store
from swerl.sandboxes._local.image import image_folder


def facts_for(backend: str, options: BaseModel | None) -> Callable[[str], Awaitable[ImageFacts]]:
    """Return what tells an image's facts: the store, the Docker daemon, or else its name."""
    if backend == "local":
        return _from_store
    if backend == "docker":
        return _from_daemon(getattr(options, "base_url", ""))
    return _from_name


async def _from_name(image: str) -> ImageFacts:
    try:
        return ImageFacts("" if is_local(image) else parse(image).digest)
    except SwerlError:
        return ImageFacts()


async def _from_store(image: str) -> ImageFacts:
    if is_local(image):
        return ImageFacts(_built_digest(image))
    try:
        found = await asyncio.to_thread(default_store().find, image)
    except (SwerlError, OSError):
        return await _from_name(image)
    return ImageFacts(found.digest, found.size)


def _built_digest(image: str) -> str:
    """Return a name for what a `built:` image was made of; nothing for other local ones."""
    kind, _, name = image.partition(":")
    if kind != "built":
        return ""
    try:
        description = (image_folder(name) / "image.json").read_bytes()
    except (SwerlError, OSError):
        return ""
    return f"sha256:{hashlib.sha256(description).hexdigest()}"


def _from_daemon(base_url: str) -> Callable[[str], Awaitable[ImageFacts]]:
    from swerl.sandboxes._docker.api import Api

    api = Api(base_url)

    async def ask(image: str) -> ImageFacts:
        try:
            await api.connect()
            found: dict[str, Any] = await api.call(lambda client: client.inspect_image(image))
        except SwerlError:
            return await _from_name(image)
        return ImageFacts(str(found.get("Id", "")), int(found.get("Size", 0)))

    return ask
