"""Turn: one request and reply in exact tokens; Trajectory: the tree of a Session's Turns.

Seeds of replies derive from a run's seed. Each function hashes in its own way, and neither may
change: published learning curves depend on the draws that these bytes give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from swerl.core.chat import Finish


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples one reply."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Seed of this reply's draws; None: the engine's choice."""
    num_routed: int = 0
    """Leading prompt positions whose routed experts are recorded already."""


def seed_of(seed: int, name: str) -> int:
    """Return the 31-bit seed of this name, such as an Episode's id, in a run of this seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4]) >> 1


def reply_seed(seed: int, number: int) -> int:
    """Return the 31-bit seed of the reply with this number in a Session of this seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()) >> 1


@dataclass(frozen=True, slots=True)
class WeightChange:
    """A change of weights inside a reply."""

    at: int
    """Index of the first id that the new weights sampled."""
    version: str


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A range of bytes in a file; `core/experts.py` reads it."""

    file: Path
    offset: int
    num_bytes: int
    checksum: int
    """CRC-32 as zlib computes it."""

    def __len__(self) -> int:
        return self.num_bytes


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that a mixture-of-experts model chose, [positions, layers, top k].

    The last id of a reply is never fed back, so a sequence of T ids has T - 1 positions.
    """

    start: int
    """First position, counted from the first id of the whole prompt."""
    num_layers: int
    top_k: int
    bytes_per_id: int
    data: bytes | StoredBytes
    """Unsigned integers of `bytes_per_id` bytes in the machine's order, row by row."""

    @property
    def num_positions(self) -> int:
        return len(self.data) // (self.bytes_per_id * self.num_layers * self.top_k)


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that an engine sampled for one reply."""

    ids: tuple[int, ...]
    """Sampled token ids, with the stop token if the model sampled it."""
    logprobs: tuple[float, ...]
    """Log-probability of each token at the temperature and weights that sampled it."""
    finish: Finish
    weight_version: str
    """Version of the weights that sampled the first id."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_changes: tuple[WeightChange, ...] = ()
    routed: RoutedExperts | None = None
    """Recorded experts, if the engine records them."""

    def cut(self, num_ids: int) -> Completion:
        """Return the first ids, with all that belongs to them, as a reply that has stopped."""
        routed, num_left = self.routed, num_ids - len(self.ids)
        if routed and num_left and isinstance(routed.data, bytes):
            row = routed.bytes_per_id * routed.num_layers * routed.top_k
            routed = replace(routed, data=routed.data[: num_left * row])
        return replace(
            self,
            ids=self.ids[:num_ids],
            logprobs=self.logprobs[:num_ids],
            finish=Finish.STOP,
            weight_changes=tuple(w for w in self.weight_changes if w.at < num_ids),
            routed=routed,
        )

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.ids)} sampled ids but {len(self.logprobs)} log-probabilities"
            )


@dataclass(frozen=True, slots=True)
class Turn:
    """One node of a Trajectory.

    The engine's whole prompt was the tokens of the path from the root to `parent`, then
    `prompt_ids`; it answered with `output_ids`.
    """

    index: int
    parent: int | None
    """Index of the Turn that this one continues; None for a root."""
    prompt_ids: tuple[int, ...]
    """Tokens added after the parent's output: the client's new messages."""
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    weight_version: str
    started_s: float = 0.0
    """Seconds since the Session opened."""
    duration_s: float = 0.0
    trainable: bool = True
    """False if the engine returned no token ids (a debugging engine)."""
    num_reported: int = 0
    """Sampled tokens by the count of an engine that returns no token ids."""
    num_prompt_reported: int = 0
    """Tokens of the whole prompt by that count."""
    malformed_calls: int = 0
    weight_changes: tuple[WeightChange, ...] = ()
    routed: RoutedExperts | None = None

    def spans(self) -> Iterator[tuple[str, int]]:
        """Yield (weight version, number of tokens) over the sampled ids, without empty spans."""
        # A reply across n weight changes has n + 1 spans.
        names = [self.weight_version, *(change.version for change in self.weight_changes)]
        bounds = [0, *(change.at for change in self.weight_changes), len(self.output_ids)]
        for name, start, stop in zip(names, bounds, bounds[1:], strict=False):
            # Two changes at one position enclose no token.
            if stop > start:
                yield name, stop - start


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Turns in the order of their replies; a Turn's parent always comes before it."""

    session: str
    turns: tuple[Turn, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Counted losses by reason, in tokens: aborted replies, replies that no client received."""
    rewritten: int = 0
    """Turns that start a new root because the chat template rewrote their past."""
    tools: str = ""
    """Digest of the tools that the first request offered; a prompt need not contain them."""

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens of all Turns, by the engine's own count where it returns no ids."""
        return sum(len(turn.output_ids) + turn.num_reported for turn in self.turns)

    @property
    def versions(self) -> set[str]:
        """Weight versions that sampled a token."""
        return {name for turn in self.turns for name, _ in turn.spans()}

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of every prompt that an engine read; a token counts in each prompt that has it."""
        ends: dict[int | None, int] = {None: 0}
        total = 0
        for turn in self.turns:
            prompt = ends[turn.parent] + len(turn.prompt_ids)
            ends[turn.index] = prompt + len(turn.output_ids)
            total += prompt + turn.num_prompt_reported
        return total

    def leaves(self) -> Iterator[Turn]:
        """Yield the Turns that no other Turn continues, in order."""
        parents = {turn.parent for turn in self.turns}
        return (turn for turn in self.turns if turn.index not in parents)

    def path(self, turn: Turn) -> tuple[Turn, ...]:
        """Return the Turns from the root to `turn`, both included."""
        nodes = [turn]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(self.turns[parent])
        return tuple(reversed(nodes))
