"""Sample: one root-to-leaf token row for the trainer; every sampled token is in exactly one."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swerl.core.turn import RoutedExperts, Trajectory, Turn

_COLUMNS = (("ids", "i"), ("mask", "b"), ("logprobs", "d"))
_FLOAT_BYTES = array("d").itemsize


@dataclass(frozen=True, slots=True)
class Sample:
    """One token row of length T.

    `mask[t]` is 1 if token t was sampled and is trained here; all other tokens are context. The
    prefix `ids[:t]` of a trained token is exactly the engine's prompt. Rows are arrays of numbers,
    13 bytes a token instead of a hundred in tuples; they are never changed.
    """

    episode: str
    task: str
    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    """Log-probability under the policy that sampled it; 0.0 on context."""
    weight_versions: tuple[str, ...] = ()
    """Weight versions of the trained Turns, oldest first, without repeats."""
    advantage: float = 0.0
    share: float = 1.0
    """Trained tokens of this Sample divided by those of its Episode: its part of one vote."""
    routed: Sequence[RoutedExperts] = ()
    """Experts that the engine chose, in pieces by rising `start`; other positions have no record.
    The pieces end before T - 1: the last id is never a model input."""
    agent: str = ""
    """Name of the agent that sampled it; empty if unknown."""

    def __post_init__(self) -> None:
        for name, code in _COLUMNS:
            values = getattr(self, name)
            if not isinstance(values, array):
                object.__setattr__(self, name, array(code, values))

    @property
    def num_trained_tokens(self) -> int:
        return array("b", self.mask).tobytes().count(1)

    @property
    def num_routed(self) -> int:
        """Number of positions, of T - 1, with recorded experts."""
        return sum(piece.num_positions for piece in self.routed)


def to_samples(trajectory: Trajectory, *, episode: str, task: str) -> list[Sample]:
    """Linearise a Trajectory: one Sample a leaf; a shared Turn is trained with its first leaf.

    Turns without token ids (`trainable` false) are left out. The shares of the result sum to one.
    """
    rows = [_row(path, fresh, episode, task) for path, fresh in _paths(trajectory)]
    total = sum(row.num_trained_tokens for row in rows)
    return [replace(row, share=row.num_trained_tokens / total) for row in rows]


def trained_turns(trajectory: Trajectory) -> list[tuple[Turn, ...]]:
    """Return the Turns that each Sample of `to_samples` trains, in the order of its tokens."""
    return [
        tuple(turn for turn in path if turn.index in fresh) for path, fresh in _paths(trajectory)
    ]


def _paths(trajectory: Trajectory) -> Iterator[tuple[tuple[Turn, ...], set[int]]]:
    """Yield the path of each Sample, and the indices of the Turns that it trains."""
    trained: set[int] = set()
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        if not all(turn.trainable for turn in path):
            continue
        fresh = {turn.index for turn in path} - trained
        trained |= fresh
        if any(turn.output_ids for turn in path if turn.index in fresh):
            yield path, fresh


def _row(path: tuple[Turn, ...], fresh: set[int], episode: str, task: str) -> Sample:
    """Join a path's Turns. A shared Turn's experts are in every row that contains it."""
    ids, mask, logprobs = array("i"), bytearray(), array("d")
    versions: dict[str, None] = {}
    for turn in path:
        num_prompt, num_output = len(turn.prompt_ids), len(turn.output_ids)
        is_fresh = turn.index in fresh
        ids += array("i", turn.prompt_ids)
        ids += array("i", turn.output_ids)
        mask += bytes(num_prompt) + (b"\1" if is_fresh else b"\0") * num_output
        logprobs.frombytes(bytes(_FLOAT_BYTES * (num_prompt + (0 if is_fresh else num_output))))
        if is_fresh:
            logprobs += array("d", turn.logprobs)
            versions[turn.weight_version] = None
            versions |= dict.fromkeys(change.version for change in turn.weight_changes)
    return Sample(
        episode=episode,
        task=task,
        ids=ids,
        mask=array("b", bytes(mask)),
        logprobs=logprobs,
        weight_versions=tuple(versions),
        routed=tuple(turn.routed for turn in path if turn.routed),
    )
