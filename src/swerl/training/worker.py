"""One rank of the trainer: `python -m swerl.training.worker SETTINGS [SOCKET]`.

Rank 0 inherits the socket to the controller. It reads one JSON object a line (`command` and its
arguments), passes it on to the other ranks, and answers with one line: `result`, or `error` and
`hint` where the command failed and the trainer lives on. Any other failure ends the process, and
its log holds the reason. SIGUSR1 writes the stack of every thread to the log.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swerl import plugins
from swerl.cluster.network import interface_of
from swerl.errors import SwerlError
from swerl.training import batch as batches
from swerl.training import megatron_cpu
from swerl.training.options import WorkerSettings

IDLE = timedelta(days=30)
"""How long a rank waits for the next command: as long as rollouts take. Dead ranks are noticed by
the controller, which watches the processes."""


def main() -> None:
    """Serve commands until `close` or until the controller is gone."""
    _die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.filterwarnings("ignore", module="megatron")
    settings = WorkerSettings.model_validate_json(sys.argv[1])
    torch.set_num_threads(settings.options.threads)
    _join_ranks(settings)
    link = socket.socket(fileno=int(sys.argv[2])) if len(sys.argv) > 2 else None
    try:
        commands = Commands(settings)
    except SwerlError as error:
        _answer(link, {"error": str(error), "hint": error.hint})
        return
    # What is loaded stays: full collections, of which Megatron-Core's saving makes some, need not
    # walk it again.
    gc.freeze()
    _answer(link, {"result": "ready"})
    for command in _commands(link):
        _answer(link, _run(commands, command))
    dist.destroy_process_group()


class Commands:
    """What the controller may ask for; every rank runs every command."""

    def __init__(self, settings: WorkerSettings) -> None:
        # Imported here: Megatron-Core must find the CPU adapter in place.
        from swerl.training.learner import Learner

        family = plugins.load("families", settings.family).build(settings.model)
        module = plugins.load("algorithms", settings.algorithm)
        algorithm = module.build(module.Options.model_validate(settings.algorithm_options))
        self._settings = settings
        self._learner = Learner(settings, family, algorithm)

    def step(self, batch: str) -> dict[str, Any]:
        """Take one optimizer step on a batch file."""
        return asdict(self._learner.step(batches.read(Path(batch))))

    def logprobs(self, batch: str) -> list[list[float]]:
        """Return the log-probability of every token of a batch file."""
        return self._learner.logprobs(batches.read(Path(batch)))

    def publish(self) -> dict[str, str]:
        """Write the weights as a model folder named for the number of steps taken."""
        from swerl.training import weights

        tensors = self._learner.whole_weights()
        version = f"{self._learner.num_steps:06d}"
        if dist.get_rank():
            return {}
        target = self._settings.options.publish_dir / version
        ref = weights.publish(tensors, self._settings.model, target)
        return {"path": str(ref.path), "version": ref.version, "checksum": ref.checksum}

    def save(self, step: int) -> None:
        """Write the checkpoint of a step."""
        from swerl.training import checkpoint

        checkpoint.save(self._learner, self._checkpoint(step))

    def restore(self, step: int) -> None:
        """Continue from the checkpoint of a step."""
        from swerl.training import checkpoint

        checkpoint.restore(self._learner, self._checkpoint(step))

    def _checkpoint(self, step: int) -> Path:
        return self._settings.options.checkpoint_dir / f"{step:05d}"


def _join_ranks(settings: WorkerSettings) -> None:
    megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    if torch.cuda.is_available():
        torch.cuda.set_device(settings.rank % torch.cuda.device_count())
    # By default both ask for an address of the host's name, which need not be the one in use.
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface_of(settings.address))
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=settings.rendezvous,
        rank=settings.rank,
        world_size=settings.options.ranks,
        timeout=IDLE,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.options.tensor_parallel,
        create_gloo_process_groups=True,
    )
    torch.manual_seed(settings.options.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(settings.options.seed)


def _commands(link: socket.socket | None) -> Iterator[Mapping[str, Any]]:
    """Yield commands on every rank until `close`, or until the controller's end is closed."""
    lines = link.makefile("r", encoding="utf-8") if link else iter(())
    group = dist.new_group(backend="gloo", timeout=IDLE)
    while True:
        held: list[Any] = [next(lines, None)] if link else [None]
        dist.broadcast_object_list(held, src=0, group=group)
        command = json.loads(held[0]) if held[0] else {"command": "close"}
        if command["command"] == "close":
            return
        yield command


def _run(commands: Commands, command: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(command)
    method: Callable[..., Any] = getattr(commands, arguments.pop("command"))
    try:
        return {"result": method(**arguments)}
    except SwerlError as error:
        return {"error": str(error), "hint": error.hint, "kind": type(error).__name__}


def _answer(link: socket.socket | None, answer: Mapping[str, Any]) -> None:
    if link is None:
        return
    # A controller that is gone is noticed at the next read.
    with suppress(BrokenPipeError):
        link.sendall(json.dumps(answer).encode() + b"\n")


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the controller dies, even by SIGKILL."""
    set_parent_death_signal = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main()
