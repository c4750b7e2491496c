"""SWE-rebench: V1 (Python, SWE-bench's images) and V2 (20 languages), with commands per row."""

from __future__ import annotations

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

from ._common import (
    Row,
    commit,
    diff,
    fail_to_pass,
    json_object,
    lines,
    log_artefacts,
    optional_text,
    prompt,
    test_files,
    tests_to_keep,
    text,
)
from ._swe_bench_commands import ACTIVATE, log_parser

SOURCE = "nebius/SWE-rebench"
ALSO = ("nebius/SWE-rebench-V2",)
SPLITS = ("test", "filtered", "train")

TIMEOUT_S = 1800.0
"""The limit of SWE-bench's harness, on which this dataset's harness is based."""

_PARSERS = {
    "parse_log_phpunit": "phpunit_timed",
    "parse_log_gradle_custom": "gradle_timed",
    "parse_log_junit": "junit",
    "parse_log_sbt": "junit",
    "parse_log_cpp_v2": "test_lines",
    "parse_log_cpp_v4": "ctest",
    "parse_log_ruby_v2": "minitest_methods",
    "parse_log_swift": "swift",
    "parse_log_elixir": "elixir",
    "parse_log_csharp": "xunit",
    "parse_log_lua_nvim": "plenary",
    "parse_lua_nvim": "plenary",
    "parse_lue_nvim": "plenary",
    "parse_log_js": "mocha_headings",
    "parse_log_js_2": "mocha",
}
"""V2's parser names that SWE-bench lacks or uses for another format."""


def to_task(row: Row) -> Task:
    """Turn a row of either version into a Task."""
    repo, config = text(row, "repo"), json_object(row, "install_config")
    is_v1 = not (optional_text(row, "language") or "base_image_name" in config)
    workdir = "/testbed" if is_v1 else f"/{repo.split('/')[-1]}"
    test_patch = diff(row, "test_patch")
    command = text({"test_cmd": lines(config, "test_cmd")}, "test_cmd")
    if is_v1:
        command = f"{ACTIVATE}\n{' '.join([command, *test_files(test_patch)])}"
    spec = GradingSpec(
        grader="swebench",
        fail_to_pass=fail_to_pass(row),
        pass_to_pass=tests_to_keep(row),
        test_patch=test_patch,
        test_command=command,
        log_parser=_parser(config),
        timeout_s=TIMEOUT_S,
    )
    return Task(
        id=text(row, "instance_id"),
        repo=repo,
        image=_image(row),
        workdir=workdir,
        prompt=prompt(text(row, "problem_statement"), workdir),
        grading=spec,
        base_commit=commit(row, "base_commit"),
        gold_patch=diff(row, "patch"),
        dataset=SOURCE,
        metadata={
            "language": optional_text(row, "language") or "python",
            **_difficulty(row),
            **log_artefacts(row),
        },
    )


def image(task_id: str) -> str:
    """Return the image name under which V1's authors publish this task."""
    return f"swerebench/sweb.eval.x86_64.{task_id.lower().replace('__', '_1776_')}"


def _image(row: Row) -> str:
    name = optional_text(row, "image_name") or optional_text(row, "docker_image")
    return name or image(text(row, "instance_id"))


def _parser(config: dict[str, Json]) -> str:
    if config.get("log_parsers"):
        raise TaskError("the row requires more than one log parser")
    name = text(config, "log_parser")
    return _PARSERS.get(name) or log_parser(name)


def _difficulty(row: Row) -> dict[str, Json]:
    """Return a model's rating: a score from 0 to 10 in V1; easy, medium or hard in V2."""
    meta = row.get("meta")
    if not isinstance(meta, dict):
        return {}
    score, judged = meta.get("llm_score"), meta.get("llm_metadata")
    if isinstance(score, dict) and score.get("difficulty_score") is not None:
        return {"difficulty": score["difficulty_score"]}
    first = judged[0] if isinstance(judged, list) and judged else None
    return {"difficulty": first.get("difficulty")} if isinstance(first, dict) else {}
