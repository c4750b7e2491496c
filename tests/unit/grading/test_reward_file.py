"""The `reward_file` grader: the tests write a number, which must be able to be low."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from swerl.core.grade import Confirmation, Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.audit import Audit
from swerl.grading.flow import GradingReport
from swerl.grading.graders import reward_file
from tests.unit.grading.conftest import GOLD, in_sandboxes

pytestmark = pytest.mark.integration

HONEST = "import calc\n\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n"
REWARD = "/tmp/reward.txt"
SCRIPT = f"""\
cd /repo
if PYTHONPATH=. python3 -m pytest -q -p no:cacheprovider /hidden/test_outputs.py
then echo GOOD >{REWARD}; else echo 0 >{REWARD}; fi
"""


@pytest.fixture
def judged(task: Task) -> Callable[..., Task]:
    """Build a Task whose script writes a reward."""

    def build(*, good: str = "1", script: str = SCRIPT) -> Task:
        text = script.replace("GOOD", f"'{good}'")
        spec = GradingSpec(
            "reward_file",
            files={"/hidden/test.sh": text, "/hidden/test_outputs.py": HONEST},
            test_command="bash /hidden/test.sh",
            report_path=REWARD,
            timeout_s=60.0,
        )
        return replace(task, image=f"dir:{task.workdir}", workdir="/repo", grading=spec)

    return build


DOWNLOAD = f"""\
curl -LsSf https://host.invalid/install.sh | sh
uvx-of-nobody pytest /hidden/test_outputs.py
if [ $? -eq 0 ]; then echo 1; else echo 0; fi >{REWARD}
"""


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        (DOWNLOAD, "invalid"),
        (f"{DOWNLOAD}echo 1 failed in 0.1s\n", "unsolved"),
        (f"uvx-of-nobody pytest; echo 0 >{REWARD}\n", "unsolved"),
    ],
)
async def test_tests_whose_runner_cannot_be_downloaded_are_invalid(
    judged: Callable[..., Task], script: str, verdict: str
) -> None:
    result = await grade(judged(script=script), GOLD)
    assert result.verdict == verdict, result.reason


async def grade(task: Task, patch: str) -> Grade:
    grader, open_clean = reward_file.build(), in_sandboxes(task)
    return await Audit(1.0).grade(grader, task, patch, open_clean, text=patch)


def rewrite(text: str) -> str:
    """Return a patch that makes calc.py this text."""
    new = "".join(f"+{line}\n" for line in text.splitlines())
    return (
        "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n"
        f"@@ -1,2 +1,{len(text.splitlines())} @@\n-def add(a, b):\n-    return a - b\n{new}"
    )


@pytest.mark.parametrize("good", ["1", "1.0", '{"reward": 1}', '{"score": 1, "reward": 1.0}'])
async def test_a_full_reward_is_solved(judged: Callable[..., Task], good: str) -> None:
    result = await grade(judged(good=good), GOLD)
    assert (result.verdict, result.confirmation) == (Verdict.SOLVED, Confirmation.REAL)


@pytest.mark.parametrize("good", ["0.5", "true", '{"a": 1, "b": 1}'])
async def test_anything_else_is_not(judged: Callable[..., Task], good: str) -> None:
    assert (await grade(judged(good=good), GOLD)).verdict is Verdict.UNSOLVED


@pytest.mark.parametrize(
    "text",
    [
        *("NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "yes", "", "{}", "null", "[1]"),
        *(f"1{'0' * 400}", f'{{"reward": -1{"0" * 400}}}', "9" * 5000, "[" * 5000, '{"a":' * 5000),
        *('{"reward": null}', '{"reward": {"reward": 1}}', "1" + " " * (1 << 20), "\ud800", "\0"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_without_a_plain_number_holds_no_reward(text: str) -> None:
    report = GradingReport("", 0, text)
    found = reward_file.build().judge(GradingSpec("reward_file", report_path="/r"), report)
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, "the tests wrote no reward")


async def test_no_solution_is_unsolved(judged: Callable[..., Task]) -> None:
    result = await grade(judged(), "")
    assert (result.verdict, result.reason) == (Verdict.UNSOLVED, "the tests wrote a reward of 0")


async def test_a_reward_from_before_the_tests_is_gone(judged: Callable[..., Task]) -> None:
    task = replace(judged(script="exit 0"), files={REWARD: "1"})
    result = await grade(task, GOLD)
    assert (result.verdict, result.reason) == (Verdict.UNSOLVED, "the tests wrote no reward")


async def test_a_planted_reward_and_an_early_end_do_not_count(judged: Callable[..., Task]) -> None:
    forger = (
        "import os, pathlib, signal\n"
        f"pathlib.Path({REWARD!r}).write_text('1')\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "os._exit(0)\n"
    )
    result = await grade(judged(), rewrite(forger))
    assert result.verdict is Verdict.UNSOLVED
    assert "void" in result.reason or "killed" in result.reason


async def test_a_test_that_always_passes_is_found_by_mutated_tests(
    judged: Callable[..., Task],
) -> None:
    found = await grade(judged(), rewrite("import os\nos._exit(0)\n"))
    assert (found.verdict, found.confirmation) == (Verdict.CHEAT, Confirmation.FORGED)


async def test_a_log_with_failures_overrules_the_file(judged: Callable[..., Task]) -> None:
    script = f"echo 'FAILED test_outputs.py::test_add'; echo 1 >{REWARD}"
    result = await grade(judged(script=script), GOLD)
    assert result.verdict is Verdict.UNSOLVED
    assert "test_outputs.py::test_add fails" in result.reason


async def test_an_error_that_a_good_test_logs_costs_nothing(judged: Callable[..., Task]) -> None:
    script = SCRIPT.replace("-q", "-q -rA")
    noise = "    import logging\n    logging.error('x')\n    print('ERROR x')\n"
    text = HONEST.replace("    assert", f"{noise}    assert")
    task = judged(script=script)
    files = {k: text if k.endswith("outputs.py") else v for k, v in task.grading.files.items()}
    task = replace(task, grading=replace(task.grading, files=files))
    assert (await grade(task, GOLD)).verdict is Verdict.SOLVED


async def test_no_path_is_an_invalid_task(judged: Callable[..., Task]) -> None:
    task = judged()
    task = replace(task, grading=replace(task.grading, report_path=""))
    assert (await grade(task, GOLD)).verdict is Verdict.INVALID
