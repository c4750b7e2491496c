"""The checks that CI runs, by name: `nox -s tests -- -k gateway`.

Sessions run in the environment of `python3 bootstrap.py`; positional arguments pass through.
Three shelves of tests: `tests` needs nothing but this environment, `integration` starts programs of
others (Docker, a registry, SGLang, Ray, agents) or takes long, `nightly` attacks and
repeats.
"""

import json
import os
import shutil
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.stop_on_first_error = True

BENCHES = Path("bench")
SGLANG_ENV = Path(".nox/sglang-cpu")
SGLANG_PACKAGES = ("sglang==0.5.21", "gguf")
SGLANG_REQUIREMENTS = Path("tests/sglang_cpu/requirements.txt")
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
    """Run the unit tests, a file at a time in each worker; list skipped ones with reasons."""
    _test(session, "not (integration or nightly or gpu)", "--ignore=tests/integration")


@nox.session
def integration(session: nox.Session) -> None:
    """Run the tests that start Docker, a registry, SGLang, Ray or agents.

    SGLang's environment (3 GB) is kept in .nox/sglang-cpu. Tests without their program are skipped.
    """
    python = _sglang_python(session)
    env = {"SWERL_SGLANG_PYTHON": str(python)} if python else {}
    _test(session, "integration and not (nightly or gpu)", **env)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run attacks, hostile policies, releases of agents, toolchains, fuzzing and chaos."""
    _test(session, "nightly", SWERL_NIGHTLY="1")
    session.run("pytest", "-s", "tests/unit/gateway/test_fuzz.py", env={"SWERL_FUZZ": "1000000"})
    for more in (
        ("--faults", "300"),
        ("--kinds", "controller", "--kill", "--faults", "50", "--each", "25"),
    ):
        session.run("python", str(BENCHES / "chaos.py"), *more)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU."""
    if not shutil.which("nvidia-smi"):
        session.skip("no GPU on this machine")
    _test(session, "gpu")


@nox.session
def bench(session: nox.Session) -> None:
    """Run benchmarks; each prints a table and writes JSON. Name one: `-- sandbox`."""
    names = sorted(path.stem for path in BENCHES.glob("[!_]*.py") if path.stem != "chaos")
    if not shutil.which("nvidia-smi"):
        names.remove("gpu")
    for name in session.posargs or names:
        session.run("python", str(BENCHES / f"{name}.py"))


def _test(session: nox.Session, shelf: str, *options: str, **env: str) -> None:
    """Run the tests of a shelf, then repeat a few failed ones alone and name them.

    The repetition separates a busy machine from a defect.
    """
    workers = ["-n", str(min(os.cpu_count() or 1, MAX_WORKERS)), "--dist", "loadfile"]
    env |= {"OMP_NUM_THREADS": "1"}
    LAST_FAILED.unlink(missing_ok=True)
    some_failed = (0, 1)
    command = ["pytest", "-m", shelf, "--durations=15", *workers, *options, *session.posargs]
    session.run(*command, env=env, success_codes=some_failed)
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if len(failed) > MAX_SECOND_TRIES:
        session.error(f"{len(failed)} tests failed")
    if failed:
        session.warn("failed in parallel, repeated alone: " + ", ".join(failed))
        session.run("pytest", "-m", shelf, *failed, env=env)


def _sglang_python(session: nox.Session) -> Path | None:
    """Return an interpreter with SGLang, or None if it cannot be installed here."""
    python = SGLANG_ENV / "bin" / "python"
    stamp = SGLANG_ENV / "installed"
    pinned = "\n".join(SGLANG_PACKAGES) + SGLANG_REQUIREMENTS.read_text()
    if stamp.exists() and stamp.read_text() == pinned:
        return python.absolute()
    if shutil.which("python3.11") is None:
        session.warn("python3.11 is missing; SGLang's pinned torch has a CPU build only for it")
        return None
    shutil.rmtree(SGLANG_ENV, ignore_errors=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    try:
        session.run("python3.11", "-m", "venv", str(SGLANG_ENV), external=True)
        session.run(*pip, "torch==2.13.0", external=True)
        session.run(*pip, "--no-deps", *SGLANG_PACKAGES, external=True)
        session.run(*pip, "-r", str(SGLANG_REQUIREMENTS), external=True)
    except CommandFailed:
        session.warn("SGLang cannot be installed here; see pip's error above")
        return None
    stamp.write_text(pinned)
    return python.absolute()
