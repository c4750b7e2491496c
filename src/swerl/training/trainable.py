"""Whether the trainer can take a model, asked before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

from swerl.core.contracts import Family
from swerl.core.errors import InputError


def check_trainable(family: Family, model: Path) -> None:
    """Raise InputError on a model folder whose weights Megatron-Core has no place for."""
    file = model / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {file}: {error}", hint="name a model folder in Hugging Face format"
        ) from error
    family.megatron().config(config)
