"""Finding run folders, and the recipes that they keep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swerl.core.errors import RunError, unknown

if TYPE_CHECKING:
    from swerl.recipe.schema import Recipe

RECIPE = "recipe.resolved.json"


def all_runs(runs: Path) -> list[Path]:
    """Return every run folder in `runs`, the one used last first."""
    found = [path.parent for path in runs.glob(f"*/{RECIPE}")]
    return sorted(found, key=_last_use, reverse=True)


def find_run(run: str, runs: Path) -> Path:
    """Return the folder of a run given by its name or its folder.

    Raises UnknownNameError, and RunError where it may not be looked at.
    """
    for folder in (runs / run, Path(run)):
        try:
            if (folder / RECIPE).is_file():
                return folder
        except OSError as error:
            raise RunError(
                f"cannot look into {folder}: {error.strerror}",
                hint="give the name or the folder of a run of yours",
            ) from error
    raise unknown("run", run, [path.name for path in all_runs(runs)])


def called(root: Path) -> str:
    """Return what a command names a run by: its name where that is enough, else its folder."""
    return root.name if root == Path("runs") / root.name else str(root)


def stored_recipe(root: Path) -> Recipe:
    """Return the recipe of a run. Raises RunError where this version does not read it."""
    from pydantic import ValidationError

    from swerl.core.files import read_json
    from swerl.recipe.schema import Recipe

    try:
        return Recipe.model_validate(read_json(root / RECIPE))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = f"{root / RECIPE}: {key}: {first['msg']}"
        hint = "another version of swerl wrote it; resume the run with that one"
        raise RunError(message, hint=hint) from error


def _last_use(root: Path) -> float:
    names = ("events.jsonl", "process.json", RECIPE)
    return max(path.stat().st_mtime for name in names if (path := root / name).exists())
