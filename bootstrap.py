"""Install swerl with all that it needs on this machine, then run it.

    python3 bootstrap.py train    train the CPU twin (recipes/twin_cpu.toml)
    python3 bootstrap.py test     run the linter, the type checker and the unit tests
    python3 bootstrap.py setup    only install

    python3 bootstrap.py integration    test with Docker, a registry, SGLang, Ray, agents
    python3 bootstrap.py nightly        attack sandboxes and grading; more agents and toolchains

Needs Python 3.11 to 3.13 with venv, and git. As root on a Debian machine it also installs
bubblewrap, which `swerl images build` needs, and for the last two commands the programs that their
tests start. On other machines tests without their programs are skipped. Further arguments are
passed to the command: `python3 bootstrap.py train --set seed=1`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
EXTRAS = {
    "train": "twin",
    "setup": "twin",
    "test": "twin,cluster,dev",
    "integration": "twin,cluster,dev",
    "nightly": "twin,cluster,dev",
}
COMMANDS = {
    "train": ["swerl", "train", "recipes/twin_cpu.toml"],
    "test": ["nox"],
    "integration": ["nox", "-s", "integration", "--"],
    "nightly": ["nox", "-s", "nightly", "--"],
}
SERVICES = {
    "bwrap": "bubblewrap",
    "dockerd": "docker.io",
    "runsc": "runsc",
    "docker-registry": "docker-registry",
    "skopeo": "skopeo",
    "mmdebstrap": "mmdebstrap",
    "busybox": "busybox",
}
TOOLCHAINS = {"go": "golang-go", "rspec": "ruby-rspec", "phpunit": "phpunit"}
DEBIAN_PACKAGES: dict[str, dict[str, str]] = {
    "train": {},
    "setup": {"bwrap": "bubblewrap"},
    "test": {"bwrap": "bubblewrap"},
    "integration": SERVICES,
    "nightly": SERVICES | TOOLCHAINS,
}
"""Command -> program -> its Debian package. No daemon is started."""
POLICY = Path("/usr/sbin/policy-rc.d")
"""The script that decides whether Debian starts a service after its installation."""
TORCH_PYTHON = (3, 11)
"""The pinned torch has a CPU build for this Python; others get a far larger one."""
UNSUPPORTED_PYTHON = (3, 14)
"""The first Python that lacks packages of the trainer and of the engine."""


def main(arguments: list[str]) -> int:
    """Run one of the commands; return its exit code."""
    if not arguments or arguments[0] not in EXTRAS:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    job, *rest = arguments
    _check_system()
    _make_venv(_choose_python())
    _install(EXTRAS[job])
    # Where PYTHONDONTWRITEBYTECODE is set, every start of swerl would compile its sources.
    subprocess.call([str(VENV / "bin" / "python"), "-m", "compileall", "-q", "src"], cwd=ROOT)
    _install_debian_packages(DEBIAN_PACKAGES[job])
    if job not in COMMANDS:
        _say("ready: .venv/bin/swerl --help")
        return 0
    command = [*COMMANDS[job], *rest]
    _say(f"running {' '.join(command)}")
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return subprocess.call(command, cwd=ROOT, env={**os.environ, "PATH": path})


def _check_system() -> None:
    if sys.platform != "linux":
        message = "error: training and local sandboxes need Linux"
        sys.exit(f"{message}\nhint:  run this in a Linux container: docs/guides/sandboxes.md")
    if shutil.which("git") is None:
        sys.exit("error: git is missing\nhint:  install git, then run this command again")


def _choose_python() -> str:
    if sys.version_info[:2] == TORCH_PYTHON:
        return sys.executable
    wanted = shutil.which(f"python{TORCH_PYTHON[0]}.{TORCH_PYTHON[1]}")
    if wanted and subprocess.call([wanted, "-c", "import venv, ensurepip"]) == 0:
        return wanted
    if not TORCH_PYTHON <= sys.version_info < UNSUPPORTED_PYTHON:
        version = ".".join(map(str, sys.version_info[:2]))
        message = (
            f"error: this is Python {version}; Megatron-Core and SGLang have wheels for 3.11-3.13"
        )
        sys.exit(f"{message}\nhint:  install Python 3.11, then run this again")
    _say("Python 3.11 is missing: torch will include its GPU libraries, several gigabytes")
    return sys.executable


def _make_venv(python: str) -> None:
    if (VENV / "bin" / "python").exists():
        return
    _say(f"making {VENV.name} with {python}")
    _run([python, "-m", "venv", str(VENV)], "install the venv module (python3-venv)")


def _install(extras: str) -> None:
    stamp = VENV / f".swerl-{extras.replace(',', '-')}"
    wanted = (ROOT / "pyproject.toml").read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    _say(f"installing the extras {extras}: about a gigabyte, most of it torch")
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    _run([*pip, "--no-user", "-e", f".[{extras}]"], "check that a package registry is reachable")
    stamp.write_text(wanted)


def _install_debian_packages(packages: dict[str, str]) -> None:
    missing = _missing(packages)
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        why = "not root" if os.geteuid() != 0 else "no apt-get"
        _say(f"cannot install {', '.join(missing)} here ({why}); continuing without")
        return
    _say(f"installing {', '.join(missing)}")
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
    with _no_services():
        if not _apt([*install, *missing]):
            _apt(["apt-get", "update", "-qq"])
            _apt([*install, *missing])
        for package in _missing(packages):  # a missing package must not prevent the others
            _apt([*install, package])
    if still := _missing(packages):
        _say(f"could not install {', '.join(still)}; continuing without")


@contextmanager
def _no_services() -> Iterator[None]:
    """Prevent Debian from starting new services: a daemon changes the machine's network."""
    made = POLICY.parent.is_dir() and not POLICY.exists()
    if made:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if made:
            POLICY.unlink(missing_ok=True)


def _missing(packages: dict[str, str]) -> list[str]:
    path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
    return [name for program, name in packages.items() if not shutil.which(program, path=path)]


def _apt(command: list[str]) -> bool:
    """Run apt without prompts; return whether it succeeded."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.call(command, env=env, stdin=subprocess.DEVNULL) == 0


def _run(command: list[str], hint: str) -> None:
    started = time.monotonic()
    if subprocess.call(command, cwd=ROOT):
        sys.exit(f"error: {' '.join(command)} failed\nhint:  {hint}")
    _say(f"done in {time.monotonic() - started:.0f} s")


def _say(text: str) -> None:
    print(f"==> {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
