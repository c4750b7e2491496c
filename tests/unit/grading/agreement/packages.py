"""The swebench package and Django in folders of their own, without dependencies."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLASSIC, NEW = "swebench==4.1.0", "swebench==5.0.2"
DJANGO = ("Django==5.2.8", "asgiref==3.11.0", "sqlparse==0.5.4")
_INSTALL_S = 300


def fetch(cache: pytest.Cache, *requirements: str) -> Path:
    """Return a folder with these packages, kept between runs; skip if they are not available."""
    folder = Path(cache.mkdir("agreement")) / requirements[0]
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    options = ["--no-deps", "--retries", "1", "--timeout", "20", "--target", str(part)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *requirements]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=True)
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        pytest.skip(f"{requirements[0]} cannot be installed here: {said[-200:]}")
    part.rename(folder)
    return folder
