"""The agent's side: the program in the sandbox and the wire format that it speaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swerl.core.chat import ChatReply, ChatRequest, Json, Message
from swerl.core.contracts.sandboxes import Sandbox
from swerl.core.patch import FileEdit
from swerl.core.sandbox import Mount
from swerl.core.task import Task


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a harness finds its model."""

    url: str
    """Base URL as seen from where the harness runs, without a trailing slash."""
    key: str
    """Session key, sent as the vendor's API key."""
    model: str


@dataclass(frozen=True, slots=True)
class Exit:
    """How a harness ended."""

    code: int
    timed_out: bool = False
    limit: bool = False
    """Whether a turn limit stopped it."""
    log: str = ""
    records: bytes = b""
    """What the agent wrote down of its session in files of its own, where it does; JSON lines."""


class Harness(Protocol):
    """A coding agent."""

    dialect: str
    """Name of the dialect that it speaks."""
    inside: bool
    """Whether its requests come from inside the sandbox."""

    def mounts(self) -> Sequence[Mount]:
        """Return what the sandbox must mount for it."""

    async def install(self, sandbox: Sandbox) -> None:
        """Prepare the sandbox; called once before `run`."""

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Work on the Task until done or until `budget_s` seconds are over."""

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return the replies of a model that makes these edits with this agent's own tools."""


@dataclass(frozen=True, slots=True)
class WireReply:
    """One HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Dialect(Protocol):
    """One chat wire format."""

    routes: Mapping[str, str]
    """Path -> operation: `chat`, `count_tokens` or `models`."""

    def session_key(self, headers: Mapping[str, str]) -> str | None:
        """Return the session key that the client sent as its API key."""

    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """Read a request. Raises GatewayError on a body that the vendor would refuse too."""

    def reply(self, reply: ChatReply) -> Json:
        """Build the body of an answer without streaming."""

    def events(self, reply: ChatReply) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed answer."""

    def error(self, error: Exception) -> WireReply:
        """Build the vendor-shaped answer for a failure."""
