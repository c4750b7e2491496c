"""An attack reports what it cannot know or try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import SandboxLostError
from swerl.core.liveness import BOOT_ID
from swerl.core.sandbox import Exec, Limits
from swerl.gateway.sessions import Session
from tests.attacks import runner
from tests.attacks._targets import WordServer
from tests.attacks.attack import AttackFinding, AttackOutcome
from tests.attacks.inside import greedy
from tests.attacks.runner import Subject

from .weak import WeakBackend, WeakSandbox

RUN = WeakSandbox.run


async def finding(name: str, folder: Path, backend: WeakBackend | None = None) -> AttackFinding:
    subject = Subject(backend or WeakBackend(), "weak", workdir=str(folder))
    return (await runner.attack(subject, runner.choose([name]))).rows[0].finding


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
    assert found.result is AttackOutcome.CANNOT
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
    assert await finding("interfaces", tmp_path) == AttackFinding(
        AttackOutcome.FAIL, "eth7: listed"
    )


async def test_rights_over_a_kernel_of_its_own_are_no_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, str(BOOT_ID), Exec(0, b"another-boot\n", b""))
    found = await finding("mounts", tmp_path)
    assert found.result is AttackOutcome.CANNOT
    assert "kernel of its own" in found.seen


async def test_a_provider_that_sizes_its_machines_is_not_judged_by_our_limits(
    tmp_path: Path,
) -> None:
    class Paid(WeakBackend):
        def price(self, limits: Limits) -> float:
            return 0.1

    assert (await finding("memory-bomb", tmp_path)).result is AttackOutcome.FAIL
    found = await finding("memory-bomb", tmp_path, Paid())
    assert found.result is AttackOutcome.CANNOT
    assert "provider" in found.seen


async def test_a_killed_attack_counts_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "python3", Exec(137, b"", b""))
    found = await finding("memory-bomb", tmp_path)
    assert found.result is AttackOutcome.PASS
    assert "137" in found.seen


async def test_files_that_fill_a_disk_have_no_names(tmp_path: Path) -> None:
    names = [*tmp_path.iterdir()]
    assert greedy.fill([str(tmp_path), "/nonexistent"], 2) == {"2 MiB": "ok"}
    assert [*tmp_path.iterdir()] == names


async def test_an_endpoint_that_does_not_answer_is_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def attach_none(self: Any, sock: Any) -> None:
        sock.close()

    monkeypatch.setattr(WordServer, "attach", attach_none)
    monkeypatch.setattr(Session, "attach", attach_none)
    for name in ("other-sessions", "session-keys", "engine-admin", "gateway-as-proxy"):
        assert (await finding(name, tmp_path)).result is AttackOutcome.CANNOT, name


async def test_a_sandbox_that_is_gone_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(self: WeakSandbox, path: str) -> bytes:
        message = "it is gone"
        raise SandboxLostError(message)

    monkeypatch.setattr(WeakSandbox, "read", lost)
    assert (await finding("climbing-paths", tmp_path)).result is AttackOutcome.FAIL
