"""One rank of the trainer: `python -m swerl.training.rank.worker SETTINGS [SOCKET]`.

Rank 0 inherits the socket to the controller. It reads one JSON object per line (`command` and its
arguments), broadcasts it to the other ranks, and answers with one line: `result`, or `error` and
`hint` if the command failed and the trainer continues. Any other failure ends the process, with the
reason in its log. SIGUSR1 writes the stack of every thread to the log.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from swerl.cluster.node import interface_of
from swerl.core import plugins
from swerl.core.errors import SwerlError, TrainerError
from swerl.core.learning import Batch, EngineTarget
from swerl.training import batch as batches
from swerl.training.model_folder import publish
from swerl.training.options import TrainerOptions, WorkerSettings
from swerl.training.rank import megatron_cpu
from swerl.training.rank.sleep import empty_allocator

if TYPE_CHECKING:
    from swerl.training.weight_sync.send import Sender

IDLE = timedelta(days=30)
"""Time that a rank waits for the next command: rollouts may be long. The controller watches the
processes and notices dead ranks."""

_KEPT_BYTES, _LARGEST_KEPT_BYTES = 512 * 2**20, 32 * 2**20
"""Most freed bytes that a rank on the CPU keeps, and the largest block of them: glibc's limit."""


def main() -> None:
    _die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A scheduler signals every process of a job; the controller ends the ranks after the step.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.filterwarnings("ignore", module="megatron")
    settings = WorkerSettings.model_validate_json(sys.argv[1])
    torch.set_num_threads(settings.options.threads)
    if not torch.cuda.is_available():
        _keep_freed_memory()
    _join_ranks(settings)
    link = socket.socket(fileno=int(sys.argv[2])) if len(sys.argv) > 2 else None
    try:
        commands = RankCommands(settings)
    except SwerlError as error:
        if link is None:
            raise  # only rank 0 can answer; this rank's log keeps the error
        _answer(link, {"error": str(error), "hint": error.hint})
        return
    # Loaded objects stay alive. Full collections, which Megatron-Core's saving triggers, skip them.
    gc.freeze()
    _answer(link, {"result": "ready"})
    for command in _commands(link):
        _answer(link, _run(commands, command))
    commands.close()
    commands.finish()
    dist.destroy_process_group()


class RankCommands:
    def __init__(self, settings: WorkerSettings) -> None:
        # Imported here: Megatron-Core must find the CPU adapter in place.
        from swerl.training.checkpoint.store import Checkpoints
        from swerl.training.rank.learner import Learner

        family = plugins.load("families", settings.family).build(settings.model)
        options = plugins.options_of("algorithms", settings.algorithm)
        given = () if options is None else (options.model_validate(settings.algorithm_options),)
        algorithm = plugins.load("algorithms", settings.algorithm).build(*given)
        self._settings = settings
        self._learner = Learner(settings, family, algorithm)
        self._checkpoints = Checkpoints(self._learner, settings)
        self._sender: Sender | None = None

    def step(self, batch: str, logprobs: str, base: str | None) -> dict[str, Any]:
        """Take a step; rank 0 writes the tokens' log-probabilities to the file `logprobs`."""
        self._learner.wake()
        rows = self._read(batch)
        if base:
            rows = replace(rows, base=batches.read_values(Path(base), rows))
        stats = self._learner.step(rows)
        _write_values(logprobs, stats.logprobs)
        return asdict(replace(stats, logprobs=()))

    def logprobs(self, batch: str, logprobs: str) -> None:
        self._learner.wake()
        _write_values(logprobs, self._learner.logprobs(self._read(batch)))

    def publish(self) -> dict[str, str]:
        """Write the weights as a folder named for the number of steps taken."""
        tensors = self._learner.whole_weights()
        try:
            if dist.get_rank():
                return {}
            target = self._settings.options.publish_dir / self._version
            ref = publish(tensors, self._settings.model, target)
        finally:
            for _ in tensors:  # all ranks must exhaust it, also after an error on the first
                pass
        return {"path": str(ref.path), "version": ref.version, "checksum": ref.checksum}

    def send(self, targets: list[dict[str, Any]], way: str, version: str | None) -> dict[str, Any]:
        from swerl.training.weight_sync.send import Sender, stored_dtypes

        if version not in (None, self._version):
            raise TrainerError(
                f"the trainer holds weights {self._version}, not {version} any more",
                hint="the next update serves every engine",
            )
        options = self._settings.options
        self._sender = self._sender or Sender(
            self._learner.whole_weights,
            self._learner.hf_config,
            stored_dtypes(self._settings.model),
            max_bytes=options.weight_bucket_mib * 2**20,
            timeout_s=options.weight_bucket_s,
        )
        # JSON has turned tuples into lists.
        asked = [EngineTarget(**{**target, "gpus": tuple(target["gpus"])}) for target in targets]
        try:
            sent = self._sender.send(asked, way, self._version)
        finally:
            # The engine takes its cache's memory back next.
            empty_allocator()
        return asdict(sent) | {"certain": sorted(sent.certain)}

    def save(self, step: int, kept: list[int]) -> None:
        self._checkpoints.save(step, kept)

    def restore(self, step: int) -> None:
        self._learner.wake()
        self._checkpoints.restore(step)

    def sleep(self) -> None:
        self._learner.sleep()

    def wake(self) -> None:
        self._learner.wake()

    def finish(self) -> None:
        self._checkpoints.finish()

    @property
    def _version(self) -> str:
        return f"{self._learner.num_steps:06d}"

    def close(self) -> None:
        if self._sender:
            self._sender.close()

    def _read(self, path: str) -> Batch:
        replay = self._settings.options.routing_replay
        return batches.read(Path(path), routed=replay)


def _write_values(path: str, values: Sequence[Sequence[float]]) -> None:
    """Write the values that rank 0 has gathered."""
    if dist.get_rank() == 0:
        batches.write_values(Path(path), values)


def _join_ranks(settings: WorkerSettings) -> None:
    megatron_cpu.install()
    if torch.cuda.is_available():
        torch.cuda.set_device(settings.rank % torch.cuda.device_count())
    # By default both libraries resolve the host's name, which may give an unused address.
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface_of(settings.address))
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=settings.rendezvous,
        rank=settings.rank,
        world_size=settings.options.ranks,
        timeout=IDLE,
    )
    form_groups(settings.options)


def form_groups(options: TrainerOptions) -> None:
    """Form Megatron-Core's groups over all ranks, and seed the random states."""
    # Imported here: Megatron-Core must find the CPU adapter in place.
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=options.expert_tensor_parallel,
        create_gloo_process_groups=True,
    )
    torch.manual_seed(options.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(options.seed)


def _commands(link: socket.socket | None) -> Iterator[Mapping[str, Any]]:
    """Yield commands on every rank until `close`, or until the controller closes the socket."""
    lines = link.makefile("r", encoding="utf-8") if link else iter(())
    group = dist.new_group(backend="gloo", timeout=IDLE)
    while True:
        message: list[Any] = [next(lines, None)] if link else [None]
        dist.broadcast_object_list(message, src=0, group=group)
        command = json.loads(message[0]) if message[0] else {"command": "close"}
        if command["command"] == "close":
            return
        yield command


def _run(commands: RankCommands, command: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(command)
    method: Callable[..., Any] = getattr(commands, arguments.pop("command"))
    try:
        return {"result": method(**arguments)}
    except SwerlError as error:
        print(f"{command['command']}: {error}", file=sys.stderr)  # noqa: T201 - this is the log
        return {"error": str(error), "hint": error.hint, "kind": type(error).__name__}


def _answer(link: socket.socket | None, answer: Mapping[str, Any]) -> None:
    if link is None:
        return
    # If the controller is gone, the next read notices it.
    with suppress(BrokenPipeError):
        link.sendall(json.dumps(answer).encode() + b"\n")


def _keep_freed_memory() -> None:
    """Have glibc reuse the memory of freed tensors.

    By default it gives most of it back to Linux, and each step would fault it in again.
    """
    trim_threshold, mmap_threshold = -1, -3
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(trim_threshold, _KEPT_BYTES)
        libc.mallopt(mmap_threshold, _LARGEST_KEPT_BYTES)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the controller dies, even by SIGKILL."""
    set_parent_death_signal = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main()
