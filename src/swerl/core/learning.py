"""The values that pass between the training loop, its trainer and its algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.core.sample import Sample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WeightRef:
    """Published weights: a folder in Hugging Face format, its version and its checksum."""

    path: Path
    version: str
    checksum: str


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """A running engine server that receives weights."""

    url: str
    num_ranks: int
    """Its tensor-parallel ranks; each one receives."""
    dtype: str
    """Type of most of its weights, by torch's name."""
    device: str
    """`cuda` or `cpu`."""
    place: int = 0
    """Index of the server among all servers of its pool, with or without those out of use."""
    gpus: tuple[str, ...] = ()
    """Uuids of its ranks' GPUs in the order of the ranks; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of sending weights to engine servers."""

    version: str
    num_tensors: int
    failures: Mapping[str, str]
    """URL -> why that server did not load all weights; its weights are mixed."""
    checksums: tuple[Mapping[str, tuple[str, ...]], ...]
    """For each rank of a server: parameter -> its valid checksums."""
    certain: frozenset[str] = frozenset()
    """Parameters with no other valid checksum; an engine's kernels may rearrange the others."""


@dataclass(frozen=True, slots=True)
class Received:
    """An engine's report on the weights that it received."""

    version: str
    num_confirmed: int
    """Parameters with a server checksum equal to the trainer's."""
    num_parameters: int = 0
    """Parameters with a server checksum."""


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint that is whole."""

    step: int
    num_bytes: int
    write_s: float
    """Seconds from the copy to the end, mostly in parallel with training."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes of a whole Batch, for the loss of a micro-batch."""

    num_episodes: int
    num_tokens: int
    """Trained tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples with advantages for one optimizer step."""

    step: int
    samples: tuple[Sample, ...]
    num_episodes: int
    """Episodes behind the samples: the divisor that gives each one vote."""
    path: Path | None = None
    """Its file, if it has been written."""
    base: Sequence[Sequence[float]] = ()
    """The trainer's log-probability of each trained token of each Sample before the first update on
    the step's Samples; empty if this is the first one."""

    @property
    def totals(self) -> Totals:
        return Totals(self.num_episodes, sum(sample.num_trained_tokens for sample in self.samples))


@dataclass(frozen=True, slots=True)
class StepStats:
    """Report of one optimizer step."""

    loss: float
    grad_norm: float
    num_tokens: int
    """Number of tokens in the loss."""
    mismatch: float
    """Mean absolute difference of the trainer's and the engine's log-probabilities."""
    duration_s: float
    extra: Mapping[str, float] = field(default_factory=dict)
    logprobs: Sequence[Sequence[float]] = ()
    """The trainer's log-probability of each trained token of each Sample before the first update on
    the step's Samples; empty if the trainer keeps none."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a loss for one micro-batch. Axes: B rows, T positions."""

    logp_BT: torch.Tensor
    """Log-probability of each token under the weights in training, with gradient."""
    old_logp_BT: torch.Tensor
    """Under the policy that sampled it, as the engine recorded it, at any weight version."""
    ref_logp_BT: torch.Tensor | None
    """Under the reference policy, if the algorithm needs one."""
    mask_BT: torch.Tensor
    """1 on trained tokens."""
    token_BT: torch.Tensor
    """1 on tokens, 0 on padding. Unused log-probabilities are 0."""
    advantage_B: torch.Tensor
    weight_B: torch.Tensor
    """Each row's part of the batch's mean; sums to one over a whole batch."""
    totals: Totals
    """Sizes of the whole Batch."""
    base_logp_BT: torch.Tensor | None = None
    """Under the weights before the first update on the step's Samples; None on that update, where
    it is `logp_BT` without gradient."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """A loss to differentiate and figures to report."""

    loss: torch.Tensor
    stats: Mapping[str, float]
    """Parts of the batch's means, weighted like the loss; parts of micro-batches add up."""
