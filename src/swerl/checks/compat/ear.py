"""A Family that remembers what it was asked to put into tokens.

An engine is given token ids alone. The lab's model must know more to be an agent's match: which
tools are on offer, and what the client said last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swerl.core.chat import ChatRequest, Message, ParsedReply
from swerl.core.contracts import Family, MegatronMapping


@dataclass(frozen=True, slots=True)
class Heard:
    """What stands behind a prompt's ids."""

    root: ChatRequest
    """The request with which this branch began."""
    new: tuple[Message, ...]
    """What the client said since the last reply; everything where there is none."""
    text: str
    """The whole prompt as written."""


class Ear:
    """Implements Family over another one."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._roots: list[tuple[list[int], ChatRequest]] = []
        self._tails: list[tuple[list[int], tuple[Message, ...]]] = []
        self.stop_ids = family.stop_ids

    def hear(self, ids: Sequence[int]) -> Heard:
        """Return what stands behind a prompt that this family rendered."""
        whole = list(ids)
        root_ids, root = max(
            (each for each in self._roots if whole[: len(each[0])] == each[0]),
            key=lambda each: len(each[0]),
        )
        new = root.messages
        if len(root_ids) < len(whole):
            ends = (each for each in self._tails if whole[-len(each[0]) :] == each[0])
            new = max(ends, key=lambda each: len(each[0]))[1]
        return Heard(root, new, self._family.text(ids))

    def render(self, request: ChatRequest) -> list[int]:
        """Return the whole prompt, up to where the assistant begins to speak."""
        ids = self._family.render(request)
        self._roots.append((list(ids), request))
        return ids

    def render_tail(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Return the tokens that follow an assistant turn: new messages and the next opening."""
        ids = self._family.render_tail(messages, closed=closed)
        self._tails.append((list(ids), tuple(messages)))
        return ids

    def parse(self, ids: Sequence[int]) -> ParsedReply:
        """Read sampled ids as thinking, text and tool calls."""
        return self._family.parse(ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as written, special tokens by their names."""
        return self._family.text(ids)

    def encode_reply(self, message: Message) -> list[int]:
        """Return the ids with which the model would say this message, stop id included."""
        return self._family.encode_reply(message)

    def megatron(self) -> MegatronMapping:
        """Return how Hugging Face weights and Megatron-Core parameters correspond."""
        return self._family.megatron()
