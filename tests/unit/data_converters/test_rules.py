"""Each dataset's own rules: names of images, what is hidden, which rows are refused."""

from __future__ import annotations

import pytest

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.task import Task
from swerl.tasks.datasets import find_converter

from .examples import EXAMPLES, FIX, HARBOR, MULTI, SCALE, SMITH, TESTS


def task_of(name: str, **columns: Json) -> Task:
    return find_converter(name).to_task({**EXAMPLES[name], **columns})


def harbor(**files: str | None) -> Task:
    """Convert the Harbor example with other files; `None` removes one."""
    kept = HARBOR["files"]
    assert isinstance(kept, dict)
    named = {name.replace("__", "/").replace("_DOT_", "."): text for name, text in files.items()}
    both = {**kept, **named}
    return task_of("harbor", files={name: text for name, text in both.items() if text is not None})


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("swe-bench", "swebench/sweb.eval.x86_64.pallets_1776_flask-9999:latest"),
        ("swe-gym", "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-9999:latest"),
        ("r2e-gym", "namanjain12/aiohttp_final:c0ffee"),
        ("swe-bench-pro", "jefzda/sweap-images:acme.sums-acme__sums-c0ffee"),
        ("swe-smith", "jyangballin/swesmith.x86_64.acme_1776_sums.0123abcd"),
        ("swe-rebench", "swerebench/sweb.eval.x86_64.acme_1776_sums-12"),
        ("scale-swe", "registry.example/scale/acme_sums:12"),
        ("multi-swe-rl", "mswebench/acme_m_sums:pr-12"),
        ("open-instruct", "registry.example/tasks:7"),
    ],
)
def test_images_follow_the_datasets_rule(name: str, image: str) -> None:
    assert find_converter(name).to_task(EXAMPLES[name]).image == image


def test_an_image_column_beats_the_rule() -> None:
    assert task_of("swe-smith", image_name="x/y").image == "x/y"
    assert task_of("swe-smith", image_name=None).image == SMITH["image_name"]
    assert task_of("swe-rebench", docker_image="x/y").image == "x/y"
    with pytest.raises(TaskError, match="a local build"):
        task_of("swe-bench", image="amd64.x:latest")


def test_unknown_log_parsers_keep_their_names() -> None:
    columns = {"eval_script": "pytest -rA", "log_parser": "parse_log_calypso"}
    assert task_of("swe-bench", **columns).grading.log_parser == "parse_log_calypso"
    with pytest.raises(TaskError, match="not a parser name"):
        task_of("swe-bench", **{**columns, "log_parser": "rm -rf"})


@pytest.mark.parametrize("name", ["swe-bench", "swe-gym", "swe-rebench"])
def test_ids_that_are_artefacts_of_logs_are_dropped_by_name(name: str) -> None:
    tests = [f"testing/test_a.py::test_{number}" for number in range(20)]
    task = task_of(name, PASS_TO_PASS=["[100%]", "[ 45%]", "test_inner.py::test_x", *tests])
    assert task.grading.pass_to_pass == tuple(tests)
    assert task.metadata["log_artefacts"] == ["[100%]", "[ 45%]", "test_inner.py::test_x"]
    flat = ["test_six.py::test_a", "test_six.py::test_b"]
    task = task_of(name, PASS_TO_PASS=flat)
    assert task.grading.pass_to_pass == tuple(flat) and "log_artefacts" not in task.metadata


@pytest.mark.parametrize(
    ("task_id", "named", "parser"),
    [
        ("jekyll__jekyll-9141", "parse_log_jekyll", "minitest"),
        ("jekyll__jekyll-8771", "parse_log_jekyll", "cucumber"),
        ("jekyll__jekyll-1", "parse_log_jekyll", "parse_log_jekyll"),
        ("immutable-js__immutable-js-2005", "parse_log_immutable_js", "jest_json"),
        ("apache__druid-1", "parse_log_maven", "maven"),
    ],
)
def test_log_parsers_follow_the_row(task_id: str, named: str, parser: str) -> None:
    columns = {"instance_id": task_id, "log_parser": named, "eval_script": "make test"}
    assert task_of("swe-bench", **columns).grading.log_parser == parser


def test_a_piped_script_keeps_its_shell_options_and_ends_with_the_tests() -> None:
    script = """\
#!/bin/bash
set -uxo pipefail
cd /testbed
rm -f a_test.go
git apply -v - <<'EOF_1'
+set -e
EOF_1
make build
: '>>>>> Start Test Output'
(go test -v .) | cat
: '>>>>> End Test Output'
rm -f a_test.go
"""
    columns = {"log_parser": "parse_log_gotest", "eval_script": script}
    command = task_of("swe-bench", **columns).grading.test_command
    assert command == "set -uxo pipefail\nmake build\n(go test -v .) | cat"


def test_both_versions_of_swe_rebench() -> None:
    first = task_of("swe-rebench")
    assert first.workdir == "/testbed" and first.metadata["difficulty"] == 1
    assert first.grading.test_command.endswith("--color=no tests/test_sums.py")
    config: dict[str, Json] = {"log_parser": "parse_log_gotest", "test_cmd": ["make", "make check"]}
    meta: Json = {"llm_metadata": [{"difficulty": "hard"}]}
    second = task_of(
        "swe-rebench", install_config=config, language="go", meta=meta, image_name="x/y:1"
    )
    assert (second.workdir, second.image) == ("/sums", "x/y:1")
    assert second.grading.test_command == "make\nmake check"
    assert second.metadata == {"language": "go", "difficulty": "hard"}
    assert second.grading.log_parser == "go_test"
    php = {**config, "log_parser": "parse_log_phpunit"}
    assert task_of("swe-rebench", install_config=php).grading.log_parser == "phpunit_timed"
    with pytest.raises(TaskError, match="more than one log parser"):
        task_of("swe-rebench", install_config={**config, "log_parsers": ["a", "b"]})


def test_scale_swe_grades_by_script_patch_or_command() -> None:
    task = task_of("scale-swe")
    assert task.setup == "git checkout ba5e\ngit clean -fd"
    assert task.repo == "acme/sums" and task.base_commit == "ba5e"
    assert task.grading.test_files == {"test_fail_to_pass.py": SCALE["f2p_script"]}
    assert task.grading.test_command == (
        "python test_fail_to_pass.py\npython -m pytest tests/test_sums.py"
    )
    patched = task_of("scale-swe", f2p_script=None, f2p_patch=TESTS, pre_commands=["a", "b"])
    assert patched.grading.test_patch == TESTS and patched.setup == "a\nb"
    assert task_of("scale-swe", eval_cmd="make t").grading.grader == "command"
    with pytest.raises(TaskError, match="the row has no tests"):
        task_of("scale-swe", f2p_script="")


def test_multi_swe_takes_tests_that_pass_with_the_solution() -> None:
    failing = {"fix": "FAIL", "test": "PASS", "run": "PASS"}
    task = task_of("multi-swe-rl", p2p_tests={"d": {"fix": "PASS"}, "e": failing})
    assert task.grading.fail_to_pass == ("a", "b", "c")
    assert task.grading.pass_to_pass == ("d",)
    assert str(MULTI["title"]) not in task.prompt and "add(1, 1) is 0" in task.prompt
    with pytest.raises(TaskError, match="resolved_issues is empty"):
        task_of("multi-swe-rl", resolved_issues=[])
    with pytest.raises(TaskError, match="every patch would count"):
        task_of("multi-swe-rl", f2p_tests={}, s2p_tests={}, n2p_tests={"c": failing})


def test_harbor_keeps_the_settings_of_the_tests_and_of_the_network() -> None:
    test = "python /tests/score.py /logs/verifier/reward.json\n"
    text = "[environment]\nallow_internet = true\nenv = {A = '1'}\n"
    task = harbor(task_DOT_toml=text, tests__test_DOT_sh=test)
    assert task.metadata["allow_internet"] is True and task.grading.env == {"A": "1"}
    assert task.grading.report_path == "/logs/verifier/reward.json"


def test_harbors_image_is_named_bare_or_to_be_built() -> None:
    built = harbor()
    assert built.image.startswith("localhost/mend-sums:") and built.workdir == "/srv/app"
    assert built.metadata["build"] == "environment"
    other = harbor(environment__Dockerfile="FROM python:3.12\nRUN true\n")
    assert other.image != built.image and other.workdir == "/app"
    bare = harbor(environment__Dockerfile="# base\nFROM --platform=linux/amd64 x/y:1\nWORKDIR /w\n")
    assert (bare.image, bare.workdir, bare.metadata.get("build")) == ("x/y:1", "/w", None)
    named = harbor(task_DOT_toml='[environment]\ndocker_image = "a/b"\nworkdir = "/z"\n')
    assert (named.image, named.workdir, named.grading.timeout_s) == ("a/b", "/z", 600.0)
    steps = harbor(environment__Dockerfile='FROM x\nENV W="/w"\nWORKDIR $W\nWORKDIR a\nRUN true\n')
    assert steps.workdir == "/w/a"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"task_DOT_toml": "x ="}, "task.toml is not valid TOML"),
        ({"task_DOT_toml": "verifier = 1"}, "verifier is not a table"),
        (
            {"task_DOT_toml": "[verifier]\ntimeout_sec = -1"},
            "timeout_sec is -1, not a positive number",
        ),
        (
            {"task_DOT_toml": '[verifier]\nenv = {K = "${KEY}"}'},
            "requires the host's environment variable K",
        ),
        ({"environment__docker-compose_DOT_yaml": ""}, "several containers"),
        (
            {"task_DOT_toml": '[verifier.environment]\ndocker_image = "x"'},
            "in an image of its own",
        ),
        ({"steps__one__tests__test_DOT_sh": ""}, "several steps"),
        ({"environment__Dockerfile": None}, "names no image"),
        ({"tests__test_DOT_sh": None}, "has no tests/test.sh"),
        ({"instruction_DOT_md": " "}, "instruction.md is empty"),
        ({"environment__Dockerfile": "FROM x\nWORKDIR $W\n"}, "unknown variable"),
    ],
)
def test_harbor_tasks_that_cannot_be_used(files: dict[str, str | None], reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        harbor(**files)


def test_seeds_are_in_every_sandbox_and_tests_in_gradings() -> None:
    task = find_converter("open-instruct").to_task(EXAMPLES["open-instruct"])
    assert list(task.files) == ["/workspace/sums.py"]
    assert list(task.grading.files) == ["/tests/test.sh"]
    assert task.grading.report_path == "/logs/verifier/reward.txt"


def test_a_patch_of_50_mb_is_refused() -> None:
    with pytest.raises(TaskError, match="over 10 MB"):
        task_of("swe-bench", patch=FIX + "+" + "x" * 50_000_000)


@pytest.mark.parametrize("name", ["swe-bench", "swe-gym", "swe-rebench", "swe-smith"])
@pytest.mark.parametrize("column", ["FAIL_TO_PASS", "PASS_TO_PASS"])
def test_a_test_id_that_is_empty_is_refused(name: str, column: str) -> None:
    with pytest.raises(TaskError, match=f"column {column} contains an empty test id"):
        find_converter(name).to_task({**EXAMPLES[name], column: ["tests/test_a.py::test_a", ""]})


@pytest.mark.parametrize("name", ["swe-bench", "swe-gym", "swe-rebench", "swe-bench-pro"])
@pytest.mark.parametrize("value", ["--help", "$(id)", "main", "a" * 65])
def test_a_base_that_is_no_commit_is_refused(name: str, value: str) -> None:
    with pytest.raises(TaskError, match="column base_commit is not a commit id"):
        find_converter(name).to_task({**EXAMPLES[name], "base_commit": value})
