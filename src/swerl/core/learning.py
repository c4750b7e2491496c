"""What passes between the training loop, its trainer and its algorithms."""

from __future__ import annotations

from collections.abc import Mapping
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
    """A running engine server that weights are sent to."""

    url: str
    num_ranks: int
    """Its tensor-parallel ranks, each of which receives."""
    dtype: str
    """Type in which it keeps most weights, by torch's name."""
    device: str
    """`cuda` or `cpu`."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of sending weights to engine servers."""

    version: str
    num_tensors: int
    failures: Mapping[str, str]
    """URL -> why that server did not take all of them; what it holds is mixed."""
    checksums: tuple[Mapping[str, tuple[str, ...]], ...]
    """For each rank of a server: its parameter -> the checksums that it may have."""
    certain: frozenset[str] = frozenset()
    """Parameters that can have no other; the rest an engine's kernels may have laid out anew."""


@dataclass(frozen=True, slots=True)
class Received:
    """What an engine says of weights that were sent to it."""

    version: str
    num_confirmed: int
    """Parameters whose checksum the server stated, and that is the trainer's."""
    num_parameters: int = 0
    """Parameters of which the server stated a checksum at all."""


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint that is whole."""

    step: int
    num_bytes: int
    write_s: float
    """Seconds from the copy to the end, most of them beside training."""
    warning: str = ""
    """What a reader should know, such as a disk that is nearly full."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes of a whole Batch, which a micro-batch cannot see."""

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
    """The file that holds it, where one does already."""

    @property
    def totals(self) -> Totals:
        """Its sizes."""
        return Totals(self.num_episodes, sum(sample.num_trained_tokens for sample in self.samples))


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step reports."""

    loss: float
    grad_norm: float
    num_tokens: int
    """Tokens that entered the loss."""
    mismatch: float
    """Mean absolute difference of the trainer's and the engine's log-probabilities."""
    duration_s: float
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss reads, for one micro-batch. Axes: B rows, T positions."""

    logp_BT: torch.Tensor
    """Log-probability of each token under the weights in training, with gradient."""
    old_logp_BT: torch.Tensor
    """Under the policy that sampled it, as the engine recorded it; of any weight version."""
    ref_logp_BT: torch.Tensor | None
    """Under the reference policy, where the algorithm asks for one."""
    mask_BT: torch.Tensor
    """1 on trained tokens."""
    token_BT: torch.Tensor
    """1 on tokens, 0 on padding. Log-probabilities are 0 where nothing reads them."""
    advantage_B: torch.Tensor
    weight_B: torch.Tensor
    """Each row's part of the batch's mean; sums to one over a whole batch."""
    totals: Totals
    """Sizes of the whole batch that this is a part of."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """A loss to differentiate and figures to report."""

    loss: torch.Tensor
    stats: Mapping[str, float]
    """Parts of the batch's means, weighted like the loss: those of micro-batches add up."""
