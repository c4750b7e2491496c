"""Run a Python as an unprivileged user."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

import pytest

_NOBODY = 65534
_RUN_ITSELF = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"


@functools.cache
def command() -> tuple[str, ...]:
    """Return the command line of a Python as another user; skip the test if there is none."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root, to become another user")
    user = ("setpriv", "--reuid", str(_NOBODY), "--regid", str(_NOBODY), "--clear-groups")
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        argv = (*user, python)
        if subprocess.run([*argv, "-c", _RUN_ITSELF], capture_output=True).returncode == 0:
            return argv
    pytest.skip("an unprivileged user cannot run any Python of this version here")
