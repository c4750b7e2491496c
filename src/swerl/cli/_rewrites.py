"""`--from OLD=NEW`: where image names are read from instead."""

from __future__ import annotations

from collections.abc import Iterable


def read_rewrites(texts: Iterable[str] | None) -> dict[str, str]:
    """Return old beginning -> new. Raises InputError on a text that is not OLD=NEW."""
    return dict(map(_rewrite, texts or ()))


def _rewrite(text: str) -> tuple[str, str]:
    from swerl.core.errors import InputError

    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise InputError(
            f"--from {text!r} is not OLD=NEW",
            hint="for example --from docker.io/=127.0.0.1:5000/hub/",
        )
    return old, new
