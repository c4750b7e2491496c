"""Settings of the trainer, and what one of its processes is told at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrainerOptions(BaseModel):
    """How the weights are trained and where they are written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint_dir: Path
    """Folder of checkpoints, one folder a step."""
    publish_dir: Path
    """Folder of published weights, one folder a version."""
    log_dir: Path
    """Folder of the ranks' logs and of batches on their way to them."""
    ranks: int = Field(1, ge=1)
    """Processes; one is fastest for a tiny model on two cores."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one copy of the weights; the rest of the ranks split the batch."""
    threads: int = Field(1, ge=1)
    """Torch threads a rank; more only helps where cores are idle."""
    lr: float = Field(4e-4, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up; without it small models collapse."""
    steps: int = Field(100, ge=1)
    """Steps over which the learning rate falls from its peak to its end."""
    lr_end: float = Field(1.0, ge=0, le=1)
    """Learning rate at the last step over its peak, reached linearly; 1 keeps it constant."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's running mean; Adam's usual value."""
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the squared gradient's running mean; below 0.999, as runs are short."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; norms are never decayed."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest norm of the whole gradient."""
    tokens_per_micro_batch: int = Field(4096, ge=2)
    """Tokens of one forward pass of one rank; a longer row goes alone. Bounds the memory."""
    temperature: float = Field(1.0, gt=0)
    """What logits are divided by: the policy in training is the one that the engine samples."""
    seed: int = 0
    """Seed of the ranks' random state."""

    @model_validator(mode="after")
    def _ranks_divide(self) -> TrainerOptions:
        if self.ranks % self.tensor_parallel:
            message = f"ranks={self.ranks} does not divide by tensor_parallel"
            raise ValueError(message)
        return self


class WorkerSettings(BaseModel):
    """What one trainer process is told at start, as JSON on its command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    family: str
    algorithm: str
    algorithm_options: dict[str, Any]
    options: TrainerOptions
    rendezvous: Path
    """File through which the ranks find each other."""
    socket_fd: int | None
    """Inherited end of the socket to the controller; rank 0 has it."""
    rank: int
