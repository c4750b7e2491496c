"""Settings of the trainer, and the start settings of one of its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from swerl.recipe.schema import TrainerSection


class TrainerOptions(TrainerSection):
    """A recipe's trainer section, and the settings that depend on the run."""

    checkpoint_dir: Path
    """Folder of checkpoints, one folder per step."""
    publish_dir: Path
    """Folder of published weights, one folder per version."""
    log_dir: Path
    """Folder of the ranks' logs and of batches sent to them."""
    steps: int = Field(100, ge=1)
    """Steps over which the learning rate falls from its peak to its final value."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits, so that the trained policy is the one that the engine samples."""
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the squared gradient's running mean; below 0.999 because runs are short."""
    threads: int = Field(1, ge=1)
    """Torch threads per rank: ranks share the cores, and a tiny model gains nothing from more."""
    seed: int = 0
    """Seed of the ranks' random state."""
    weight_bucket_mib: int = Field(1024, ge=1)
    """Largest bucket of weights sent to engines."""
    weight_bucket_s: float = Field(300.0, gt=0)
    """Seconds that an engine may take for one bucket."""

    @model_validator(mode="after")
    def _ranks_divide(self) -> TrainerOptions:
        dense = self.tensor_parallel * self.context_parallel * self.pipeline_parallel
        experts = self.expert_tensor_parallel * self.expert_parallel * self.pipeline_parallel
        for part, keys in (
            (dense, "tensor_parallel x context_parallel x pipeline_parallel"),
            (experts, "expert_tensor_parallel x expert_parallel x pipeline_parallel"),
        ):
            if self.ranks % part:
                raise ValueError(f"ranks={self.ranks} does not divide by {keys} = {part}")
        return self


class WorkerSettings(BaseModel):
    """Settings of one trainer process, as JSON on its command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    family: str
    algorithm: str
    algorithm_options: dict[str, Any]
    options: TrainerOptions
    rendezvous: str
    """URL where the ranks meet: `file://` on one machine, else `tcp://`."""
    address: str = "127.0.0.1"
    """Address of this rank's machine for the other ranks."""
    rank: int
