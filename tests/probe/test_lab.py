"""What a probe cannot know or try, it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swerl.probe import _machine, catalogue, sheet
from swerl.probe.finding import Finding, Result
from swerl.probe.sheet import Subject
from swerl.sandbox import Exec, Limits

from .weak import WeakBackend, WeakSandbox

RUN = WeakSandbox.run


async def finding(name: str, folder: Path, backend: WeakBackend | None = None) -> Finding:
    subject = Subject(backend or WeakBackend(), "weak", workdir=str(folder))
    return (await sheet.attack(subject, catalogue.choose([name]))).rows[0].finding


def answer(monkeypatch: pytest.MonkeyPatch, word: str, done: Exec) -> None:
    """Have commands with this word on their command line answer so."""

    async def run(self: WeakSandbox, argv: Any, **options: Any) -> Exec:
        return done if word in argv else await RUN(self, argv, **options)

    monkeypatch.setattr(WeakSandbox, "run", run)


async def test_without_python_an_attack_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "python3", Exec(127, b"", b"python3: not found"))
    found = await finding("raw-sockets", tmp_path)
    assert found.result is Result.CANNOT
    assert "no python3" in found.seen


async def test_interfaces_are_read_without_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "python3", Exec(127, b"", b"python3: not found"))
    table = b"Inter-|\n face |\n    lo: 0 0\n  eth7: 0 0\n"
    answer_python = WeakSandbox.run

    async def run(self: WeakSandbox, argv: Any, **options: Any) -> Exec:
        if list(argv) == ["cat", "/proc/net/dev"]:
            return Exec(0, table, b"")
        return await answer_python(self, argv, **options)

    monkeypatch.setattr(WeakSandbox, "run", run)
    assert await finding("interfaces", tmp_path) == Finding(Result.FAIL, "eth7: listed")


async def test_rights_over_a_kernel_of_its_own_are_no_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, _machine.BOOT_ID, Exec(0, b"another-boot\n", b""))
    found = await finding("mounts", tmp_path)
    assert found.result is Result.CANNOT
    assert "kernel of its own" in found.seen


async def test_a_provider_that_sizes_its_machines_is_not_judged_by_our_limits(
    tmp_path: Path,
) -> None:
    class Paid(WeakBackend):
        def price(self, limits: Limits) -> float:
            return 0.1

    assert (await finding("memory-bomb", tmp_path)).result is Result.FAIL
    found = await finding("memory-bomb", tmp_path, Paid())
    assert found.result is Result.CANNOT
    assert "provider" in found.seen


async def test_a_killed_attack_counts_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "python3", Exec(137, b"", b""))
    found = await finding("memory-bomb", tmp_path)
    assert found.result is Result.PASS
    assert "137" in found.seen
