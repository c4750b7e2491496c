"""The checkpoint folders of a run: their metadata, checks, retention, and save outcomes.

`meta.json` is written after all other files, so a folder without it is no checkpoint. The first
rank writes the outcome of every save beside the checkpoints, where the controller reads it while
the ranks are busy with a step.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.core.errors import TrainerError
from swerl.core.files import disk_errors, write_json
from swerl.core.learning import CheckpointRef

KEPT = 2
"""Newest checkpoints kept: the last, and the one before it in case a commit is interrupted."""
_POLL_S = 0.05
"""Seconds between polls for the outcome of a save."""
_GIB = 2**30
_MARGIN = 1.02
"""Disk space of a checkpoint over that of its tensors: metadata and file system overhead."""


FORMAT = 1
"""Version of the checkpoint format."""
META = "meta.json"
OLDER = "`swerl train rewind RUN --step N` goes back to an older checkpoint"
"""Hint for a checkpoint that cannot be used."""


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    step: int
    num_bytes: int = 0
    write_s: float = 0.0
    """Seconds from the copy to the rename; training continues during most of them."""
    error: str = ""
    hint: str = ""


def folder_of(parent: Path, step: int) -> Path:
    return parent / f"{step:05d}"


def part_of(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is whole."""
    return folder.with_name(f".{folder.name}.part")


def make_room(folder: Path, num_bytes: int) -> None:
    """Create the folder to write a checkpoint in, and remove what killed runs left half-written.

    Raises TrainerError if the disk is too full, and RunError if it cannot be written.
    """
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (*folder.parent.glob(".*.part"), *folder.parent.glob(".*.old")):
            shutil.rmtree(leftover, ignore_errors=True)
        # The outcome of an earlier save would pass for the outcome of this one.
        _outcome(folder.parent, int(folder.name)).unlink(missing_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < num_bytes * _MARGIN:
            message = (
                f"the checkpoint {folder} needs {num_bytes / _GIB:.2f} GiB, "
                f"its disk has {free / _GIB:.2f} GiB left"
            )
            hint = "free some space and run the same command again: it resumes"
            raise TrainerError(message, hint=hint)
        part_of(folder).mkdir()


def put_in_place(folder: Path) -> None:
    """Give a whole checkpoint its name; replace one of the same step."""
    if folder.exists():
        _remove(folder)
    part_of(folder).rename(folder)


def prune(parent: Path, step: int, *, spare: Collection[int]) -> None:
    """Remove earlier checkpoints except the newest and those in `spare`.

    Later steps stay: a run that was rewound overwrites them when it reaches them.
    """
    earlier = [number for number in steps(parent) if number <= step]
    for number in earlier[:-KEPT]:
        if number not in spare:
            _remove(folder_of(parent, number))


def _remove(folder: Path) -> None:
    """Rename a checkpoint, then delete it, so that it is never half there."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def put_outcome(parent: Path, outcome: SaveOutcome) -> None:
    write_json(_outcome(parent, outcome.step), asdict(outcome))


def take_outcome(parent: Path, step: int) -> SaveOutcome | None:
    """Return and remove the outcome of a save; None while it is being written."""
    path = _outcome(parent, step)
    try:
        # A rename puts the file there, so it is never half-written.
        outcome = SaveOutcome(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return outcome


def _outcome(parent: Path, step: int) -> Path:
    return parent / f".{step:05d}.outcome.json"


async def wait_until_whole(
    parent: Path, step: int, *, is_alive: Callable[[], bool]
) -> CheckpointRef:
    """Return when the checkpoint of a step is whole; the controller waits while the ranks work.

    Raises TrainerError if the save failed, or if the trainer ended before it was whole.
    """
    while True:
        was_alive = is_alive()  # checked first: a rank may write its outcome and end
        outcome = take_outcome(parent, step)
        if outcome is None and not was_alive:
            raise TrainerError(
                f"the trainer ended before the checkpoint of step {step} was whole",
                hint="run the same command again: it resumes from the checkpoint before",
            )
        if outcome is not None:
            break
        await asyncio.sleep(_POLL_S)
    if outcome.error:
        raise TrainerError(outcome.error, hint=outcome.hint)
    return CheckpointRef(step, outcome.num_bytes, outcome.write_s)


@dataclass(frozen=True, slots=True)
class FileMark:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    step: int
    family: str
    model_type: str
    """`model_type` of the model's config.json."""
    num_params: int
    layout: Mapping[str, int]
    """Parallel sizes of the run that wrote it; a run with any other may read it."""
    dtype: str
    """Type of the weights in training; the checkpoint holds their fp32 masters."""
    other_dtypes: Mapping[str, str]
    """Parameter -> type, for those with another type in training."""
    files: Mapping[str, FileMark]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


def mark(path: Path) -> FileMark:
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256")
    return FileMark(path.stat().st_size, digest.hexdigest())


def write_meta(folder: Path, meta: CheckpointMeta) -> None:
    write_json(folder / META, asdict(meta))


def read_meta(folder: Path) -> CheckpointMeta:
    """Read meta.json. Raises TrainerError if it is missing, damaged, or of another format."""
    if not folder.is_dir():
        others = ", ".join(str(step) for step in steps(folder.parent)) or "none"
        raise TrainerError(
            f"there is no checkpoint {folder}; steps that are there: {others}", hint=OLDER
        )
    try:
        value = json.loads((folder / META).read_text(encoding="utf-8"))
        version = value["format"]
        if version != FORMAT:
            message = f"the checkpoint {folder} has format {version}; this swerl reads {FORMAT}"
            hint = "restore it with the swerl that wrote it, and `swerl export` the weights there"
            raise TrainerError(message, hint=hint)
        files = {name: FileMark(**file) for name, file in value.pop("files").items()}
        return CheckpointMeta(**value, files=files)
    except FileNotFoundError as error:
        raise TrainerError(
            f"the checkpoint {folder} has no {META}: half-written, or of an older swerl", hint=OLDER
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(
            f"the checkpoint {folder} has a damaged {META}: {error!r}", hint=OLDER
        ) from error


def check_files(folder: Path, meta: CheckpointMeta, *, part: int = 0, num_parts: int = 1) -> None:
    """Check the size of every file, and the hashes of one part of them.

    The ranks of a trainer share the hashing. Raises TrainerError, which names the file.
    """
    for number, (name, size_and_hash) in enumerate(sorted(meta.files.items())):
        path = folder / name
        if not path.is_file():
            _refuse(folder, f"its file {name} is missing")
        size = path.stat().st_size
        if size != size_and_hash.num_bytes:
            _refuse(folder, f"its file {name} has {size:,} bytes of {size_and_hash.num_bytes:,}")
        # Hashing reads whole files, so each rank hashes only some of them.
        if number % num_parts == part and mark(path) != size_and_hash:
            _refuse(folder, f"the content of its file {name} has changed")


def steps(parent: Path) -> list[int]:
    """Return the steps of the whole checkpoints in a folder, in order."""
    folders = parent.iterdir() if parent.is_dir() else ()
    # A folder without meta.json is half-written.
    return sorted(int(p.name) for p in folders if p.name.isdecimal() and (p / META).is_file())


def _refuse(folder: Path, reason: str) -> None:
    raise TrainerError(f"cannot restore the checkpoint {folder}: {reason}", hint=OLDER)
