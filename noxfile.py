"""The checks that CI runs, by name: `nox -s tests -- -k gateway`.

Sessions run in the environment of `python3 bootstrap.py`; positional arguments pass through.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests", "sglang"]
nox.options.stop_on_first_error = True

BENCHES = Path("bench")
SGLANG_ENV = Path(".nox/sglang-cpu")
SGLANG_PACKAGES = ("sglang==0.5.21", "gguf")
SGLANG_REQUIREMENTS = Path("src/swerl/engines/_sglang_cpu/requirements.txt")
SGLANG_TESTS = (
    "tests/unit/plan/test_starts.py",
    "tests/unit/training/test_twin_sglang.py",
    "tests/unit/training/weight_sync/test_weight_sync_sglang.py",
    "tests/unit/training/weight_sync/test_experts_sglang.py",
)
GLM_AND_CONTRACT = "experts_sglang and glm4_moe or sglang and not experts_sglang"
MAX_WORKERS = 4
"""Most test processes: some tests have time limits, and fork bombs use whole processors."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
MAX_SECOND_TRIES = 3
"""Most failed tests that are repeated alone; more failures are not caused by a busy machine."""


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    session.run("mypy", "src")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, a file at a time in each worker; list skipped ones with reasons at the end.

    A few failed tests are repeated alone, to separate a busy machine from a defect. They are named
    in both cases.
    """
    workers = ["-n", str(min(os.cpu_count() or 1, MAX_WORKERS)), "--dist", "loadfile"]
    _test(session, *workers, *session.posargs)


@nox.session
def sglang(session: nox.Session) -> None:
    """Train the twin on unmodified SGLang on the CPU, send weights into it, read its experts.

    SGLang's environment (3 GB) is kept in .nox/sglang-cpu.
    """
    _run_on_sglang(session, [*SGLANG_TESTS, "-k", "not glm4_moe"])


@nox.session
def sglang_contract(session: nox.Session) -> None:
    """Run the engines' contract on SGLang, compare SGLang's parsers, serve GLM."""
    tests = ["tests/unit/engines/test_contract.py", "tests/unit/engines/families"]
    tests.append("tests/unit/training/weight_sync/test_experts_sglang.py")
    _run_on_sglang(session, [*tests, "-k", GLM_AND_CONTRACT])


@nox.session
def docs(session: nox.Session) -> None:
    """Check the links of the docs and compare the generated pages with the code."""
    session.run("pytest", "tests/test_docs.py", "tests/test_reference.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run benchmarks; each prints a table and writes JSON. Name one: `-- sandbox`."""
    found = sorted(path.stem for path in BENCHES.glob("[!_]*.py") if path.stem != "chaos")
    if not shutil.which("nvidia-smi"):
        found.remove("gpu")
    for name in session.posargs or found:
        session.run("python", str(BENCHES / f"{name}.py"))


@nox.session
def chaos(session: nox.Session) -> None:
    """Each night: 550 faults of runs and their services; 1,000,000 mutated requests."""
    for more in (
        ("--faults", "300"),
        ("--kinds", "controller", "--kill", "--faults", "50", "--each", "25"),
        ("--ray", "--faults", "30"),
        ("--service", "server", "--faults", "50"),
        ("--service", "docker", "--faults", "35"),
        ("--service", "registry", "--faults", "35"),
    ):
        session.run("python", str(BENCHES / "chaos.py"), *more, *session.posargs)
    fuzzed = ("gateway/test_fuzz.py", "sandboxes/e2b_server/test_http_corpus.py")
    files = [f"tests/unit/{file}" for file in fuzzed]
    session.run("pytest", "-s", *files, env={"SWERL_FUZZ": "1000000"})


@nox.session
def nightly(session: nox.Session) -> None:
    """Run the tests that repeat others for more releases of agents and more real tasks."""
    session.run("pytest", "-m", "nightly", *session.posargs, env={"SWERL_NIGHTLY": "1"})


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU."""
    if not shutil.which("nvidia-smi"):
        session.skip("no GPU on this machine")
    session.run("pytest", "-m", "gpu", *session.posargs)


def _test(session: nox.Session, *arguments: str, **env: str) -> None:
    """Run pytest, then repeat a few failed tests alone."""
    env |= {"OMP_NUM_THREADS": "1"}
    LAST_FAILED.unlink(missing_ok=True)
    some_failed = (0, 1)
    session.run("pytest", *arguments, env=env, success_codes=some_failed)
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if len(failed) > MAX_SECOND_TRIES:
        session.error(f"{len(failed)} tests failed")
    if failed:
        session.warn("failed in parallel, repeated alone: " + ", ".join(failed))
        session.run("pytest", *failed, env=env)


def _run_on_sglang(session: nox.Session, tests: Sequence[str]) -> None:
    """Run these tests, or those of the positional arguments, on SGLang; list the slowest."""
    python = _sglang_python(session)
    has_names = any(argument.startswith("tests") for argument in session.posargs)
    arguments = [*([] if has_names else tests), *session.posargs, "--durations=10"]
    _test(session, *arguments, SWERL_SGLANG_PYTHON=str(python))


def _sglang_python(session: nox.Session) -> Path:
    """Return an interpreter with SGLang; skip the session if it cannot be installed."""
    python = SGLANG_ENV / "bin" / "python"
    stamp = SGLANG_ENV / "installed"
    wanted = "\n".join(SGLANG_PACKAGES) + SGLANG_REQUIREMENTS.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return python.absolute()
    if shutil.which("python3.11") is None:
        session.skip("python3.11 is missing; SGLang's pinned torch has a CPU build only for it")
    shutil.rmtree(SGLANG_ENV, ignore_errors=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    try:
        session.run("python3.11", "-m", "venv", str(SGLANG_ENV), external=True)
        session.run(*pip, "torch==2.13.0", external=True)
        session.run(*pip, "--no-deps", *SGLANG_PACKAGES, external=True)
        session.run(*pip, "-r", str(SGLANG_REQUIREMENTS), external=True)
    except CommandFailed:
        session.skip("SGLang cannot be installed here; see pip's error above")
    stamp.write_text(wanted)
    return python.absolute()
