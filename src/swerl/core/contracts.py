"""Every contract between swerl's parts. A plug-in implements one of these Protocols.

In the order of an Episode: Sandbox and its backend, Harness, Dialect, Engine and Family, Grader,
then Trainer and Algorithm. The values that cross these contracts are dataclasses beside them or in
the other files of `core/`.
"""

from __future__ import annotations

import socket
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from swerl.core.changes import AgentPatch, FileEdit
from swerl.core.chat import ChatReply, ChatRequest, Json, Message, ParsedReply, Tool
from swerl.core.episode import Group, Status
from swerl.core.grade import Grade
from swerl.core.learning import (
    Batch,
    CheckpointRef,
    EngineTarget,
    LossInputs,
    LossResult,
    Received,
    Sent,
    StepStats,
    WeightRef,
)
from swerl.core.sandbox import Chunk, Exec, Limits, LiveSandbox, Mount
from swerl.core.task import Protection, Task
from swerl.core.turn import Completion, Sampling, Trajectory

if TYPE_CHECKING:
    import torch


class Listener(Protocol):
    """Serves connections that are made inside a sandbox."""

    async def attach(self, sock: socket.socket) -> None:
        """Accept connections from this listening socket until it closes. Takes the socket over."""


class Process(Protocol):
    """A running command in a sandbox."""

    def output(self) -> AsyncIterator[Chunk]:
        """Yield its output as it is printed, until the command ends. For one reader."""

    async def send(self, data: bytes) -> None:
        """Write to its standard input. Raises SandboxError if that is closed."""

    async def end_input(self) -> None:
        """Close its standard input."""

    async def signal(self, number: int) -> None:
        """Send a signal to its whole process tree; do nothing once it has ended."""

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
        """Run a command to its end; kill its whole process tree at the timeout.

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
        """Start a command; leaving the context kills its whole process tree."""

    async def read(self, path: str) -> bytes:
        """Return a file; a link never leads out of the sandbox.

        Raises FileNotFoundError, and SandboxFileError if the path is no readable plain file.
        """

    async def write(self, path: str, data: bytes) -> None:
        """Write a file and create its parents; a link never leads out of the sandbox.

        Raises SandboxFileError if the path cannot hold a plain file, or the disk is full.
        """

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there."""


@runtime_checkable
class SnapshotSandbox(Protocol):
    """A Sandbox whose files can be kept as an image."""

    snapshot_root: str
    """The folder whose files a snapshot keeps; empty: none can be taken."""

    async def snapshot(self, name: str = "") -> str:
        """Keep its files as an image and return the image's reference. Processes are not kept.

        A name that has a snapshot already keeps it; an empty one is replaced by a fresh one. Raises
        SandboxError if the files cannot be kept.
        """


class SandboxBackend(Protocol):
    """Creates sandboxes of one kind."""

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Create a sandbox of `image`; leaving the context always removes it.

        The provider labels the sandbox with `name` from its creation, so that `live` and `remove`
        find it after its owner has died. An empty name is replaced by a fresh one.
        """

    async def live(self) -> Sequence[LiveSandbox]:
        """Return the swerl sandboxes that exist at the provider, of every owner."""

    async def remove(self, name: str) -> None:
        """Remove the sandbox of this name with all its remains; do nothing if there is none."""

    def price(self, limits: Limits) -> float:
        """Return the price of such a sandbox in US dollars an hour; 0 on one's own machine."""


@runtime_checkable
class SnapshotBackend(Protocol):
    """A SandboxBackend that opens snapshots by their references."""

    async def identify(self, image: str) -> str:
        """Return a text that changes with the image's content; empty if that is unknown."""

    async def find_snapshot(self, name: str) -> str:
        """Return the reference of the snapshot of this name; empty if there is none."""

    async def drop_snapshot(self, name: str) -> None:
        """Remove the snapshot of this name, if it exists and no open sandbox uses it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a harness's model."""

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
    """True if a turn limit stopped it."""
    log: str = ""
    records: bytes = b""
    """The agent's own session files as JSON lines; empty if it writes none."""


class Harness(Protocol):
    """A coding agent."""

    dialect: str
    """Name of the dialect of its requests."""
    inside: bool
    """True if its requests come from inside the sandbox."""

    def mounts(self) -> Sequence[Mount]:
        """Return the host folders that its sandbox must mount."""

    async def install(self, sandbox: Sandbox) -> None:
        """Prepare the sandbox; called once before `run`."""

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Work on the Task until it is done or `budget_s` seconds have passed."""

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return model replies that make these edits with this agent's own tools."""


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


class Engine(Protocol):
    """Token ids in, token ids and log-probabilities out."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Sample one reply. Raises EngineLostError when the engine is gone."""

    async def abort(self, session: str) -> None:
        """Stop the session's running requests. Raises EngineError if the engine does not answer."""

    async def pause(self) -> None:
        """Start no new work until `resume`."""

    async def load(self, weights: WeightRef) -> str:
        """Load published weights and return the version that serves from then on."""

    async def resume(self) -> None:
        """Start new work again."""

    async def close(self) -> None:
        """Release the client's connections; the server lives on."""


class WeightUpdate(Protocol):
    """An open update of engine servers, which sample nothing meanwhile."""

    @property
    def targets(self) -> Sequence[EngineTarget]:
        """The servers that receive."""

    @property
    def version(self) -> str | None:
        """The version that must be sent; None for the trainer's newest."""

    async def finish(self, sent: Sent) -> Received:
        """Compare what arrived with what was sent; servers that hold all weights serve them.

        Raises EngineError if no server received all of them, EngineLostError if none answers.
        """


@runtime_checkable
class StreamedEngine(Protocol):
    """An Engine that receives weights without a folder, and lends its memory to the trainer."""

    def update(self, *, missed: bool = False) -> AbstractAsyncContextManager[WeightUpdate]:
        """Open an update of all servers, or of those that `missed` the last one.

        If the block does not finish the update, none of its servers serves.
        """

    async def await_missed(self) -> None:
        """Wait until a server answers without the weights that serve."""

    async def sleep(self) -> None:
        """Free the memory of weights and cache until the next `load` or `update`."""


class ChatEngine(Protocol):
    """An engine that answers messages without token ids: for debugging, never for training."""

    async def chat(self, request: ChatRequest, session: str) -> ChatReply:
        """Return the next assistant message."""

    async def close(self) -> None:
        """Release the client's connections."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The parts from which an engine module's `open(options, setup)` starts its engine."""

    family: Family
    log_dir: Path
    model: Path | None = None
    """Folder of the model to serve, in Hugging Face format."""
    script: Callable[[str], Sequence[Message]] | None = None
    """Session id -> its replies, for scripted engines."""
    in_turn: bool = False
    """True if a scripted engine answers a session's new requests in turn, whatever conversation
    they continue."""
    notify: Callable[[str], None] = field(default=lambda text: None)
    """Called with one sentence about each change of a server's state."""


class Family(Protocol):
    """Chat rendering, reply parsing and weight names of one model line."""

    stop_ids: tuple[int, ...]
    """Token ids that end an assistant turn."""

    def render(self, request: ChatRequest) -> list[int]:
        """Return the whole prompt, up to the opening of the assistant's turn."""

    def render_tail(
        self, messages: Sequence[Message], *, past: Sequence[Message], last_id: int | None
    ) -> list[int]:
        """Return the tokens that follow an assistant turn: new messages and the next opening.

        `past` is the conversation up to this turn, whose calls the new messages may answer.
        `last_id` is the last token of the turn: the tail begins with the tokens that close the
        turn, without this one.
        """

    def parse(self, ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedReply:
        """Read sampled ids as thinking, text and calls of these tools."""

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids, with special tokens by their names."""

    def encode_reply(self, message: Message) -> list[int]:
        """Return the ids of this message as the model samples them, stop id included."""

    def megatron(self) -> MegatronMapping:
        """Return the mapping between Hugging Face weights and Megatron-Core parameters."""


class MegatronMapping(Protocol):
    """Maps weights between Hugging Face's names and one rank's Megatron-Core parameters."""

    def config(self, hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
        """Return the keyword arguments of Megatron's TransformerConfig and GPTModel."""

    def names(self, hf_config: Mapping[str, Json]) -> Iterator[str]:
        """Yield the names of the whole model's Megatron parameters."""

    def to_megatron(
        self, name: str, hf: Mapping[str, torch.Tensor], hf_config: Mapping[str, Json]
    ) -> torch.Tensor:
        """Return the full (unsharded) tensor of one Megatron parameter."""

    def untrained(self, names: Iterable[str], hf_config: Mapping[str, Json]) -> tuple[str, ...]:
        """Return the Hugging Face tensors that are never trained; an export copies them."""

    def to_hf(
        self, full: Mapping[str, torch.Tensor], hf_config: Mapping[str, Json]
    ) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of full Megatron parameters."""


OpenClean: TypeAlias = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Opens a clean sandbox of a Task that no agent has used; several may be open at once."""


class Grader(Protocol):
    """Turns a patch into facts."""

    async def grade(self, task: Task, patch: AgentPatch, open_clean: OpenClean) -> Grade:
        """Bring the patch into a clean sandbox, run the tests, and judge.

        Runs of the tests that must not depend on each other have a sandbox each. A grader that
        waits for a sandbox while it holds one can block itself: the number of slots is limited.
        """


@runtime_checkable
class ConfirmingGrader(Protocol):
    """A Grader that can confirm a solved patch with mutated tests."""

    async def measure(self, task: Task, open_clean: OpenClean) -> Protection:
        """Return mutated tests that the known solution notices."""

    async def confirm(self, task: Task, patch: AgentPatch, open_clean: OpenClean) -> Grade:
        """Run the tests of a solved patch again, some of these runs with mutated tests."""


class Trainer(Protocol):
    """Owns the weights."""

    async def step(self, batch: Batch) -> StepStats:
        """Take one optimizer step."""

    async def logprobs(self, batch: Batch) -> Sequence[Sequence[float]]:
        """Return the log-probability of each trained token of each Sample."""

    async def send(
        self, targets: Sequence[EngineTarget], way: str, *, version: str | None = None
    ) -> Sent:
        """Send the weights into running engines, by `tensor` or by `distributed`.

        Raises TrainerError if they are no longer those of `version`.
        """

    async def publish(self) -> WeightRef:
        """Write the current weights to a folder that engines can load."""

    async def save(self, step: int, *, kept: Collection[int] = ()) -> None:
        """Begin a checkpoint that `restore` continues from; never prune the steps in `kept`.

        Training continues at once.
        """

    async def saved(self) -> CheckpointRef | None:
        """Wait until the newest checkpoint is whole; return None if none is being written.

        Other calls may run at the same time. Raises TrainerError if it cannot be written.
        """

    async def restore(self, step: int) -> None:
        """Continue from the checkpoint of this step."""

    async def sleep(self) -> None:
        """Give the memory of shared GPUs to the engine; `publish` and `save` work meanwhile."""

    async def wake(self) -> None:
        """Take the memory of shared GPUs back, before `step`."""

    async def close(self) -> None:
        """Stop the trainer's processes."""


class Algorithm(Protocol):
    """How the rewards of a step's Groups become gradients."""

    needs_reference: bool
    """True if the loss reads `ref_logp_BT`."""
    needs_context: bool
    """True if the loss reads log-probabilities of tokens that are not trained."""

    def advantages(self, groups: Sequence[Group]) -> Sequence[Sequence[float]]:
        """Return one advantage per Episode of each Group of a step.

        Episodes that are not learnable get 0.
        """

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the loss of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The facts of one attempt at a Task that a reward may read."""

    task: Task
    grade: Grade
    status: Status
    """How the agent ended."""
    patch: str
    """The agent's changes as a diff; empty if there are none."""
    trajectory: Trajectory
    """The agent's Turns in tokens."""


class Reward(Protocol):
    """One number for an attempt. Only attempts with a learnable verdict are trained."""

    def __call__(self, attempt: Attempt, /) -> float:
        """Return a finite number; a solved Task is worth 1 with the built-in rewards."""
