"""Which image a client gets: by template id, by metadata, or by naming it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

from swerl.sandboxes.e2b_server.failure import Code, Failure
from swerl.sandboxes.e2b_server.options import ServerOptions

_OF_THIS_MACHINE = re.compile(r"(?:[a-z+-]+:)?[/.~]|(?:dir|oci|file|oci-archive|docker-archive):")
"""References that name a file or folder of the server's machine."""


def choose(template: str, metadata: Mapping[str, str], options: ServerOptions) -> str:
    """Return the image that a client's template id and metadata stand for.

    Raises Failure where it names none, or a folder of the server's own machine: only the operator
    may offer those, as a template.
    """
    named = metadata.get(options.image_key) or template
    if image := options.templates.get(named):
        return image
    named = unquote(named)
    if image := options.templates.get(named):
        return image
    if not named:
        raise Failure(Code.INVALID_ARGUMENT, "the request names no template")
    if _OF_THIS_MACHINE.match(named):
        message = f"template {named[:200]!r} names files of the server; ask its operator for one"
        raise Failure(Code.PERMISSION_DENIED, message)
    return named
