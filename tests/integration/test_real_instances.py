"""Real SWE-bench instances run whole: built from their source archives, attempted, graded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from swerl.core.task import from_row
from tests.unit.grading.agreement import packages
from tests.unit.grading.agreement.asking import ask
from tests.unit.grading.agreement.replay import Lists, Log

INSTANCES = (
    "pallets__flask-4045",
    "marshmallow-code__marshmallow-1359",
    "marshmallow-code__marshmallow-1702",
    "pydicom__pydicom-1562",
    "pytest-dev__pytest-7571",
    "psf__requests-5414",
)
IN_CI = ("pallets__flask-4045", "pytest-dev__pytest-7571")
"""Instances that CI also certifies and gives to Claude Code; the others at night."""
CANNOT = ("no Python", "npm", "bubblewrap")
"""What a machine may lack: the tests skip and say so."""


class Swerl:
    """The command line with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scripted = cache(self._scripted)
        self._env = {**os.environ, "SWERL_CACHE": str(folder / "cache")}

    def __call__(self, *arguments: str) -> str:
        """Run a command and return what it printed; skip what this machine cannot have."""
        command = [sys.executable, "-m", "swerl", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self._env, capture_output=True, text=True, timeout=600
        )
        if done.returncode and any(reason in done.stderr for reason in CANNOT):
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def rollout(self, instance: str, *arguments: str) -> dict[str, Any]:
        """Attempt an instance and return the command's JSON."""
        tasks = self.folder / f"{instance}.jsonl"
        result: dict[str, Any] = json.loads(
            self("rollout", "--tasks", str(tasks), "--instance", instance, "--json", *arguments)
        )
        return result

    def _scripted(self, instance: str, script: str) -> dict[str, Any]:
        """Return the JSON of a scripted attempt; each runs once."""
        return self.rollout(instance, "--engine", f"scripted:{script}")


@pytest.fixture(scope="module")
def swerl(tmp_path_factory: pytest.TempPathFactory) -> Swerl:
    return Swerl(tmp_path_factory.mktemp("instances"))


@pytest.fixture(scope="module", params=INSTANCES)
def instance(request: pytest.FixtureRequest, swerl: Swerl, shared_dir: Path) -> str:
    """An instance whose image is built and whose task file is written."""
    name: str = request.param
    instances = shared_dir / "instances"
    swerl(
        *("images", "build", str(instances / "instances.json"), "--instance", name),
        *("--rows", str(instances / "rows.jsonl"), "-o", f"{name}.jsonl"),
    )
    return name


_nightly_but_two = pytest.mark.parametrize(
    "instance",
    [
        each if each in IN_CI else pytest.param(each, marks=pytest.mark.nightly)
        for each in INSTANCES
    ],
    indirect=True,
)


def test_the_known_solution_is_solved(swerl: Swerl, instance: str) -> None:
    assert swerl.scripted(instance, "gold")["verdict"] == "solved"


def test_changing_nothing_is_unsolved(swerl: Swerl, instance: str) -> None:
    assert swerl.scripted(instance, "noop")["verdict"] == "unsolved"


@_nightly_but_two
def test_it_is_certified(swerl: Swerl, instance: str) -> None:
    """What vetting does for one: nothing is unsolved, gold is solved, cheats get nowhere."""
    [vetted] = json.loads(swerl("tasks", "vet", f"{instance}.jsonl", "--gold-runs", "1", "--json"))
    certificate = vetted["certificate"]
    assert vetted["ok"], certificate["findings"]
    assert certificate["mutated"] and certificate["why"]
    # A cheat that does not apply holds the reason in place of a verdict.
    assert "solved" not in certificate["probes"].values()
    assert certificate["probes"]["forged lines"] in ("unsolved", "cheat")
    assert certificate["measured"]["test_s"] < certificate["timeout_s"]


@pytest.mark.parametrize("script", ["gold", "noop"])
def test_the_swebench_package_comes_to_the_same_verdict(
    swerl: Swerl, instance: str, script: str, shared_dir: Path, request: pytest.FixtureRequest
) -> None:
    package = packages.fetch(request.config.cache, packages.NEW)
    known = json.loads((shared_dir / "instances" / "instances.json").read_text())
    [parser] = {each["log_parser"] for each in known if each["instance_id"] == instance}
    task = from_row(json.loads((swerl.folder / f"{instance}.jsonl").read_text()))
    result = swerl.scripted(instance, script)
    text = json.loads((swerl.folder / result["artefacts"]["grade"]).read_text())["log"]
    log = Log(
        instance, parser, text, int(script == "noop"), swerl.folder / f"{instance}-{script}.log"
    )
    log.save()
    lists = Lists(task.grading.fail_to_pass, task.grading.pass_to_pass)
    [theirs] = ask(package, [log], [(0, lists)])
    assert theirs.resolved == (result["verdict"] == "solved")
    assert theirs.passed or script == "noop"


@_nightly_but_two
@pytest.mark.agents
def test_claude_code_solves_it_with_its_own_tools(swerl: Swerl, instance: str) -> None:
    result = swerl.rollout(instance, "--agent", "claude-code", "--engine", "scripted:gold")
    assert result["verdict"] == "solved"
    log = (swerl.folder / result["artefacts"]["agent log"]).read_text()
    assert '"name":"Edit"' in log.replace('": "', '":"')
    trajectory = json.loads((swerl.folder / result["artefacts"]["tokens"]).read_text())
    assert all(turn["trainable"] and turn["output_ids"] for turn in trajectory["turns"])
