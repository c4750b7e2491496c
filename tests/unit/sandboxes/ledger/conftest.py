"""A ledger of its own for each test, and a provider whose machines are files in a folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from swerl.core.contracts import SandboxBackend
from swerl.core.liveness import ProcessIdentity
from swerl.core.sandbox import new_name
from swerl.sandboxes.ledger import Entry, Ledger, default_ledger, tracked, without_secrets
from tests.unit.core.test_liveness import dead as dead

_PLUGIN = Path(__file__).parent / "plugin"


@dataclass(frozen=True)
class Machines:
    """The provider's side: a folder."""

    folder: Path

    def names(self) -> list[str]:
        """Return the machines that exist."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    async def appear(self) -> None:
        """Wait until there is a machine."""
        while not self.names():  # noqa: ASYNC110  no event tells
            await asyncio.sleep(0)

    def add(self, name: str, began_s: float = 0.0) -> str:
        """Have a machine of this name."""
        text = f'{{"image": "img", "started": {began_s}}}'
        (self.folder / f"{name}.json").write_text(text)
        return name

    def flag(self, name: str, *, on: bool = True) -> None:
        """Make the provider fail in one way, or work again."""
        path = self.folder / name
        path.touch() if on else path.unlink(missing_ok=True)

    def options(self, **settings: object) -> object:
        """Return the backend's settings."""
        import folder_machines

        return folder_machines.Options(**{"folder": self.folder, **settings})

    def backend(
        self, *, run: str = "r", warn: Callable[[str], None] = lambda _: None, **settings: object
    ) -> SandboxBackend:
        """Return the tracked backend."""
        return tracked("folder", self.options(**settings), run=run, warn=warn)  # type: ignore[arg-type]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("SWERL_STATE", str(tmp_path / "state"))
    return default_ledger()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> Machines:
    """The provider, installed as a third party's plug-in would be."""
    info = tmp_path / "site" / "folder_machines-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-machines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[swerl.sandboxes]\nfolder = folder_machines\n")
    for path in (_PLUGIN, tmp_path / "site"):
        monkeypatch.syspath_prepend(str(path))
    paths = [str(_PLUGIN), str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    folder = tmp_path / "machines"
    folder.mkdir()
    return Machines(folder)


@pytest.fixture
def write(ledger: Ledger, machines: Machines) -> Callable[..., Entry]:
    """Return a function that records one sandbox as another process would have."""

    def write(owner: ProcessIdentity, *, settings: object = None, **fields: object) -> Entry:
        recorded = without_secrets(machines.options(**(settings or {})))  # type: ignore[arg-type]
        usual = {"name": new_name(), "backend": "folder", "settings": recorded, "run": "r",
                 "image": "img", "price": 0.0, "lifetime_s": 60.0, "intended_s": 1e9}  # fmt: skip
        entry = Entry(**{**usual, **fields}, owner=owner)  # type: ignore[arg-type]
        ledger.add(entry)
        return entry

    return write
