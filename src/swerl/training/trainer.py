"""Start the trainer's ranks as processes on their nodes, send them commands, and watch them.

Commands go to rank 0 as JSON lines; batches are Parquet files in the run folder, which the nodes
share. The ranks die with the controller. If a rank dies, the others would wait for it in a
collective for ever, so the first death ends them all. If none dies and none answers in time, each
writes its stack to its log before all are killed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from swerl.cluster.node import (
    PYTHON,
    LocalNode,
    Node,
    ProcessEnd,
    ProcessSpec,
    RunningProcess,
    num_oom_kills,
)
from swerl.core.errors import (
    ClusterError,
    NotFiniteError,
    PluginError,
    RankLostError,
    RecipeError,
    TrainerError,
)
from swerl.core.files import disk_errors
from swerl.core.learning import Batch, CheckpointRef, EngineTarget, Sent, StepStats, WeightRef
from swerl.engines._process import free_port
from swerl.training import batch as batches
from swerl.training.checkpoint.folder import wait_until_whole
from swerl.training.crash_reason import CrashReason, crash_reason, hang_places
from swerl.training.options import TrainerOptions, WorkerSettings

START_S = 600.0
"""Seconds for all ranks to start, besides the time to read the model."""
READ_BYTES_PER_S = 500e6
"""Rate at which a shared disk serves all nodes together, half of a 10 Gb/s link. Assumed."""
CLOSE_S = 10.0
"""Seconds for the ranks to end by themselves before they are killed."""
LAST_ANSWER_S = 2.0
"""Seconds to wait for an answer that was on its way when a rank ended."""
STACKS_S = 10.0
"""Seconds for the stacks of hanging ranks to reach their logs."""


class MegatronTrainer:
    """Implements Trainer with Megatron-Core, in one process per rank.

    Use it as an async context manager, or call `start` and `close`. Each of `nodes` holds the same
    number of ranks, in order, so neighbouring ranks share a machine. The default is this machine.
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
        self._settings = partial(
            WorkerSettings,
            model=model.resolve(),
            family=family,
            algorithm=algorithm,
            algorithm_options=dict(algorithm_options or {}),
            options=options,
        )
        self._model = model
        self._options = options
        self._nodes = tuple(nodes or (LocalNode(),))
        self._ranks: Ranks | None = None
        self._work = options.log_dir.resolve() / "trainer-work"
        self._logprobs = self._work / "logprobs.f32"
        self._saving: int | None = None
        """Step of the checkpoint that is being written."""

    async def __aenter__(self) -> MegatronTrainer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks.all] if self._ranks else []

    @property
    def hosts(self) -> list[str]:
        return [rank.node for rank in self._ranks.all] if self._ranks else []

    async def start(self) -> None:
        """Start the ranks and wait until the model is loaded. Raises TrainerError."""
        # The rendezvous file of an earlier start would confuse the ranks of this one.
        shutil.rmtree(self._work, ignore_errors=True)
        with disk_errors(self._work):
            self._work.mkdir(parents=True)
        self._ranks = Ranks(self._settings, self._options, self._nodes, self._work)
        limit_s = start_limit_s(self._model, len(self._nodes))
        try:
            await self._ranks.start(limit_s)
        except BaseException:
            self._ranks.kill()
            await self.close()
            raise

    async def step(self, batch: Batch) -> StepStats:
        """Take one optimizer step. Raises TrainerError; after NaN the weights are unchanged.

        The number of tokens in the loss must be that of the Batch.
        """
        path = (batch.path or self._written(batch)).resolve()
        base = None
        if batch.base:
            base = self._work / "base.f32"
            batches.write_values(base, batch.base)
        files = {"logprobs": str(self._logprobs), "base": base and str(base)}
        stats = StepStats(**await self._ask("step", batch=str(path), **files))
        # Every sampled token is trained exactly once; another count means a wrong loss.
        num_given = sum(sample.num_trained_tokens for sample in batch.samples)
        if stats.num_tokens != num_given:
            raise TrainerError(
                f"step {batch.step} trained {stats.num_tokens} of {num_given} sampled tokens",
                hint="this is a bug in swerl's trainer; please report it",
            )
        return replace(stats, logprobs=batches.read_values(self._logprobs, batch))

    async def logprobs(self, batch: Batch) -> Sequence[Sequence[float]]:
        """Return the log-probability of each trained token of each Sample."""
        path = self._written(batch)
        await self._ask("logprobs", batch=str(path), logprobs=str(self._logprobs))
        return batches.read_values(self._logprobs, batch)

    async def publish(self) -> WeightRef:
        """Write the current weights; their version is the number of optimizer steps."""
        ref = await self._ask("publish")
        return WeightRef(Path(ref["path"]), ref["version"], ref["checksum"])

    async def send(
        self, targets: Sequence[EngineTarget], way: str, *, version: str | None = None
    ) -> Sent:
        """Send the weights into running engines, by `tensor` or by `distributed`.

        Raises TrainerError if they are no longer those of `version`.
        """
        asked = [asdict(target) for target in targets]
        sent = await self._ask("send", targets=asked, way=way, version=version)
        checksums = tuple(
            {name: tuple(allowed) for name, allowed in rank.items()} for rank in sent["checksums"]
        )
        certain = frozenset(sent["certain"])
        return Sent(sent["version"], sent["num_tensors"], sent["failures"], checksums, certain)

    async def save(self, step: int, *, kept: Collection[int] = ()) -> None:
        """Begin the checkpoint of a step once the one before it is whole.

        Returns when the state is copied, or with `trainer.async_save = false` when it is written.
        Raises TrainerError if the disk is too full or the one before could not be written.
        """
        await self.saved()
        self._saving = step
        try:
            await self._ask("save", step=step, kept=sorted(kept))
        except TrainerError:
            self._saving = None
            raise

    async def saved(self) -> CheckpointRef | None:
        """Wait until the checkpoint begun last is whole; return None if there is none.

        It sends no command to the ranks, so it may wait while they take a step. Raises
        TrainerError.
        """
        # Cleared first, so that a second call does not wait for the same outcome.
        step, self._saving = self._saving, None
        if step is None:
            return None
        return await wait_until_whole(self._options.checkpoint_dir, step, is_alive=self._is_alive)

    def _is_alive(self) -> bool:
        return self._ranks is not None and not self._ranks.has_died

    async def restore(self, step: int) -> None:
        """Continue from the checkpoint of a step. Raises TrainerError if it is not usable."""
        await self.saved()
        await self._ask("restore", step=step)

    async def sleep(self) -> None:
        """Give the GPUs' memory to the engine; weights can still be sent, published and saved."""
        await self._ask("sleep")

    async def wake(self) -> None:
        """Take the GPUs' memory back before a step."""
        await self._ask("wake")

    async def close(self) -> None:
        """End the ranks; those that do not end by themselves are killed."""
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
        answer = await self._ranks.ask(command, arguments)
        if "error" in answer:
            kinds = {"NotFiniteError": NotFiniteError, "PluginError": PluginError}
            kind = kinds.get(answer.get("kind", ""), TrainerError)
            raise kind(answer["error"], hint=answer["hint"])
        return answer["result"]


class Ranks:
    """The processes of one start of the trainer."""

    def __init__(
        self,
        settings: Callable[..., WorkerSettings],
        options: TrainerOptions,
        nodes: tuple[Node, ...],
        work: Path,
    ) -> None:
        """`settings` makes a rank's settings from `rendezvous`, `address` and `rank`."""
        self.all: list[RunningProcess] = []
        self._settings = settings
        self._options = options
        self._nodes = nodes
        self._work = work
        self._dead: list[int] = []
        """Ranks that ended, the first one first."""
        self._lock = asyncio.Lock()
        """The ranks run one command after the other."""
        self._oom_kills: dict[str, int] = {}
        """Node -> its out-of-memory kills before the ranks started."""

    @property
    def has_died(self) -> bool:
        return bool(self._dead)

    async def start(self, limit_s: float) -> None:
        """Start every rank and wait until all are ready. Raises TrainerError."""
        rendezvous = await self._rendezvous()
        try:
            # The machine's counter only grows, so a later difference means a new kill.
            for node in self._nodes:
                self._oom_kills[node.name] = await node.call(num_oom_kills)
            for rank in range(self._options.ranks):
                process = await self._start(rank, rendezvous)
                process.ended.add_done_callback(partial(self._note_death, rank))
                self.all.append(process)
        except ClusterError as error:
            raise RankLostError(f"cannot start the trainer: {error}", hint=error.hint) from error
        answer = await self._answer("start", timeout_s=limit_s)
        if "error" in answer:
            raise TrainerError(answer["error"], hint=answer["hint"])

    async def ask(self, command: str, arguments: Mapping[str, object]) -> Any:
        """Send a command to rank 0 and return its answer. Raises RankLostError."""
        line = json.dumps({"command": command, **arguments})
        async with self._lock:
            try:
                await self.all[0].send(line.encode() + b"\n")
            except ConnectionError:
                raise await self._death_error(command) from None
            return await self._answer(command, timeout_s=self._options.step_timeout_s)

    async def close(self) -> None:
        """Ask the ranks to end, and kill those that do not."""
        deaths = [rank.ended for rank in self.all]
        if deaths:
            with suppress(ConnectionError):
                await self.all[0].send(b'{"command": "close"}\n')
            try:
                await asyncio.wait(deaths, timeout=CLOSE_S)
            finally:
                self.kill()
            await asyncio.gather(*deaths)
            while await self.all[0].receive():  # drop late answers
                pass

    def kill(self) -> None:
        for rank in self.all:
            if not rank.ended.done():
                _keep(asyncio.create_task(rank.signal(signal.SIGKILL)))

    async def _rendezvous(self) -> str:
        nodes = self._nodes
        if len(nodes) == 1:
            # On one machine a file serves as the meeting point and needs no free port.
            return f"file://{self._work / 'rendezvous'}"
        first = nodes[0]
        return f"tcp://{first.address}:{await first.call(free_port, first.address)}"

    async def _start(self, rank: int, rendezvous: str) -> RunningProcess:
        node, index = self._node_of(rank)
        settings = self._settings(rendezvous=rendezvous, address=node.address, rank=rank)
        command = (PYTHON, "-m", "swerl.training.rank.worker", settings.model_dump_json())
        env = rank_environment(node.gpus[index] if index < len(node.gpus) else "")
        # Commands reach the ranks through rank 0, so only rank 0 has a link.
        return await node.start(ProcessSpec(command, self._log(rank), env=env, linked=rank == 0))

    def _node_of(self, rank: int) -> tuple[Node, int]:
        """Return a rank's node and its index there. Raises RecipeError if nodes would differ."""
        size, rest = divmod(self._options.ranks, len(self._nodes))
        if rest:
            raise RecipeError(
                f"trainer.ranks = {self._options.ranks} on {len(self._nodes)} nodes",
                hint="give every node the same number of ranks",
            )
        return self._nodes[rank // size], rank % size

    def _log(self, rank: int) -> Path:
        return self._options.log_dir.resolve() / f"trainer-rank{rank}.log"

    async def _answer(self, command: str, *, timeout_s: float) -> Any:
        """Wait for rank 0's answer or for the end of any rank. Raises RankLostError."""
        line = asyncio.create_task(self.all[0].receive())
        deaths = [rank.ended for rank in self.all]
        try:
            await asyncio.wait(
                [line, *deaths], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            # The answer may have been on its way when a rank died.
            if not line.done() and self._dead:
                await asyncio.wait([line], timeout=LAST_ANSWER_S)
            if not line.done() and not self._dead:
                raise await self._hang_error(command, timeout_s)
        except asyncio.CancelledError:
            # The late answer must not be taken for the next command's answer.
            self.kill()
            raise
        finally:
            if not line.done():
                line.cancel()
        if not line.done() or not (text := line.result()):
            # The link can close before the end of the process is noticed.
            await asyncio.wait(deaths, timeout=LAST_ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            raise await self._death_error(command)
        return json.loads(text)

    async def _hang_error(self, command: str, timeout_s: float) -> RankLostError:
        """Make every rank write its stack to its log, kill them all, and return the error."""
        logs = [self._log(rank) for rank in range(len(self.all))]
        sizes = [_size(log) for log in logs]
        for rank in self.all:
            await rank.signal(signal.SIGUSR1)
        with suppress(TimeoutError):
            async with asyncio.timeout(STACKS_S):
                for log, size in zip(logs, sizes, strict=True):
                    # Other machines write these files: poll until the size stops changing.
                    before = size
                    while size == before or before != _size(log):
                        before = _size(log)
                        await asyncio.sleep(0.1)
        self.kill()
        places = hang_places(dict(enumerate(zip(logs, sizes, strict=True))))
        message = f"the trainer's {command} did not end within {timeout_s:g} s: {places}"
        where = self._log(0).with_name("trainer-rank*.log")
        hint = f"{where} end with the whole stacks"
        if command != "start":
            hint += "; trainer.step_timeout_s sets the limit"
        return RankLostError(message, hint=hint)

    def _note_death(self, rank: int, _: asyncio.Task[ProcessEnd]) -> None:
        self._dead.append(rank)

    async def _death_error(self, command: str) -> RankLostError:
        """Find the rank that died first and its reason, kill all ranks, and return the error."""
        # Without a noted death, rank 0 has lost its connection.
        reasons = [(rank, await self._reason(rank)) for rank in self._dead or [0]]
        # Prefer a death that is no consequence of another rank's death.
        dead, reason = next((item for item in reasons if not item[1].follows), reasons[0])
        how = self._how(dead)
        self.kill()
        where = f"rank {dead} on {self.all[dead].node}, {how}"
        message = f"a rank of the trainer died in `{command}` ({where}): {reason.text}"
        log = f"the whole log is {self._log(dead)}"
        advice = (reason.advice, log, "the same command resumes the run")
        return RankLostError(message, hint="; ".join(filter(None, advice)))

    def _how(self, rank: int) -> ProcessEnd:
        task = self.all[rank].ended
        return task.result() if task.done() else ProcessEnd(0, "its connection was lost")

    async def _reason(self, rank: int) -> CrashReason:
        """Find why a rank ended from its log and its machine's count of out-of-memory kills."""
        killed = 0
        node, _ = self._node_of(rank)
        with suppress(ClusterError, TimeoutError):
            async with asyncio.timeout(LAST_ANSWER_S):
                killed = await node.call(num_oom_kills) - self._oom_kills[node.name]
        return crash_reason(self._log(rank), self._how(rank), num_oom_kills=killed)


def start_limit_s(model: Path, num_nodes: int) -> float:
    """Return the seconds that ranks may take to start: nodes read the model from one disk."""
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return START_S + num_nodes * num_bytes / READ_BYTES_PER_S


def rank_environment(gpu: str) -> dict[str, str]:
    """Return the variables of a rank on a GPU; an empty name keeps it on the CPU."""
    if not gpu:
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": gpu,
        # With one queue, kernels start in the order of their calls: a collective that was called
        # before a matrix product is not delayed behind it. Megatron-Core relies on it.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # SGLang turns it off in its processes, and both ends of a broadcast must agree.
        "NCCL_CUMEM_ENABLE": "0",
        # Memory whose segments can grow cannot be opened by another process.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    }


def _size(log: Path) -> int:
    """Return the bytes of a log; 0 if a shared disk does not show it yet."""
    return log.stat().st_size if log.exists() else 0


_running: set[asyncio.Task[None]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    """Hold a reference to a task until it is done: the event loop's own is weak."""
    _running.add(task)
    task.add_done_callback(_running.discard)
