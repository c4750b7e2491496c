"""Settings of the trainer, and what one of its processes is told at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from swerl.recipe.schema import TrainerSection


class TrainerOptions(TrainerSection):
    """A recipe's trainer section, and what only the run knows."""

    checkpoint_dir: Path
    """Folder of checkpoints, one folder a step."""
    publish_dir: Path
    """Folder of published weights, one folder a version."""
    log_dir: Path
    """Folder of the ranks' logs and of batches on their way to them."""
    steps: int = Field(100, ge=1)
    """Steps over which the learning rate falls from its peak to its end."""
    temperature: float = Field(1.0, gt=0)
    """What logits are divided by: the policy in training is the one that the engine samples."""
    seed: int = 0
    """Seed of the ranks' random state."""
    weight_bucket_mib: int = Field(1024, ge=1)
    """Largest piece in which weights are sent to engines."""
    weight_bucket_s: float = Field(300.0, gt=0)
    """Seconds that an engine may take for one piece."""

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
    """What one trainer process is told at start, as JSON on its command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    family: str
    algorithm: str
    algorithm_options: dict[str, Any]
    options: TrainerOptions
    rendezvous: str
    """URL through which the ranks find each other: `file://` on one machine, else `tcp://`."""
    address: str = "127.0.0.1"
    """Where the other ranks reach this one's machine."""
    rank: int
