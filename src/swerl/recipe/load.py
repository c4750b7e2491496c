"""Load a Recipe from TOML files and `--set`: defaults < files left to right < settings."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from swerl.core import plugins
from swerl.core.errors import RecipeError, RunError
from swerl.core.files import read_json, shipped_folder
from swerl.recipe.hub import model_folder
from swerl.recipe.schema import Recipe
from swerl.recipe.sections import ONE, SEVERAL, PluginSection


def load(files: Sequence[Path], settings: Iterable[str] = (), *, fetch: bool = False) -> Recipe:
    """Read a recipe; with `fetch`, get its model from the hub if `model.path` is an id.

    Raises RecipeError naming the file, the key and the nearest known key, InputError if the hub
    does not give the model.
    """
    try:
        recipe = Recipe.model_validate(_merge(written(files), read_settings(settings)))
    except ValidationError as error:
        raise _explain(error) from error
    return _resolved(recipe, fetch=fetch)


def recorded(path: Path) -> Recipe:
    """Read the recipe of a run folder. Raises RunError if this version does not know a key."""
    stored = read_json(path)
    try:
        return Recipe.model_validate(stored)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        hint = "another version of swerl wrote it; use that one for this run"
        raise RunError(f"{path}: {key}: {first['msg']}", hint=hint) from error


def written(files: Sequence[Path]) -> dict[str, Any]:
    """Return the keys of recipe files, unchecked; later files win. Raises RecipeError."""
    merged: dict[str, Any] = {}
    for file in files:
        merged = _merge(merged, _read(find_recipe(file)))
    return merged


def _resolved(recipe: Recipe, *, fetch: bool) -> Recipe:
    """Return a recipe whose names mean the same everywhere: files from the root, a known family.

    A run folder stores them, so the run resumes from any folder and reads its model alike.
    """
    model, rollout = recipe.model, recipe.rollout
    sections: dict[str, object] = {
        "rollout": rollout.model_copy(update={"reward": plugins.absolute(rollout.reward)}),
        "sft": recipe.sft.model_copy(
            update={"sources": tuple(path.absolute() for path in recipe.sft.sources)}
        ),
    }

    def absolute(section: PluginSection) -> PluginSection:
        return section.model_copy(update={"type": plugins.absolute(section.type)})

    for name in ("sandbox", "harness", "engine", "algorithm"):
        section = getattr(recipe, name)
        if name in recipe.model_fields_set:
            several = isinstance(section, tuple)
            sections[name] = tuple(map(absolute, section)) if several else absolute(section)
    if model.path is not None:
        folder = model_folder(model.path, fetch=fetch)
        is_there = (folder / "config.json").is_file()
        family = plugins.family_name(model.family, folder) if is_there else model.family
        sections["model"] = model.model_copy(update={"path": folder, "family": family})
    # Sections with default values count as not given, because only given ones are checked.
    fields_set = recipe.model_fields_set
    resolved = recipe.model_copy(update=sections)
    resolved.__pydantic_fields_set__.intersection_update(fields_set)
    return resolved


def find_recipe(file: Path) -> Path:
    """Return a recipe's file; a name without a folder and an ending is a recipe of swerl's own."""
    if file.exists() or file.suffix or file.parent != Path():
        return file
    recipes = [path for path in shipped() if path.stem == file.name]
    return recipes[0] if recipes else file


def shipped() -> list[Path]:
    """Return the recipes that come with swerl."""
    return sorted(shipped_folder("recipes").glob("*.toml"))


def read_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Return `key=value` settings as nested keys; later ones win. Raises RecipeError."""
    merged: dict[str, Any] = {}
    for setting in settings:
        merged = _merge(merged, _parse_setting(setting))
    return merged


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        names = [*_recipes_beside(file), *(path.stem for path in shipped())]
        near = difflib.get_close_matches(file.name, names, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        hint += "`swerl recipes` lists those of swerl, and `swerl train --help` the commands"
        raise RecipeError(f"cannot read recipe {file}: {error.strerror}", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{file} is not TOML: {error}", hint="write strings in quotes, one key = value a line"
        ) from error


def _recipes_beside(file: Path) -> list[str]:
    folder = file.parent if file.parent.is_dir() else Path("recipes")
    return [path.name for path in folder.glob("*.toml")]


def _parse_setting(setting: str) -> dict[str, Any]:
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(
            f"--set {setting!r} is not key=value", hint="for example --set trainer.lr=1e-4"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both and old is not None else value
    return merged


def _explain(error: ValidationError) -> RecipeError:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in (ONE, SEVERAL)]
    key = ".".join(where)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(where[-1], _fields(where[:-1]), n=3, cutoff=0.4)
        names = near or _fields(where[:-1])
        hint = f"did you mean {', '.join(near)}?" if near else f"known here: {', '.join(names)}"
        return RecipeError(f"unknown recipe key {key!r}", hint=hint)
    if first["type"] == "missing":
        return RecipeError(f"the recipe has no {key!r}", hint=f"add {key} = …")
    message = f"recipe key {key} = {first['input']!r}: {first['msg']}"
    return RecipeError(message, hint="docs/reference/recipe.md lists every key with its unit")


def _fields(section: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Recipe
    for name in section:
        field = model.model_fields.get(name)
        types = [field.annotation, *get_args(field.annotation)] if field else []
        inner = [t for t in types if isinstance(t, type) and issubclass(t, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return sorted(model.model_fields)
