"""Verdicts of the swebench package itself, for one generation of it: runs in a process of its own.

Reads JSON from standard input: `{"logs": [{"path", "parser"}], "cases": [{"log", "fail_to_pass",
"pass_to_pass"}]}`, where `log` counts the logs, and writes `{"statuses": […], "verdicts": […]}`.
A log on which the package fails has no statuses, and its cases no verdict.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import MagicMock

HEAVY = ("bs4", "datasets", "docker", "dotenv", "ghapi", "git", "requests", "tqdm", "unidiff")
"""What the package imports on the way but never calls to grade."""


@dataclass
class Spec:
    """The fields of the package's TestSpec that grading reads."""

    log_parser: str
    repo: str
    version: str
    FAIL_TO_PASS: list[str] = field(default_factory=list)
    PASS_TO_PASS: list[str] = field(default_factory=list)
    instance_id: str = "a__b-1"
    eval_type: str = "pass_and_fail"


def main(folder: str) -> None:
    """Judge every log and every case."""
    grading, registry = _package(folder)
    asked = json.load(sys.stdin)
    said = {"statuses": [], "verdicts": []}
    specs = [_spec(log["parser"], registry) for log in asked["logs"]]
    for log, spec in zip(asked["logs"], specs, strict=True):
        said["statuses"].append(_try(_statuses, grading, spec, log["path"]))
    for case in asked["cases"]:
        spec = specs[case["log"]]
        spec.FAIL_TO_PASS, spec.PASS_TO_PASS = case["fail_to_pass"], case["pass_to_pass"]
        path = asked["logs"][case["log"]]["path"]
        said["verdicts"].append(_try(_verdict, grading, spec, path))
    json.dump(said, sys.stdout)


def _package(folder: str) -> tuple[types.ModuleType, dict[str, object]]:
    """Import grading and the parsers without the package's `__init__`, which imports everything."""
    sys.path.insert(0, folder)
    for name in HEAVY:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = MagicMock()
    for name in ("swebench", "swebench.harness"):
        module = types.ModuleType(name)
        module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules[name] = module
    from swebench.harness import grading, log_parsers

    return grading, vars(log_parsers).get("PARSER_REGISTRY") or _registry(log_parsers)


def _registry(log_parsers: types.ModuleType) -> dict[str, object]:
    """Name the parsers of the older generation, which finds them by repository alone."""
    return {parser.__name__: parser for parser in vars(log_parsers)["MAP_REPO_TO_PARSER"].values()}


def _spec(parser: str, registry: dict[str, object]) -> Spec:
    from swebench.harness import constants, log_parsers

    repos = vars(log_parsers).get("MAP_REPO_TO_PARSER")
    if repos is None:
        return Spec(parser, "a/b", "1")
    repo = next((repo for repo, found in repos.items() if found is registry.get(parser)), "")
    if not repo:
        return Spec(parser, "", "")
    return Spec(parser, repo, next(iter(constants.MAP_REPO_VERSION_TO_SPECS[repo])))


def _statuses(grading: types.ModuleType, spec: Spec, path: str) -> dict[str, str]:
    statuses, _ = grading.get_logs_eval(spec, path)
    return statuses


def _verdict(grading: types.ModuleType, spec: Spec, path: str) -> dict[str, object]:
    prediction = {"instance_id": spec.instance_id, "model_name_or_path": "m", "model_patch": "p"}
    report = grading.get_eval_report(spec, prediction, path, True)[spec.instance_id]
    tests = report.get("tests_status", {})
    passed = [name for lists in tests.values() for name in lists["success"]]
    failed = [name for lists in tests.values() for name in lists["failure"]]
    return {"resolved": report["resolved"], "passed": passed, "failed": failed}


def _try(call: Callable[..., object], *arguments: object) -> object:
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        return call(*arguments)
    except Exception:  # noqa: BLE001  whatever it breaks with is what it says
        return None
    finally:
        sys.stdout = stdout


if __name__ == "__main__":
    main(sys.argv[1])
