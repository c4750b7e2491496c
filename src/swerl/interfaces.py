"""Every contract between swerl's parts, on one page; a plug-in implements one of these."""

from __future__ import annotations

import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from swerl.chat import ChatReply, ChatRequest, Json, Message, ParsedReply
from swerl.episode import Group
from swerl.grade import Grade
from swerl.learning import Batch, LossInputs, LossResult, StepStats, WeightRef
from swerl.patch import FileEdit
from swerl.sandbox import Chunk, Exec, Limits, LiveSandbox, Mount, Usage
from swerl.task import Task
from swerl.turn import Completion, Sampling

if TYPE_CHECKING:
    import torch

# Sandboxes


class Listener(Protocol):
    """Somebody who serves connections made inside a sandbox."""

    async def attach(self, sock: socket.socket) -> None:
        """Accept connections from this listening socket until closed. Takes the socket over."""


class Process(Protocol):
    """A command under way in a sandbox."""

    def output(self) -> AsyncIterator[Chunk]:
        """Yield what it prints, as it comes, until it has ended. For one reader."""

    async def send(self, data: bytes) -> None:
        """Write to its standard input. Raises SandboxError when that is closed."""

    async def end_input(self) -> None:
        """Close its standard input."""

    async def signal(self, number: int) -> None:
        """Send a signal to it and to everything that it started; nothing once it has ended."""

    async def wait(self) -> int:
        """Return its exit code, 128 + n after signal n. Raises SandboxLostError."""


class Sandbox(Protocol):
    """One live isolated machine."""

    @property
    def id(self) -> str:
        """Identify the sandbox in logs and in the ledger."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
    ) -> Exec:
        """Run a command to its end; at the timeout its whole process tree is killed.

        `user` is `root`, or None for the sandbox's ordinary user.
        """

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command; leaving the context kills it and everything that it started."""

    async def read(self, path: str) -> bytes:
        """Return a file. Raises FileNotFoundError; a link never leads out of the sandbox."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making its parents; a link never leads out of the sandbox."""

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there."""


@runtime_checkable
class MeteredSandbox(Protocol):
    """A Sandbox that can tell what it took."""

    async def usage(self) -> Usage:
        """Return what it took from its start on."""


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind."""

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Create a sandbox of `image`; leaving the context removes it whatever happened.

        `name` marks it at its provider from the first moment on, so that `live` and `remove` find
        it when its owner is dead; a fresh one is made where it is empty.
        """

    async def live(self) -> Sequence[LiveSandbox]:
        """Return the sandboxes of swerl's that the provider says exist, whoever opened them."""

    async def remove(self, name: str) -> None:
        """Remove the sandbox of this name and all that is left of it; nothing where none is."""

    def price(self, limits: Limits) -> float:
        """Return what such a sandbox costs, in US dollars an hour; 0 on one's own machine."""


# The agent's side


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


# The model's side


class Engine(Protocol):
    """Token ids in, token ids and log-probabilities out."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Sample one reply. Raises EngineLostError when the engine is gone."""

    async def abort(self, session: str) -> None:
        """Stop what the session is generating."""

    async def pause(self) -> None:
        """Stop taking up work until `resume`."""

    async def load(self, weights: WeightRef) -> str:
        """Load published weights and return the version that now serves."""

    async def resume(self) -> None:
        """Take up work again."""

    async def close(self) -> None:
        """Release what the client holds; the server lives on."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """How another process opens a client of an engine that runs already."""

    type: str
    """Name of the engine's plug-in."""
    options: Mapping[str, Json]
    """Settings with which its `open` connects and launches nothing."""


@runtime_checkable
class SharedEngine(Protocol):
    """An Engine or ChatEngine that other processes can reach too: one behind a URL."""

    def address(self) -> EngineAddress:
        """Return how another process reaches the same engine."""


class ChatEngine(Protocol):
    """An engine that answers messages without token ids: for debugging, never for training."""

    async def chat(self, request: ChatRequest, session: str) -> ChatReply:
        """Return the next assistant message."""

    async def close(self) -> None:
        """Release what the client holds."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine module's `open(options, setup)` may need to start its engine."""

    family: Family
    log_dir: Path
    model: Path | None = None
    """Folder of the model to serve, in Hugging Face format."""
    script: Callable[[str], Sequence[Message]] | None = None
    """Session id -> the replies to give, for scripted engines."""


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """Who reads the replies of a model, where its family does not do so itself."""

    name: str
    """`sglang:CALLS` or `sglang:CALLS+REASONING`, by SGLang's names of its parsers."""
    python: Path | None = None
    """Interpreter that has SGLang; None for swerl's own."""


class Family(Protocol):
    """What one model line needs."""

    stop_ids: tuple[int, ...]
    """Token ids that end an assistant turn."""

    def render(self, request: ChatRequest) -> list[int]:
        """Return the whole prompt, up to where the assistant begins to speak."""

    def render_tail(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Return the tokens that follow an assistant turn: new messages and the next opening.

        `closed` says whether the assistant's own tokens end with a stop id; if not, the tail
        begins with what closes the turn.
        """

    def parse(self, ids: Sequence[int]) -> ParsedReply:
        """Read sampled ids as thinking, text and tool calls."""

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as written, special tokens by their names."""

    def encode_reply(self, message: Message) -> list[int]:
        """Return the ids with which the model would say this message, stop id included."""

    def megatron(self) -> MegatronMapping:
        """Return how Hugging Face weights and Megatron-Core parameters correspond."""


class MegatronMapping(Protocol):
    """Moves weights between Hugging Face's names and one rank's Megatron-Core parameters."""

    def config(self, hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
        """Return the keyword arguments of Megatron's TransformerConfig and GPTModel."""

    def to_megatron(
        self, name: str, hf: Mapping[str, torch.Tensor], hf_config: Mapping[str, Json]
    ) -> torch.Tensor:
        """Return the full (unsharded) tensor of one Megatron parameter."""

    def to_hf(
        self, full: Mapping[str, torch.Tensor], hf_config: Mapping[str, Json]
    ) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of full Megatron parameters."""


# Grading and learning


Fresh: TypeAlias = Callable[[], Awaitable[Sandbox]]
"""Closes the sandbox in use and opens another clean one of the same Task."""


class Grader(Protocol):
    """Turns a patch into facts."""

    async def grade(
        self, task: Task, patch: str, sandbox: Sandbox, fresh: Fresh | None = None
    ) -> Grade:
        """Apply the patch in a clean sandbox, run the tests, and judge.

        A second run of the tests that must know nothing of the first takes place in a `fresh` one.
        """


class Trainer(Protocol):
    """Owns the weights."""

    async def step(self, batch: Batch) -> StepStats:
        """Take one optimizer step."""

    async def publish(self) -> WeightRef:
        """Write the current weights where engines can load them."""

    async def save(self, step: int) -> None:
        """Write a checkpoint that `restore` continues from."""

    async def restore(self, step: int) -> None:
        """Continue from the checkpoint of this step."""

    async def close(self) -> None:
        """Stop the trainer's processes."""


class Algorithm(Protocol):
    """How the rewards of a step's Groups become gradients."""

    needs_reference: bool
    """Whether the loss reads `ref_logp_BT`."""
    needs_context: bool
    """Whether the loss reads log-probabilities of tokens that are not trained."""

    def advantages(self, groups: Sequence[Group]) -> Sequence[Sequence[float]]:
        """Return one advantage per Episode of each Group of a step.

        Episodes that are not learnable get 0.
        """

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the loss of one micro-batch."""


# Data


class Converter(Protocol):
    """Reads one dataset."""

    source: str
    """Where the dataset lives: its hub id."""

    def tasks(self, rows: Iterable[Mapping[str, Json]]) -> Iterator[Task]:
        """Yield a Task per row. Raises TaskError on a row that cannot be used."""
