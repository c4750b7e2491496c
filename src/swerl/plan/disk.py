"""What a run keeps on disk: checkpoints and published weights."""

from __future__ import annotations

from dataclasses import dataclass

from swerl.plan.parameters import model_params
from swerl.plan.shape import Shape
from swerl.recipe.schema import Recipe

_CHECKPOINT = 12
"""Bytes of a parameter: fp32 master copy and Adam's two moments."""
_NEWEST = 2
"""Checkpoints that are kept for a crash, and published weights beside them."""
_TOKEN = 60
"""Bytes of a token in Parquet, in the trajectory and in logs, uncompressed. Assumed."""
_EXPERT = 1
"""Bytes of one recorded expert of up to 256 a layer, which stands on disk once."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes on a disk that every node reads."""

    checkpoint: int
    """One of them."""
    kept: int
    """Checkpoints that stay at the end: the newest, the best evaluated one, every n-th."""
    weights: int
    """One published version, in Hugging Face format."""
    episodes: int
    """Of a step's Episodes, Turns and samples, were every context full."""
    steps: int

    @property
    def most(self) -> int:
        """All that is kept, with one checkpoint and one version being written."""
        written = (self.kept + 1) * self.checkpoint + (_NEWEST + 1) * self.weights
        return written + self.steps * self.episodes


def plan_disk(recipe: Recipe, shape: Shape) -> Disk:
    """Return what a run needs."""
    params = model_params(shape).total
    trainer = recipe.trainer
    every = recipe.steps // trainer.keep_every if trainer.keep_every else 0
    evaluated = bool(recipe.eval.every)
    return Disk(
        checkpoint=params * _CHECKPOINT,
        kept=_NEWEST + evaluated + every,
        weights=params * (2 if trainer.dtype == "bf16" else 4),
        episodes=_episode_bytes(recipe, shape),
        steps=recipe.steps,
    )


def _episode_bytes(recipe: Recipe, shape: Shape) -> int:
    rollout = recipe.rollout
    tokens = rollout.groups_per_step * rollout.episodes_per_group * rollout.max_context_tokens
    experts = shape.num_layers * shape.experts_per_token * recipe.trainer.routing_replay
    return tokens * (_TOKEN + experts * _EXPERT)
