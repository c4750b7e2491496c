"""One row of every dataset, written for these tests: the columns and their types are real."""

from __future__ import annotations

import json
from collections.abc import Mapping

from swerl.core.chat import Json

Row = Mapping[str, Json]


def diff(path: str, old: str = "x", new: str = "y") -> str:
    return (
        f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}\n+{new}\n"
    )


FIX = diff("src/sums.py", "return a - b", "return a + b")
TESTS = diff("tests/test_sums.py", "assert False", "assert add(1, 1) == 2")
PROBLEM = "Sums are wrong.\n\nadd(1, 1) returns 0."
MENDED = ["tests/test_sums.py::test_add"]
KEPT = ["tests/test_sums.py::test_sub"]

BENCH: Row = {
    "instance_id": "pallets__flask-9999",
    "repo": "pallets/flask",
    "base_commit": "c0ffee",
    "patch": FIX,
    "test_patch": TESTS,
    "problem_statement": PROBLEM,
    "hints_text": "look at src/sums.py",
    "created_at": "2020-01-01T00:00:00Z",
    "version": "2.0",
    "FAIL_TO_PASS": json.dumps(MENDED),
    "PASS_TO_PASS": json.dumps(KEPT),
    "environment_setup_commit": "c0ffee",
}
GYM: Row = {
    **BENCH,
    "instance_id": "getmoto__moto-9999",
    "repo": "getmoto/moto",
    "FAIL_TO_PASS": MENDED,
    "PASS_TO_PASS": KEPT,
}
PARSED_COMMIT = {
    "file_diffs": [
        {
            "header": {"file": {"path": "src/sums.py"}, "misc_line": None},
            "minus_file": {"path": "a/src/sums.py"},
            "plus_file": {"path": "b/src/sums.py"},
            "is_binary_file": False,
            "hunks": [
                {
                    "descriptor": {
                        "old_range": {"start": 1, "length": None},
                        "new_range": {"start": 1, "length": None},
                        "section": "",
                    },
                    "line_group": {
                        "all_lines": [
                            {"content": "return a - b", "type": "deleted"},
                            {"content": "return a + b", "type": "added"},
                        ]
                    },
                }
            ],
        }
    ],
    "old_commit_hash": "c0ffee^",
    "new_commit_hash": "c0ffee",
}
R2E: Row = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:c0ffee",
    "commit_hash": "c0ffee" * 6 + "abcd",
    "parsed_commit_content": json.dumps(PARSED_COMMIT),
    "execution_result_content": json.dumps(
        {"test_file_names": ["test_1.py"], "test_file_codes": ["def test_add(): ..."]}
    ),
    "problem_statement": f"[ISSUE]\n{PROBLEM}\n[/ISSUE]",
    "expected_output_json": json.dumps({"test_add": "PASSED", "test_old": "FAILED"}),
}
PRO: Row = {
    "instance_id": "instance_acme__sums-c0ffee-vnan",
    "repo": "acme/sums",
    "base_commit": "ba5e",
    "patch": FIX,
    "test_patch": TESTS,
    "problem_statement": json.dumps(PROBLEM),
    "requirements": "- add returns the sum",
    "interface": "No new interfaces",
    "repo_language": "python",
    "fail_to_pass": str(MENDED),
    "pass_to_pass": str(KEPT),
    "before_repo_set_cmd": (
        "git reset --hard ba5e\ngit clean -fd \ngit checkout ba5e \n"
        "git checkout c0ffee -- tests/test_sums.py"
    ),
    "selected_test_files_to_run": '["tests/test_sums.py"]',
    "dockerhub_tag": "acme.sums-acme__sums-c0ffee",
    "run_script": "#!/bin/bash\npytest -v $1\n",
    "parser_script": "import sys\n",
    "base_dockerfile": 'FROM python:3.11\nENV A=1\nENV B="two words"\nENV PATH=/x:$PATH\n',
    "instance_dockerfile": "FROM base\n",
}
SMITH: Row = {
    "instance_id": "acme__sums.0123abcd.func_basic__9x8y7z",
    "repo": "swesmith/acme__sums.0123abcd",
    "patch": diff("src/sums.py", "return a + b", "return a - b"),
    "FAIL_TO_PASS": MENDED,
    "PASS_TO_PASS": ["tests/test_other.py::test_b", *KEPT],
    "image_name": "jyangballin/swesmith.x86_64.acme_1776_sums.0123abcd",
    "problem_statement": PROBLEM,
}
REBENCH: Row = {
    **GYM,
    "instance_id": "acme__sums-12",
    "repo": "acme/sums",
    "meta": {"is_lite": True, "llm_score": {"difficulty_score": 1}},
    "install_config": {
        "python": "3.9",
        "install": "pip install -e .",
        "test_cmd": "pytest --no-header -rA --tb=line --color=no",
        "log_parser": "parse_log_pytest",
    },
    "FAIL_TO_FAIL": [],
    "PASS_TO_FAIL": [],
    "license_name": "MIT License",
}
SCALE: Row = {
    "instance_id": "acme_sums_pr12",
    "user": "acme",
    "repo": "sums",
    "language": "python",
    "workdir": "/workspace/sums",
    "image_url": "registry.example/scale/acme_sums:12",
    "patch": FIX,
    "parent_commit": "ba5e",
    "problem_statement": PROBLEM,
    "f2p_patch": "",
    "f2p_script": "import sys, pytest\nsys.exit(pytest.main([__file__]))\n",
    "FAIL_TO_PASS": ["test_fail_to_pass.py::test_add"],
    "PASS_TO_PASS": KEPT,
    "pre_commands": "git checkout ba5e\\ngit clean -fd",
}
MULTI: Row = {
    "org": "Acme",
    "repo": "sums",
    "number": 12,
    "title": "Add instead of subtracting",
    "body": "Closes #11",
    "base": {"label": "Acme:main", "ref": "main", "sha": "ba5e"},
    "resolved_issues": [{"number": 11, "title": "Sums are wrong", "body": "add(1, 1) is 0"}],
    "fix_patch": FIX,
    "test_patch": TESTS,
    "f2p_tests": {"a": {"run": "PASS", "test": "FAIL", "fix": "PASS"}},
    "s2p_tests": {"b": {"run": "PASS", "test": "SKIP", "fix": "PASS"}},
    "n2p_tests": {"c": {"run": "NONE", "test": "NONE", "fix": "PASS"}},
    "p2p_tests": {"d": {"run": "PASS", "test": "PASS", "fix": "PASS"}},
    "instance_id": "Acme__sums-12",
}
HARBOR: Row = {
    "task_id": "mend-sums",
    "files": {
        "instruction.md": "Mend the sums in /app.\n",
        "task.toml": (
            'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 120.0\n'
            "[environment]\ncpus = 1\n"
        ),
        "environment/Dockerfile": "FROM python:3.12\nWORKDIR /srv/app\nRUN pip install pytest\n",
        "tests/test.sh": "pytest /tests && echo 1 > /logs/verifier/reward.txt\n",
        "tests/data.bin": "data:;base64,AP8=",
        "solution/solve.sh": "sed -i s/-/+/ sums.py\n",
    },
}
OPEN_INSTRUCT: Row = {
    "task_id": "task_7",
    "files": {
        "instruction.md": "Mend the sums in /workspace.\n",
        "image.txt": "registry.example/tasks:7\n",
        "environment/seeds/sums.py": "def add(a, b):\n    return a - b\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    },
}

EXAMPLES: Mapping[str, Row] = {
    "harbor": HARBOR,
    "multi-swe-rl": MULTI,
    "open-instruct": OPEN_INSTRUCT,
    "r2e-gym": R2E,
    "scale-swe": SCALE,
    "swe-bench": BENCH,
    "swe-bench-pro": PRO,
    "swe-gym": GYM,
    "swe-rebench": REBENCH,
    "swe-smith": SMITH,
}
"""Dataset -> a row that converts. A new dataset adds its own."""
