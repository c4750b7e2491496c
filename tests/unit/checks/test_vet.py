"""Vetting admits a sound Task, names what is wrong with another, and does nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.checks.vet import Rigour, VetSettings, Vetted, fitting_workers, vet
from swerl.core.certificate import Defect, certified, objection
from swerl.core.sandbox import Limits
from swerl.core.task import Strength, Task, file_text, from_row, to_row
from swerl.sandboxes import docker, local
from swerl.tasks.hide_future import Stage, hide_future

from .vetting import (
    ADD,
    RUN_FILE,
    TESTS,
    WORKDIR,
    ZERO,
    Numbered,
    make_task,
)

FLAKY = "test_flaky (tests.test_calc.SumTest.test_flaky)"
FLAKY_TEST = f"""
    def test_flaky(self):
        self.assertNotEqual(open("{RUN_FILE}").read(), "%d")
"""
BARE_COMMAND = "python3 -c 'import calc; assert calc.add(2, 3) == 5'"


async def run(
    *tasks: Task,
    backend: Numbered | None = None,
    rigour: Rigour | None = None,
    done: dict[str, Vetted] | None = None,
    image: str = "",
) -> list[tuple[Vetted, bool]]:
    heard: list[tuple[Vetted, bool]] = []

    async def digest(_: str) -> str:
        return image

    settings = VetSettings("local", rigour or Rigour(2), 2, digest=digest, journal=done or {})
    await vet(backend or Numbered(), tasks, settings, on_done=lambda *each: heard.append(each))
    return heard


async def vet_one(task: Task, rigour: Rigour | None = None) -> Vetted:
    [(vetted, _)] = await run(task, rigour=rigour)
    return vetted


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Task]:
    return lambda **spec: make_task(tmp_path / "image", **spec)


async def test_a_sound_task_is_certified_with_what_vetting_measured(
    make: Callable[..., Task],
) -> None:
    task = make()
    vetted = await vet_one(task, Rigour(3))
    told = vetted.certificate
    assert vetted.ok, told
    assert told
    assert (told.gold_runs, told.timeout_s) == (3, 60.0)
    # Code can guess the sum of the arguments.
    assert (told.strength, told.share) == (Strength.SOME, 0.0)
    assert set(told.probes.values()) <= {"unsolved", "cheat"}
    assert len(told.probes) == 4
    assert 0 < told.measured.test_s <= told.measured.grading_s

    final = certified(task, told)
    kept = final.grading.mutated
    assert kept
    assert {version.tests for version in kept} == {(ADD,)}
    assert final.grading == replace(task.grading, mutated=kept, not_run=(), timeout_s=60.0)
    assert objection(final) == ""
    assert from_row(to_row(final)) == final


async def test_a_certificate_speaks_of_its_own_row_alone(make: Callable[..., Task]) -> None:
    task = make()
    vetted = await vet_one(task)
    assert vetted.certificate
    final = certified(task, vetted.certificate)
    assert "never" in objection(task)
    assert "changed" in objection(replace(final, prompt="Do something else."))
    assert "changed" in objection(replace(final, grading=replace(final.grading, pass_to_pass=())))
    assert objection(replace(final, metadata={"solve_rate": 0.5})) == ""


BROKEN_TASKS: dict[Defect, dict[str, object]] = {
    Defect.NOOP_SOLVED: {"fail_to_pass": (ZERO,), "pass_to_pass": ()},
    Defect.PASSES_BEFORE: {"fail_to_pass": (ADD, ZERO), "pass_to_pass": ()},
    Defect.FAILS_BEFORE: {"fail_to_pass": (ADD,), "pass_to_pass": (ADD, ZERO)},
    Defect.GOLD_FAILS: {"test_files": {"tests/test_calc.py": TESTS.replace("5)", "6)")}},
    Defect.UNSEEN: {"fail_to_pass": (ADD, "test_gone (tests.test_calc.SumTest.test_gone)")},
    Defect.TIMEOUT: {"test_command": "sleep 60", "timeout_s": 0.2},
    Defect.BROKEN: {"log_parser": "no_such_parser"},
    Defect.CHEAT: {
        "grader": "command",
        "fail_to_pass": (),
        "pass_to_pass": (),
        "test_command": BARE_COMMAND,
    },
}


@pytest.mark.parametrize("defect", BROKEN_TASKS, ids=str)
async def test_a_broken_task_is_rejected_for_the_right_reason(
    defect: Defect, make: Callable[..., Task]
) -> None:
    task = make(**BROKEN_TASKS[defect])
    vetted = await vet_one(task)
    assert vetted.certificate
    assert not vetted.ok
    assert defect in {finding.defect for finding in vetted.certificate.findings}
    assert "rejected" in objection(certified(task, vetted.certificate))


async def test_a_task_without_a_solution_is_rejected(make: Callable[..., Task]) -> None:
    vetted = await vet_one(replace(make(), gold_patch=""))
    assert vetted.certificate
    assert [found.defect for found in vetted.certificate.findings] == [Defect.NO_SOLUTION]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("path", "defects"),
    [("answer.diff", []), ("lib/python3.11/site-packages/calc/answer.diff", [Defect.LEAK])],
)
async def test_a_solution_in_the_image_is_removed_or_a_leak(
    tmp_path: Path, path: str, defects: list[Defect]
) -> None:
    task = make_task(tmp_path / "image")
    file = tmp_path / "image" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(task.gold_patch)
    vetted = await vet_one(task)
    assert vetted.certificate
    assert [found.defect for found in vetted.certificate.findings] == defects
    assert vetted.certificate.removed == (() if defects else ("/repo/answer.diff",))
    # Every sandbox of the certified Task loses it.
    await hide_and_expect(certified(task, vetted.certificate), path, is_there=bool(defects))


async def hide_and_expect(task: Task, path: str, *, is_there: bool) -> None:
    for stage in (Stage.AGENT, Stage.GRADING):
        backend = local.build(local.Options())
        async with backend.open(task.image, Limits(), workdir=WORKDIR) as sandbox:
            await hide_future(sandbox, task, stage=stage)
            listed = await sandbox.run(["ls", path], cwd=WORKDIR)
            assert (listed.exit_code == 0) == is_there


def flaky_task(tmp_path: Path, *, bad_run: int) -> Task:
    """Return a Task with a test to keep that fails in the sandbox of this number alone."""
    files = {"tests/__init__.py": "", "tests/test_calc.py": TESTS + FLAKY_TEST % bad_run}
    return make_task(tmp_path / "image", test_files=files, pass_to_pass=(ZERO, FLAKY))


FIRST_GOLD_RUN = 3
"""After the run without a change, and the sandbox in which the solution's diff is applied."""


async def test_a_test_that_fails_in_one_of_the_runs_is_flaky(tmp_path: Path) -> None:
    vetted = await vet_one(flaky_task(tmp_path, bad_run=FIRST_GOLD_RUN))
    assert vetted.certificate
    assert vetted.certificate.flaky == (FLAKY,)
    assert Defect.FLAKY in {found.defect for found in vetted.certificate.findings}


@pytest.mark.integration
@pytest.mark.parametrize("is_noop", [True, False])
async def test_unsteady_tests_are_dropped_where_asked(tmp_path: Path, is_noop: bool) -> None:
    bad_run = 1 if is_noop else FIRST_GOLD_RUN
    task = flaky_task(tmp_path, bad_run=bad_run)
    vetted = await vet_one(task, Rigour(2, drop_flaky=True))
    assert vetted.ok, vetted
    assert vetted.certificate
    assert vetted.certificate.dropped == (FLAKY,)
    final = certified(task, vetted.certificate)
    assert final.grading.pass_to_pass == (ZERO,)
    assert objection(final) == ""


async def test_a_task_without_an_expected_value_can_be_forged_and_is_not_admitted(
    make: Callable[..., Task],
) -> None:
    """The test compares nothing with a value, so forged lines look like a solution."""
    tests = (
        "import sys\n\nimport calc\n\nprint('test_add', end=' ')\ncalc.add(2, 3)\nprint('... ok')\n"
    )
    vetted = await vet_one(
        make(
            test_files={"tests/__init__.py": "", "tests/test_calc.py": tests},
            test_command="python3 -m tests.test_calc",
            fail_to_pass=("test_add",),
            pass_to_pass=(),
        )
    )
    assert vetted.certificate
    assert (vetted.certificate.strength, vetted.certificate.share) == (Strength.NONE, 0.0)
    assert Defect.NOOP_SOLVED in [found.defect for found in vetted.certificate.findings]


@pytest.mark.integration
async def test_what_is_known_is_not_vetted_again(make: Callable[..., Task]) -> None:
    task = make()
    [(first, is_new)] = await run(task, image="sha256:a")
    assert is_new
    done, backend = {task.id: first}, Numbered()
    assert await run(task, backend=backend, done=done, image="sha256:a") == [(first, False)]
    assert backend.num_opened == 0


@pytest.mark.integration
@pytest.mark.parametrize("change", ["row", "image", "rigour"])
async def test_what_has_changed_is_vetted_again(make: Callable[..., Task], change: str) -> None:
    task = make()
    [(first, _)] = await run(task, image="sha256:a")
    [(_, is_new)] = await run(
        replace(task, prompt="Mend it.") if change == "row" else task,
        done={task.id: first},
        image="sha256:b" if change == "image" else "sha256:a",
        rigour=Rigour(1) if change == "rigour" else None,
    )
    assert is_new


@pytest.mark.integration
async def test_an_image_that_the_first_run_pulls_has_its_digest_afterwards(
    make: Callable[..., Task],
) -> None:
    task, backend = make(), Numbered()
    heard: list[tuple[Vetted, bool]] = []

    async def digest(_: str) -> str:
        return "sha256:pulled" if backend.num_opened else ""

    for _ in range(2):
        known = {vetted.task: vetted for vetted, _ in heard}
        settings = VetSettings("local", Rigour(1), digest=digest, journal=known)
        await vet(backend, [task], settings, on_done=lambda *each: heard.append(each))
    assert [is_new for _, is_new in heard] == [True, False]
    assert heard[0][0].certificate
    assert heard[0][0].certificate.image == "sha256:pulled"


@pytest.mark.integration
async def test_a_lost_machine_says_nothing_about_a_task(make: Callable[..., Task]) -> None:
    task = make()
    [(vetted, _)] = await run(task, backend=Numbered(lost=[2]))
    assert vetted.ok
    [(vetted, _)] = await run(task, backend=Numbered(lost=[2, 3, 4]))
    assert not vetted.ok
    assert vetted.certificate is None
    assert "went away" in vetted.failure


async def test_a_task_is_vetted_in_containers_too(
    make: Callable[..., Task], dockerd: str, docker_image: str
) -> None:
    """The repository comes by the Task's own files."""
    task = make()
    folder = Path(task.image.removeprefix("dir:"))
    repository = {
        f"{WORKDIR}/{path.relative_to(folder)}": file_text(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }
    task = replace(task, image=docker_image, files=repository)
    backend = docker.build(docker.Options(base_url=dockerd))
    heard: list[Vetted] = []
    settings = VetSettings("docker", Rigour(1))
    await vet(backend, [task], settings, on_done=lambda each, _: heard.append(each))
    assert heard[0].ok, heard[0].certificate and heard[0].certificate.findings


def test_no_more_run_at_once_than_memory_allows() -> None:
    assert fitting_workers(Limits(memory_mib=1 << 30)) == 1
    assert fitting_workers(Limits(memory_mib=16, num_cpus=1e6)) == 1
    assert fitting_workers(Limits(memory_mib=16, num_cpus=0.25)) >= 4
