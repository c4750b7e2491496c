"""A sandbox backend for tests: its machines are files in a folder, and it can be made to fail.

A file named `lose-answer` lets a create succeed without its answer arriving; `stuck` refuses every
removal. Without its folder, the provider is unreachable.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.sandbox import Limits, LiveSandbox


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path = Path("/nonexistent/machines")
    price: float = 0.0
    api_key: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    boot_s: float = 0.0


class Machine:
    def __init__(self, path: Path) -> None:
        self.id = f"machine-{path.stem}"


class Backend:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = options.folder

    @asynccontextmanager
    async def open(
        self, image: str, limits: Limits, *, name: str = "", **_: object
    ) -> AsyncIterator[Machine]:
        self._check()
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"image": image, "started": time.time()}))
        if self._is("lose-answer"):
            message = "connection reset"
            raise SandboxError(message)
        await asyncio.sleep(self.options.boot_s)
        try:
            yield Machine(path)
        finally:
            await self.remove(name)

    async def live(self) -> Sequence[LiveSandbox]:
        self._check()
        found = []
        for path in sorted(self.folder.glob("*.json")):
            said = json.loads(path.read_text())
            found.append(
                LiveSandbox(path.stem, f"machine-{path.stem}", said["image"], said["started"])
            )
        return found

    async def remove(self, name: str) -> None:
        self._check()
        if self._is("stuck"):
            message = "the provider answers 500"
            raise SandboxError(message, hint="ask again later")
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def price(self, limits: Limits) -> float:
        return self.options.price

    def _check(self) -> None:
        if not self.folder.is_dir():
            message = "the folder of machines is not there"
            raise SandboxUnavailableError(message, hint="make it")

    def _is(self, flag: str) -> bool:
        return (self.folder / flag).exists()


def build(options: Options) -> Backend:
    return Backend(options)
