"""A headless Chromium for tests, driven over its DevTools protocol on loopback."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--remote-debugging-port=0",
)  # fmt: skip


def program() -> str | None:
    """Return the path of a Chromium, if this machine has one."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextmanager
def chromium(folder: Path) -> Iterator[str]:
    """Run a browser with a profile in `folder`; yield the address of its protocol."""
    found = program()
    assert found is not None
    command = [found, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(rb"DevTools listening on (ws://\S+)", line):
                break
        else:
            raise RuntimeError("the browser ended at once")
        yield match[1].decode()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


class Tab:
    """One tab: its pages, keys, pictures, and everything that it complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._session = ""
        self._num = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def open(self) -> None:
        """Open the tab."""
        made = await self.call("Target.createTarget", url="about:blank")
        target = made["targetId"]
        attached = await self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def listen(self) -> None:
        """Read answers and complaints until the connection ends."""
        async for message in self._socket:
            told = json.loads(message.data)
            if (future := self._answers.pop(told.get("id", 0), None)) is not None:
                future.set_result(told)
            elif told.get("method") == "Log.entryAdded":
                self.complaints.append(told["params"]["entry"]["text"])
            elif told.get("method") in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                self.complaints.append(json.dumps(told["params"]))

    async def call(self, method: str, **params: Any) -> Any:
        """Call the protocol and return the result."""
        self._num += 1
        self._answers[self._num] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": self._num, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        future = self._answers[self._num]
        await self._socket.send_json(message)
        told = await asyncio.wait_for(future, PATIENCE_S)
        assert "error" not in told, told
        return told["result"]

    async def eval(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, code: str) -> None:
        """Wait until an expression is true, also over a change of the page."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.eval(f"document.readyState === 'complete' && !!({code})"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def go(self, url: str) -> None:
        """Load a page."""
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href.split('#')[0] === {json.dumps(url.split('#')[0])}")

    async def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def size(self, width: int, height: int = 900, theme: str = "light") -> None:
        """Set the size of the window and the system's theme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": theme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, path: Path) -> None:
        """Write a picture of the window as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def opened_tab(address: str) -> AsyncIterator[Tab]:
    """Connect to a running browser and open a tab."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=1 << 28) as socket,
    ):
        tab = Tab(socket)
        listener = asyncio.create_task(tab.listen())
        try:
            await tab.open()
            yield tab
        finally:
            listener.cancel()
