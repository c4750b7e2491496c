"""What every Task must be, whatever dataset it is from, to be run at all."""

from __future__ import annotations

import re

from swerl.core.errors import InputError, TaskError
from swerl.core.image_reference import is_local, parse
from swerl.core.task import Task

_MAX_ID_BYTES = 200
"""An Episode's folder bears the id and a number; file systems take 255 bytes."""
_PLAIN_IMAGE = re.compile(r"[a-z0-9]+(?:[._/-][a-z0-9]+)*(?::[\w.-]{1,128})?", re.ASCII)
"""Most images; the rule for all of them takes thirty times as long."""


def check_usable(task: Task) -> None:
    """Raise TaskError where the id, the image or the prompt cannot be used on any machine."""
    if not task.id.isprintable() or len(task.id.encode("utf-8", "replace")) > _MAX_ID_BYTES:
        raise TaskError(f"the id holds a control character or has over {_MAX_ID_BYTES} bytes")
    if "\0" in task.prompt:
        raise TaskError("the problem holds a NUL character, which no program takes")
    if _PLAIN_IMAGE.fullmatch(task.image) or is_local(task.image):
        return
    try:
        parse(task.image)
    except InputError as error:
        raise TaskError(f"its image {error}") from error
