"""A learner's tests change their process for good, so they run in one of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")


@pytest.mark.nightly
def test_a_learner_alone_in_its_process() -> None:
    file = Path(__file__).with_name("learner_alone.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
