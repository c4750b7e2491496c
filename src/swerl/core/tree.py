"""Trajectory: the tree of Turns of one Session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from swerl.core.turn import Turn


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Turns in the order of their replies; a Turn's parent always comes before it."""

    session: str
    turns: tuple[Turn, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Counted losses by reason, in tokens: aborted replies, replies that no client received."""
    rewritten: int = 0
    """Turns that start a new root because the chat template rewrote their past."""

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

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
