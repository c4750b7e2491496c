"""Options and helpers of the image commands: image arguments, failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from swerl.cli._options import tasks_in
from swerl.cli._output import stderr
from swerl.core.errors import InputError, SwerlError
from swerl.core.image_reference import is_local, parse

ImagesArgument = Annotated[
    list[str], typer.Argument(metavar="TASKS...", help="Task files, or names of images.")
]
RewritesOption = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="OLD=NEW", help="Replace the prefix OLD of image names by NEW."),
]

_ENDINGS = {".jsonl", ".json", ".txt", ".parquet"}
_MAX_FAILURES = 5
"""Failed images of one registry that get a line each: an unreachable registry fails all."""


def images_of(arguments: Sequence[str]) -> list[str]:
    """Return the images of task files and named images, each once, in order of use.

    Raises TaskError on a file without tasks, InputError on an invalid image name.
    """
    images: list[str] = []
    for argument in arguments:
        if is_file(argument):
            images += [task.image for task in tasks_in(Path(argument))]
        else:
            if not is_local(argument):
                parse(argument)
            images.append(argument)
    return list(dict.fromkeys(images))


def is_file(argument: str) -> bool:
    """True if an argument is a file name, not an image name."""
    path = Path(argument)
    return path.is_file() or path.suffix in _ENDINGS or argument.startswith(("/", ".", "~"))


def failures(outcomes: Iterable[tuple[str, SwerlError | None]]) -> dict[str, str]:
    """Return image -> error with its hint, for JSON."""
    return {image: error.explained() for image, error in outcomes if error}


def show_failures(failures: Iterable[tuple[str, SwerlError]]) -> None:
    """Print each failure and its remedy; of many at one registry only the first."""
    by_registry: dict[str, list[tuple[str, SwerlError]]] = {}
    for image, error in failures:
        registry = "" if is_local(image) else parse(image).registry
        by_registry.setdefault(registry, []).append((image, error))
    for registry, group in by_registry.items():
        few = len(group) <= _MAX_FAILURES
        for image, error in group if few else group[:1]:
            text = escape(f"{image}: {error.explained()}")
            stderr().print(f"[red]failed[/] {text}", soft_wrap=True)
        if not few:
            rest = f"and {len(group) - 1} more images of {registry or 'this machine'}"
            stderr().print(f"[red]failed[/] {rest}", soft_wrap=True)


def shown_bytes(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    return f"{count / 2**30:,.1f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:,.1f} MiB"


def read_rewrites(texts: Iterable[str] | None) -> dict[str, str]:
    """Return old prefix -> new prefix. Raises InputError on a text that is not OLD=NEW."""
    return dict(map(_rewrite, texts or ()))


def _rewrite(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise InputError(
            f"--from {text!r} is not OLD=NEW",
            hint="for example --from docker.io/=127.0.0.1:5000/hub/",
        )
    return old, new
