"""The hosts of the Slurm allocation that this process runs in, and the way to run on one."""

from __future__ import annotations

import subprocess

from swerl.core.errors import ClusterError
from swerl.core.secrets import slurm_node_list

HOSTNAMES_S = 30.0


def slurm_hosts(gpus_per_node: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the allocation's hosts, and the command that runs another on the host after it.

    Raises ClusterError outside of an allocation.
    """
    listed = slurm_node_list()
    if not listed:
        message = "cluster.launcher = 'slurm', and this process is in no Slurm allocation"
        hint = "`swerl train manifest slurm RECIPE` prints a script for sbatch"
        raise ClusterError(message, hint=hint)
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            capture_output=True,
            text=True,
            timeout=HOSTNAMES_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"scontrol cannot read the node list {listed!r}: {error}",
            hint="run this where Slurm's commands are",
        ) from error
    gpus = (f"--gpus-per-node={gpus_per_node}",) if gpus_per_node else ()
    # --overlap: others' steps may hold the same resources. Without --exact a step has all cores of
    # its machine; with it, and with srun's binding, it would have the one core of its one task.
    step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", *gpus)
    return tuple(done.stdout.split()), (*step, "--nodelist")
