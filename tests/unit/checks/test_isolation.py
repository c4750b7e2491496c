"""`swerl sandbox smoke --isolation` passes on `local` and fails in a sandbox without walls."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.checks import isolation
from swerl.cli.main import typer_app
from tests.attacks.weak import WeakBackend, WeakSandbox

WORD = "swpisolation"
FAILING = {
    "host network", "host files", "host processes", "host variables", "time limit",
    "memory limit", "process limit", "disk limit", "nothing left",
}  # fmt: skip


@pytest.fixture
def word(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Fix the secret word, and remove what a sandbox without walls leaves on this machine."""
    monkeypatch.setattr(isolation.secrets, "token_hex", lambda _: WORD)
    monkeypatch.setattr(isolation, "_OUTSIDE", ())
    monkeypatch.setattr(isolation, "_METADATA", ())
    yield WORD
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().rstrip(b"\0t").endswith(f"swp{WORD}".encode()):
                os.kill(int(path.parent.name), signal.SIGKILL)
    Path(f"/tmp/swp{WORD}").unlink(missing_ok=True)


def test_local_passes_every_check() -> None:
    done = CliRunner().invoke(typer_app, ["sandbox", "smoke", "--json"])
    findings = json.loads(done.stdout)
    assert done.exit_code == 0
    assert [row["check"] for row in findings if row["ok"] is not True] == []
    assert len(findings) == 15


async def test_a_sandbox_without_walls_fails(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "LIMITS", isolation.Limits(64, 16, 1.0, 8))
    findings = await isolation.check_isolation(WeakBackend(), "host", str(tmp_path / "work"))
    failed = {finding.check: finding.detail for finding in findings if finding.ok is False}
    assert failed.keys() >= FAILING, failed
    assert os.geteuid() != 0 or "privileges" in failed
    assert "gateway" not in failed


async def test_without_python_nothing_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = WeakSandbox.run

    async def run(self: WeakSandbox, argv: list[str], **options: object) -> object:
        return await plain(self, ["false"] if "python3" in argv else argv, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(WeakSandbox, "run", run)
    [finding] = await isolation.check_isolation(WeakBackend(), "host", str(tmp_path / "work"))
    assert finding.ok is None
    assert "no python3" in finding.detail
