"""pi: what it is started with, and how its ends are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swerl.harnesses import pi
from swerl.harnesses.pi import Options, Pi

from .helpers import ended, started


async def test_the_cli_is_pointed_at_the_gateway() -> None:
    started_with = await started(Pi(Options(), ()))
    (provider,) = json.loads(started_with["env"]["SWERL_PI_MODELS"])["providers"].values()
    assert provider["baseUrl"] == "http://127.0.0.1:8080/v1"
    assert [model["id"] for model in provider["models"]] == ["policy"]
    assert started_with["env"][provider["apiKey"]] == "key-1"
    assert (started_with["cwd"], started_with["timeout_s"]) == ("/repo", 90.0)
    assert started_with["stdin"] == b"Fix add."


async def test_a_broken_stream_is_not_asked_for_again_and_a_slow_one_is_waited_for() -> None:
    retry = json.loads((await started(Pi(Options(), ())))["env"]["SWERL_PI_SETTINGS"])["retry"]
    assert retry == {"enabled": False, "provider": {"timeoutMs": 90_000, "maxRetries": 2}}


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        ({"stopReason": "length"}, True),
        ({"stopReason": "error", "errorMessage": "400 prompt is too long: 9 tokens"}, True),
        ({"stopReason": "error", "errorMessage": "terminated"}, False),
        ({"stopReason": "stop"}, False),
    ],
)
async def test_limits_are_told_from_breakdowns(message: dict[str, str], limit: bool) -> None:
    entries = [
        {"type": "message", "message": {"role": "assistant", "stopReason": "toolUse"}},
        {"type": "message", "message": {"role": "assistant", **message}},
        {"type": "message", "message": {"role": "toolResult"}},
    ]
    assert (await ended(Pi(Options(), ()), *entries)).limit == limit


@pytest.mark.parametrize("version", [pi.DEFAULT_VERSION, "0.87.1"])
def test_tested_releases_are_pinned_with_all_that_they_depend_on(version: str) -> None:
    lock = json.loads((pi._LOCKS / f"pi-{version}.json").read_text())
    packages = {where: package for where, package in lock["packages"].items() if where}
    assert packages[f"node_modules/{pi._package(version)}"]["version"] == version
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())


@pytest.mark.parametrize(
    ("version", "package", "oldest_node", "pinned"),
    [
        ("0.73.1", "@mariozechner/pi-coding-agent", (20, 6), True),
        ("0.70.0", "@mariozechner/pi-coding-agent", (20, 6), False),
        ("0.74.0", "@earendil-works/pi-coding-agent", (22, 19), False),
    ],
)
async def test_the_release_decides_the_package_the_node_and_the_lock(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    package: str,
    oldest_node: tuple[int, int],
    pinned: bool,
) -> None:
    asked: list[object] = []

    def fetch_tree(package: str, version: str, *, lock: Path | None) -> Path:
        asked.extend((package, version, bool(lock)))
        return Path("/cache")

    monkeypatch.setattr(pi._bundles, "fetch_tree", fetch_tree)
    monkeypatch.setattr(pi._bundles, "node", lambda oldest: Path(f"/node{asked.append(oldest)}"))
    pi.fetch(version)
    assert asked == [package, version, pinned, oldest_node]
    argv = (await started(Pi(Options(version=version), ())))["argv"]
    assert f"/opt/swerl/agents/pi/node_modules/{package}/dist/cli.js" in argv
