"""Harbor task folders: `instruction.md`, `task.toml`, `environment/`, `tests/`, `solution/`."""

from __future__ import annotations

import tomllib

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.task import Task

from ._common import Row, optional_text, text
from ._folder_task import (
    files_of,
    image_of,
    instruction,
    reward_spec,
    under,
    workdir_of,
)

SOURCE = ""
SPLITS = ("test",)

WORKDIR = "/app"
"""Workdir of an image whose task and Dockerfile name none."""
TIMEOUT_S = 600.0
"""Timeout of a verifier that sets none."""


def to_task(row: Row) -> Task:
    """Turn a task folder's row into a Task. Raises TaskError if it needs several containers."""
    name, files = text(row, "task_id"), files_of(row)
    config = _config(files)
    environment, verifier = _table(config, "environment"), _table(config, "verifier")
    if _is_composed(files):
        raise TaskError("the environment has several containers or several steps")
    if _has_own_image(verifier, files):
        raise TaskError("the verifier runs in an image of its own")
    image, note = image_of(name, files, optional_text(environment, "docker_image"))
    return Task(
        id=optional_text(_table(config, "task"), "name") or name,
        repo=name,
        image=image,
        workdir=optional_text(environment, "workdir") or workdir_of(files, WORKDIR),
        prompt=instruction(files),
        grading=reward_spec(files, _timeout_s(verifier), _env(environment) | _env(verifier)),
        dataset="harbor",
        metadata={**_described(config), **_network(environment), **note, **_solution(files)},
    )


def _config(files: dict[str, str]) -> dict[str, Json]:
    try:
        return tomllib.loads(text({"task.toml": files.get("task.toml")}, "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"task.toml is not valid TOML: {error}") from error


def _table(config: dict[str, Json], name: str) -> dict[str, Json]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise TaskError(f"task.toml: {name} is not a table")
    return value


def _is_composed(files: dict[str, str]) -> bool:
    compose = {f"environment/docker-compose.{end}" for end in ("yaml", "yml")}
    return bool(compose & files.keys()) or any(path.startswith("steps/") for path in files)


def _has_own_image(verifier: dict[str, Json], files: dict[str, str]) -> bool:
    """Return True if the tests do not run in the agent's image."""
    own = _table(verifier, "environment")
    is_separate = bool(own) or verifier.get("environment_mode") == "separate"
    return is_separate and ("tests/Dockerfile" in files or bool(own.get("docker_image")))


def _timeout_s(verifier: dict[str, Json]) -> float:
    value = verifier.get("timeout_sec", TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise TaskError(f"task.toml: verifier.timeout_sec is {value!r:.40}, not a positive number")
    return float(value)


def _env(table: dict[str, Json]) -> dict[str, str]:
    env = _table(table, "env")
    if secret := next((name for name, value in env.items() if "${" in str(value)), ""):
        raise TaskError(f"the task requires the host's environment variable {secret}")
    return {name: str(value) for name, value in env.items()}


def _described(config: dict[str, Json]) -> dict[str, Json]:
    metadata = _table(config, "metadata")
    names = ("difficulty", "category")
    texts = {name: metadata[name] for name in names if isinstance(metadata.get(name), str)}
    limit = _table(config, "agent").get("timeout_sec")
    return {**texts, **({"agent_timeout_s": limit} if limit else {})}


def _network(environment: dict[str, Json]) -> dict[str, Json]:
    allowed = environment.get("allow_internet")
    return {} if allowed is None else {"allow_internet": allowed}


def _solution(files: dict[str, str]) -> dict[str, Json]:
    solution = under(files, "solution", "/solution")
    return {"solution": dict(solution)} if solution else {}
