"""Grading and learning: patch to facts, rewards to gradients, and who owns the weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol, TypeAlias

from swerl.core.contracts.sandboxes import Sandbox
from swerl.core.episode import Group
from swerl.core.grade import Grade
from swerl.core.learning import Batch, CheckpointRef, LossInputs, LossResult, StepStats, WeightRef
from swerl.core.task import Task

Fresh: TypeAlias = Callable[[], Awaitable[Sandbox]]
"""Closes the sandbox in use and opens another clean one of the same Task."""


class Grader(Protocol):
    """Turns a patch into facts."""

    async def grade(
        self, task: Task, patch: str, sandbox: Sandbox, fresh: Fresh | None = None
    ) -> Grade:
        """Apply the patch in a clean sandbox, run the tests, and judge.

        A second run of the tests that must know nothing of the first takes place in a `fresh` one.
        """


class Trainer(Protocol):
    """Owns the weights."""

    async def step(self, batch: Batch) -> StepStats:
        """Take one optimizer step."""

    async def publish(self) -> WeightRef:
        """Write the current weights where engines can load them."""

    async def save(self, step: int, *, kept: Collection[int] = ()) -> None:
        """Begin a checkpoint that `restore` continues from; pruning spares those of `kept` steps.

        Training may go on at once.
        """

    async def saved(self) -> CheckpointRef | None:
        """Wait until the checkpoint begun last is whole; None where none is under way.

        May be awaited beside other calls. Raises TrainerError where it cannot be written.
        """

    async def restore(self, step: int) -> None:
        """Continue from the checkpoint of this step."""

    async def close(self) -> None:
        """Stop the trainer's processes."""


class Algorithm(Protocol):
    """How the rewards of a step's Groups become gradients."""

    needs_reference: bool
    """Whether the loss reads `ref_logp_BT`."""
    needs_context: bool
    """Whether the loss reads log-probabilities of tokens that are not trained."""

    def advantages(self, groups: Sequence[Group]) -> Sequence[Sequence[float]]:
        """Return one advantage per Episode of each Group of a step.

        Episodes that are not learnable get 0.
        """

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the loss of one micro-batch."""
