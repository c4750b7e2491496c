"""opencode: what it is started with, and how its ends are told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swerl.harnesses import opencode
from swerl.harnesses.opencode import OpenCode, Options

from .helpers import ended, started


async def test_a_slow_model_is_waited_for() -> None:
    env = (await started(OpenCode(Options(), ())))["env"]
    options = json.loads(env["OPENCODE_CONFIG_CONTENT"])["provider"]["swerl"]["options"]
    waits = {name: options[name] for name in ("timeout", "headerTimeout", "chunkTimeout")}
    assert waits == {"timeout": False, "headerTimeout": False, "chunkTimeout": 86_400_000}


@pytest.mark.parametrize(
    ("event", "limit"),
    [
        ({"type": "step_finish", "part": {"reason": "length"}}, True),
        ({"type": "step_finish", "part": {"reason": "stop"}}, False),
        ({"type": "error", "error": {"data": {"message": "prompt is too long: 9 > 8"}}}, True),
        ({"type": "error", "error": {"data": {"message": "the engine failed"}}}, False),
    ],
)
async def test_limits_are_told_from_breakdowns(event: dict[str, Any], limit: bool) -> None:
    before = {"type": "step_finish", "part": {"reason": "tool-calls"}}
    assert (await ended(OpenCode(Options(), ()), before, event)).limit == limit


@pytest.mark.parametrize(
    ("machine", "processor", "pinned"), [("x86_64", "x64", True), ("aarch64", "arm64", False)]
)
def test_the_machine_decides_the_package(
    monkeypatch: pytest.MonkeyPatch, machine: str, processor: str, pinned: bool
) -> None:
    asked = []

    def fetch(package: str, version: str, *, integrity: str | None) -> Path:
        asked.append((package, version, bool(integrity)))
        return Path("/cache")

    monkeypatch.setattr(opencode._bundles, "fetch", fetch)
    monkeypatch.setattr(opencode._bundles.platform, "machine", lambda: machine)
    opencode.fetch(opencode.DEFAULT_VERSION)
    assert asked == [(opencode._PACKAGES[processor], opencode.DEFAULT_VERSION, pinned)]
