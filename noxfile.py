"""Everything that CI runs, by name: `nox -s tests -- -k gateway`.

Sessions run in the environment that `python3 bootstrap.py` made; positional arguments pass through.
"""

import os
import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.stop_on_first_error = True

BENCHES = Path("bench")
MAX_WORKERS = 4
"""Test processes at once: some tests hold a time limit, and bombs take whole processors."""


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
    """Run the tests, a file at a time in each worker; skipped ones say why at the end."""
    workers = ["-n", str(min(os.cpu_count() or 1, MAX_WORKERS)), "--dist", "loadfile"]
    session.run("pytest", *workers, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def docs(session: nox.Session) -> None:
    """Check that every link and command in the docs leads somewhere."""
    session.run("pytest", "tests/test_docs.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure; each benchmark prints a table and writes JSON. Name one: `-- sandbox`."""
    names = session.posargs or sorted(path.stem for path in BENCHES.glob("[!_]*.py"))
    for name in names:
        session.run("python", str(BENCHES / f"{name}.py"))


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU."""
    if not shutil.which("nvidia-smi"):
        session.skip("no GPU on this machine")
    session.run("pytest", "-m", "gpu", *session.posargs)
