"""Whether the trainer can take a model, asked before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

from swerl.errors import InputError
from swerl.interfaces import Family


def check_trainable(family: Family, model: Path) -> None:
    """Raise InputError on a model folder whose weights Megatron-Core has no place for."""
    file = model / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"cannot read {file}: {error}"
        raise InputError(message, hint="name a model folder in Hugging Face format") from error
    family.megatron().config(config)
