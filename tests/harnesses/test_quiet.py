"""No agent tries to reach anybody but its gateway, though its sandbox would not let it."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from swerl.gateway.app import Gateway
from swerl.sandbox import Exec, Mount

from .helpers import built, locally, work

pytestmark = pytest.mark.agents
TRACE = "/tmp/connections"
STRACE = ("strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o", TRACE)
ADDRESS = re.compile(r"sin6?_port=htons\((\d+)\).*?(?:inet_addr\(|inet_pton\(AF_INET6, )\"([^\"]+)")
RELEASES = [
    ("claude-code", {"version": "2.1.112"}),
    ("claude-code", {"version": "2.1.143"}),
    ("claude-code", {"version": "2.1.330"}),
    ("codex", {"version": "0.169.0"}),
    ("codex", {"version": "0.94.0"}),
]


@dataclass
class Traced:
    """A sandbox that watches what an agent, which alone reads a prompt, connects to."""

    inner: Any
    met: set[str] = field(default_factory=set)
    """Addresses that it tried, as host:port."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def run(self, argv: Sequence[str], **keywords: Any) -> Exec:
        if keywords.get("stdin") is None:
            return await self.inner.run(argv, **keywords)  # type: ignore[no-any-return]  # any sandbox
        done: Exec = await self.inner.run([*STRACE, "--", *argv], **keywords)
        trace = (await self.inner.read(TRACE)).decode(errors="replace")
        self.met |= {f"{host}:{port}" for port, host in ADDRESS.findall(trace)}
        return done


@pytest.mark.parametrize(("name", "options"), RELEASES)
async def test_nobody_but_the_gateway_is_contacted(name: str, options: Mapping[str, str]) -> None:
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    boxes: list[Traced] = []

    @asynccontextmanager
    async def traced(gateway: Gateway, mounts: Sequence[Mount]) -> AsyncIterator[Any]:
        async with locally(gateway, mounts) as sandbox:
            boxes.append(Traced(sandbox))
            yield boxes[0]

    worked = await work(built(name, **options), place=traced)
    assert worked.exit.code == 0, worked.exit.log[-2000:]
    (met,) = boxes[0].met
    assert met.startswith("127.0.0.1:")
    assert not met.endswith(":53")
