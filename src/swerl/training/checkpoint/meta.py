"""What a checkpoint says about itself, and whether its files are as they were written.

`meta.json` is written when all other files are there: a folder without it is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swerl.core.errors import TrainerError
from swerl.core.files import write_json

FORMAT = 1
"""Number of the format that this file writes and reads."""
META = "meta.json"
OLDER = "`swerl train rewind RUN --step N` goes back to an older checkpoint"
"""What to do about a checkpoint that cannot be used."""


@dataclass(frozen=True, slots=True)
class FileMark:
    """Size and content of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """What a checkpoint holds, and how it was made."""

    step: int
    family: str
    model_type: str
    """`model_type` of the model's config.json."""
    num_params: int
    layout: Mapping[str, int]
    """Parallel sizes of the run that wrote it; any other may read it."""
    dtype: str
    """Of the weights in training; the checkpoint holds their fp32 masters."""
    other_dtypes: Mapping[str, str]
    """Parameters that have another type in training, and which."""
    files: Mapping[str, FileMark]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Size of the tensor files."""
        return sum(file.num_bytes for file in self.files.values())


def mark(path: Path) -> FileMark:
    """Measure one file."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256")
    return FileMark(path.stat().st_size, digest.hexdigest())


def write_meta(folder: Path, meta: CheckpointMeta) -> None:
    """Write meta.json. Raises RunError on a full disk."""
    write_json(folder / META, asdict(meta))


def read_meta(folder: Path) -> CheckpointMeta:
    """Read meta.json. Raises TrainerError: no such step, half-written, or of another format."""
    if not folder.is_dir():
        others = ", ".join(str(step) for step in steps(folder.parent)) or "none"
        raise TrainerError(
            f"there is no checkpoint {folder}; steps that are there: {others}", hint=OLDER
        )
    try:
        value = json.loads((folder / META).read_text(encoding="utf-8"))
        found = value["format"]
        if found != FORMAT:
            message = f"the checkpoint {folder} has format {found}; this swerl reads {FORMAT}"
            hint = "restore it with the swerl that wrote it, and `swerl export` the weights there"
            raise TrainerError(message, hint=hint)
        return _from_json(value)
    except FileNotFoundError as error:
        raise TrainerError(
            f"the checkpoint {folder} has no {META}: half-written, or of an older swerl", hint=OLDER
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(
            f"the checkpoint {folder} has a damaged {META}: {error!r}", hint=OLDER
        ) from error


def check_files(folder: Path, meta: CheckpointMeta, *, part: int = 0, num_parts: int = 1) -> None:
    """Check the size of every file, and the content of one part of them.

    The ranks of a trainer share the reading. Raises TrainerError naming the file.
    """
    for number, (name, wanted) in enumerate(sorted(meta.files.items())):
        path = folder / name
        if not path.is_file():
            _refuse(folder, f"its file {name} is missing")
        size = path.stat().st_size
        if size != wanted.num_bytes:
            _refuse(folder, f"its file {name} has {size:,} bytes of {wanted.num_bytes:,}")
        if number % num_parts == part and mark(path) != wanted:
            _refuse(folder, f"the content of its file {name} has changed")


def steps(parent: Path) -> list[int]:
    """Return the steps of the whole checkpoints in a folder, in order."""
    found = parent.iterdir() if parent.is_dir() else ()
    return sorted(int(p.name) for p in found if p.name.isdecimal() and (p / META).is_file())


def _refuse(folder: Path, what: str) -> None:
    raise TrainerError(f"cannot restore the checkpoint {folder}: {what}", hint=OLDER)


def _from_json(value: dict[str, Any]) -> CheckpointMeta:
    files = {name: FileMark(**file) for name, file in value.pop("files").items()}
    return CheckpointMeta(**value, files=files)
