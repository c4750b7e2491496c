"""MegatronTrainer: starts the trainer's ranks on their nodes and speaks to them.

Commands travel as JSON lines to rank 0, batches as Parquet files in the run folder, which the nodes
share. The ranks die with the controller; a rank that dies or hangs fails the command in flight and
ends the others.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swerl.cluster.local import LocalNode
from swerl.cluster.node import Node
from swerl.core.errors import NotFiniteError, TrainerError
from swerl.core.files import disk_errors
from swerl.core.learning import Batch, CheckpointRef, EngineTarget, Sent, StepStats, WeightRef
from swerl.training import batch as batches
from swerl.training.checkpoint.wait import wait_until_whole
from swerl.training.options import TrainerOptions
from swerl.training.ranks import RankPlan, Ranks


class MegatronTrainer:
    """Implements Trainer with Megatron-Core in processes of its own.

    Use it as an async context manager, or call `start` and `close`. `nodes` hold equal numbers of
    ranks, in order, so that neighbouring ranks share a machine; by default all are on this one.
    """

    def __init__(
        self,
        *,
        model: Path,
        family: str,
        algorithm: str,
        algorithm_options: Mapping[str, Any] | None = None,
        options: TrainerOptions,
        nodes: Sequence[Node] | None = None,
    ) -> None:
        self._plan = RankPlan(
            model=model.resolve(),
            family=family,
            algorithm=algorithm,
            algorithm_options=dict(algorithm_options or {}),
            options=options,
            nodes=tuple(nodes or (LocalNode(),)),
        )
        self._options = options
        self._ranks: Ranks | None = None
        self._work = options.log_dir.resolve() / "trainer-work"
        self._saving: int | None = None
        """Step of a checkpoint that nobody waited for yet."""
        self._turn = asyncio.Lock()
        """The ranks take one command after the other."""

    async def __aenter__(self) -> MegatronTrainer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on their nodes, in the order of the ranks."""
        return [rank.pid for rank in self._ranks.all] if self._ranks else []

    @property
    def hosts(self) -> list[str]:
        """Names of the ranks' nodes, in the order of the ranks."""
        return [rank.node for rank in self._ranks.all] if self._ranks else []

    async def start(self) -> None:
        """Start the ranks and wait until the model is loaded. Raises TrainerError."""
        shutil.rmtree(self._work, ignore_errors=True)
        with disk_errors(self._work):
            self._work.mkdir(parents=True)
        self._ranks = Ranks(self._plan, self._work)
        try:
            await self._ranks.start()
        except BaseException:
            self._ranks.kill()
            await self.close()
            raise

    async def step(self, batch: Batch) -> StepStats:
        """Take one optimizer step. Raises TrainerError; after NaN the weights are unchanged.

        The ranks count the tokens that enter the loss; each of the Batch must be there once.
        """
        path = (batch.path or self._written(batch)).resolve()
        stats = StepStats(**await self._ask("step", batch=str(path)))
        num_given = sum(sample.num_trained_tokens for sample in batch.samples)
        if stats.num_tokens != num_given:
            raise TrainerError(
                f"step {batch.step} trained {stats.num_tokens} of {num_given} sampled tokens",
                hint="this is a bug in swerl's trainer; please report it",
            )
        return stats

    async def logprobs(self, batch: Batch) -> list[list[float]]:
        """Return the log-probability of every token of every Sample, 0 for a row's first."""
        path = self._written(batch)
        rows: list[list[float]] = await self._ask("logprobs", batch=str(path))
        return rows

    async def publish(self) -> WeightRef:
        """Write the current weights; the version is the number of optimizer steps taken."""
        ref = await self._ask("publish")
        return WeightRef(Path(ref["path"]), ref["version"], ref["checksum"])

    async def send(
        self, targets: Sequence[EngineTarget], way: str, *, version: str | None = None
    ) -> Sent:
        """Send the weights into running engines, by `tensor` or by `distributed`.

        Raises TrainerError where they are no longer those of `version`.
        """
        asked = [asdict(target) for target in targets]
        sent = await self._ask("send", targets=asked, way=way, version=version)
        checksums = tuple(
            {name: tuple(allowed) for name, allowed in each.items()} for each in sent["checksums"]
        )
        certain = frozenset(sent["certain"])
        return Sent(sent["version"], sent["num_tensors"], sent["failures"], checksums, certain)

    async def save(self, step: int, *, kept: Collection[int] = ()) -> None:
        """Begin the checkpoint of a step, after the one before it is whole.

        Returns when the state is copied, or with `trainer.async_save = false` when all is written.
        Raises TrainerError where the disk has no room, or the one before could not be written.
        """
        await self.saved()
        self._saving = step
        try:
            await self._ask("save", step=step, kept=sorted(kept))
        except TrainerError:
            self._saving = None
            raise

    async def saved(self) -> CheckpointRef | None:
        """Wait until the checkpoint begun last is whole; None where none is under way.

        Takes no turn at the ranks, so it may wait beside a step. Raises TrainerError.
        """
        step, self._saving = self._saving, None
        if step is None:
            return None
        return await wait_until_whole(self._options.checkpoint_dir, step, lives=self._lives)

    def _lives(self) -> bool:
        return self._ranks is not None and not self._ranks.has_died

    async def restore(self, step: int) -> None:
        """Continue from the checkpoint of a step. Raises TrainerError where it is not usable."""
        await self.saved()
        await self._ask("restore", step=step)

    async def close(self) -> None:
        """End the ranks, by force where they do not end by themselves."""
        ranks, self._ranks, self._saving = self._ranks, None, None
        if ranks is not None:
            await ranks.close()
        shutil.rmtree(self._work, ignore_errors=True)

    def _written(self, batch: Batch) -> Path:
        path = self._work / "batch.parquet"
        batches.write(path, batch)
        return path

    async def _ask(self, command: str, **arguments: object) -> Any:
        if self._ranks is None or not self._ranks.all:
            raise TrainerError("the trainer is not running", hint="call start() first")
        async with self._turn:
            answer = await self._ranks.ask(json.dumps({"command": command, **arguments}))
        if "error" in answer:
            kind = NotFiniteError if answer.get("kind") == "NotFiniteError" else TrainerError
            raise kind(answer["error"], hint=answer["hint"])
        return answer["result"]
