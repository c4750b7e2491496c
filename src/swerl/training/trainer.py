"""MegatronTrainer: starts the trainer's ranks and speaks to them for the controller.

Commands travel as JSON lines over a socket pair to rank 0, batches as Parquet files. The ranks die
with the controller; a rank that dies fails the command in flight and ends the others.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swerl.errors import TrainerError
from swerl.learning import Batch, StepStats, WeightRef
from swerl.run.files import disk_errors
from swerl.training import batch as batches
from swerl.training.options import TrainerOptions, WorkerSettings

START_S = 120.0
"""Seconds for the ranks to import Megatron-Core and to load the model."""
CLOSE_S = 10.0
"""Seconds for the ranks to end by themselves before they are killed."""
LINE_BYTES = 1 << 28
"""Longest answer; the log-probabilities of a batch come as one line."""


class MegatronTrainer:
    """Implements Trainer with Megatron-Core in processes of its own.

    Use it as an async context manager, or call `start` and `close`.
    """

    def __init__(
        self,
        *,
        model: Path,
        family: str,
        algorithm: str,
        algorithm_options: Mapping[str, Any] | None = None,
        options: TrainerOptions,
    ) -> None:
        self._model = model.resolve()
        self._family = family
        self._algorithm = algorithm
        self._algorithm_options = dict(algorithm_options or {})
        self._options = options
        self._ranks: list[Process] = []
        self._deaths: list[asyncio.Task[int]] = []
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._work = options.log_dir.resolve() / "trainer-work"

    async def __aenter__(self) -> MegatronTrainer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in the order of the ranks."""
        return [rank.pid for rank in self._ranks]

    async def start(self) -> None:
        """Start the ranks and wait until the model is loaded. Raises TrainerError."""
        shutil.rmtree(self._work, ignore_errors=True)
        with disk_errors(self._work):
            self._work.mkdir(parents=True)
        try:
            await self._start_ranks()
        except BaseException:
            self._kill()
            await self.close()
            raise

    async def step(self, batch: Batch) -> StepStats:
        """Take one optimizer step. Raises TrainerError; after NaN the weights are unchanged.

        The ranks count the tokens that enter the loss; each of the Batch must be there once.
        """
        path = self._work / "batch.parquet"
        batches.write(path, batch)
        stats = StepStats(**await self._ask("step", batch=str(path)))
        num_given = sum(sample.num_trained_tokens for sample in batch.samples)
        if stats.num_tokens != num_given:
            message = f"step {batch.step} trained {stats.num_tokens} of {num_given} sampled tokens"
            raise TrainerError(message, hint="this is a bug in swerl's trainer; please report it")
        return stats

    async def logprobs(self, batch: Batch) -> list[list[float]]:
        """Return the log-probability of every token of every Sample, 0 for a row's first."""
        path = self._work / "logprobs.parquet"
        batches.write(path, batch)
        rows: list[list[float]] = await self._ask("logprobs", batch=str(path))
        return rows

    async def publish(self) -> WeightRef:
        """Write the current weights; the version is the number of optimizer steps taken."""
        ref = await self._ask("publish")
        return WeightRef(Path(ref["path"]), ref["version"], ref["checksum"])

    async def save(self, step: int) -> None:
        """Write the checkpoint of a step; the two newest are kept."""
        await self._ask("save", step=step)

    async def restore(self, step: int) -> None:
        """Continue from the checkpoint of a step. Raises TrainerError where it is not usable."""
        await self._ask("restore", step=step)

    async def close(self) -> None:
        """End the ranks, by force where they do not end by themselves."""
        if self._writer:
            with suppress(ConnectionError):
                self._writer.write(b'{"command": "close"}\n')
                await self._writer.drain()
        try:
            if self._deaths:
                await asyncio.wait(self._deaths, timeout=CLOSE_S)
        finally:
            self._kill()
        await asyncio.gather(*self._deaths)
        if self._writer:
            self._writer.close()
        self._ranks, self._deaths, self._writer = [], [], None
        shutil.rmtree(self._work, ignore_errors=True)

    async def _start_ranks(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            for rank in range(self._options.ranks):
                process = await self._spawn(rank, theirs)
                self._ranks.append(process)
                self._deaths.append(asyncio.create_task(process.wait()))
        finally:
            theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
        try:
            async with asyncio.timeout(START_S):
                await self._answer()
        except TimeoutError:
            what = f"the trainer did not start within {START_S:.0f} s"
            raise self._failure(what) from None

    async def _spawn(self, rank: int, theirs: socket.socket) -> Process:
        settings = WorkerSettings(
            model=self._model,
            family=self._family,
            algorithm=self._algorithm,
            algorithm_options=self._algorithm_options,
            options=self._options,
            rendezvous=self._work / "rendezvous",
            socket_fd=None if rank else theirs.fileno(),
            rank=rank,
        )
        with self._log(rank).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "swerl.training.worker",
                settings.model_dump_json(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=() if rank else (theirs.fileno(),),
                # Ctrl-C is for the controller, which then closes the ranks in order.
                start_new_session=True,
            )

    async def _ask(self, command: str, **arguments: object) -> Any:
        if self._writer is None:
            message = "the trainer is not running"
            raise TrainerError(message, hint="call start() first")
        line = json.dumps({"command": command, **arguments})
        try:
            self._writer.write(line.encode() + b"\n")
            await self._writer.drain()
        except ConnectionError:
            what = f"the trainer died before it could {command}"
            raise self._failure(what) from None
        return await self._answer()

    async def _answer(self) -> Any:
        """Wait for rank 0's answer or for the death of any rank."""
        assert self._reader is not None
        line = asyncio.create_task(self._reader.readline())
        try:
            await asyncio.wait([line, *self._deaths], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The answer that is still to come must not be taken for the next command's.
            self._kill()
            raise
        finally:
            if not line.done():
                line.cancel()
        if not line.done() or not (text := line.result()):
            raise self._failure("a rank of the trainer died")
        answer = json.loads(text)
        if "error" in answer:
            raise TrainerError(answer["error"], hint=answer["hint"])
        return answer["result"]

    def _failure(self, what: str) -> TrainerError:
        """Return the error with the log's end of the rank that died, and end the others."""
        codes = [rank.returncode for rank in self._ranks]
        dead = next((rank for rank, code in enumerate(codes) if code is not None), 0)
        self._kill()
        log = self._log(dead)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        last = "; ".join(line.strip() for line in lines[-3:]) or "its log is empty"
        message = f"{what} (rank {dead}, exit code {codes[dead]}): {last}"
        return TrainerError(message, hint=f"the whole log is {log}")

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.returncode is None:
                rank.kill()

    def _log(self, rank: int) -> Path:
        return self._options.log_dir / f"trainer-rank{rank}.log"
