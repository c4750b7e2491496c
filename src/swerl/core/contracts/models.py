"""The model's side: engines that sample tokens, and what each model line needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from swerl.core.chat import ChatReply, ChatRequest, Json, Message, ParsedReply
from swerl.core.learning import EngineTarget, Received, Sent, WeightRef
from swerl.core.turn import Completion, Sampling

if TYPE_CHECKING:
    import torch


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


class WeightSource(Protocol):
    """Who holds the weights and can send them into the memory of running engines."""

    async def send(self, targets: Sequence[EngineTarget], *, version: str | None = None) -> Sent:
        """Send all weights to every server, each of which expects them.

        Raises TrainerError where the source no longer holds `version`; None sends what it holds.
        """


@runtime_checkable
class StreamedEngine(Protocol):
    """An Engine that takes weights without a folder in between."""

    async def receive(self, source: WeightSource) -> Received:
        """Take all weights of a source; the version that it names serves then.

        Raises EngineError where no server holds all of them; none serves a part of them.
        """


@runtime_checkable
class ColocatedEngine(Protocol):
    """An Engine that can lend its GPUs to the trainer."""

    async def sleep(self) -> None:
        """Give the memory of weights and cache back, until the next `load` or `receive`."""


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
    tell: Callable[[str], None] = field(default=lambda said: None)
    """Hears what becomes of servers, in a sentence each."""


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

    def untrained(self, names: Iterable[str], hf_config: Mapping[str, Json]) -> tuple[str, ...]:
        """Return those Hugging Face tensors that training leaves alone: an export copies them."""

    def to_hf(
        self, full: Mapping[str, torch.Tensor], hf_config: Mapping[str, Json]
    ) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of full Megatron parameters."""
