"""What others need to start a recipe's machines: a RayJob for KubeRay, a script for sbatch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from swerl.cluster.open import cpus_per_node
from swerl.recipe.schema import Recipe

RAY_VERSION = "2.60.0"
_NAME_LENGTH = 40
_SPARE_CPUS = 4
"""Cores of a pod beside those of its ranks: Ray's daemons, data, sandboxes' traffic."""


def kuberay(recipe: Recipe, path: Path, *, image: str, volume: str) -> str:
    """Return a RayJob (ray.io/v1) that trains a recipe and takes its machines down at the end."""
    gpus, nodes = recipe.cluster.gpus_per_node, recipe.cluster.nodes
    cpus = cpus_per_node(recipe) + _SPARE_CPUS
    command = f"swerl train {path} --runs /shared/runs --set cluster.launcher=ray"
    command += " --set cluster.ray_address=auto"
    return f"""\
# kubectl apply -f this; then: kubectl logs -f job/{_name(recipe)}
# KubeRay's operator (v1.2 or newer) starts one head, which trains nothing, and {nodes} workers.
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: {_name(recipe)}
  labels:
    app.kubernetes.io/managed-by: swerl
    swerl/run: {_name(recipe)}
spec:
  entrypoint: {json.dumps(command)}
  # The command itself goes on where it stopped, so a second try loses nothing.
  backoffLimit: 2
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  rayClusterSpec:
    rayVersion: "{RAY_VERSION}"
    headGroupSpec:
      rayStartParams:
        num-cpus: "0"            # ranks and engines go to the workers
        num-gpus: "0"
      template:
        spec:
          restartPolicy: Never
          containers:
            - name: ray-head
              image: {image}
              env: &environment
                - {{name: RAY_USAGE_STATS_ENABLED, value: "0"}}
                - {{name: RAY_worker_niceness, value: "0"}}
              resources:         # controller, gateway and grading run here
                requests: {{cpu: "16", memory: 64Gi}}
                limits: {{cpu: "16", memory: 64Gi}}
              volumeMounts: &mounts
                - {{name: shared, mountPath: /shared}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes: &volumes
            # Recipe, tasks, models and the run folder: ReadWriteMany, the same on all pods.
            - name: shared
              persistentVolumeClaim: {{claimName: {volume}}}
            # Tensors on their way between processes of one pod.
            - name: shm
              emptyDir: {{medium: Memory, sizeLimit: 64Gi}}
    workerGroupSpecs:
      - groupName: trainers
        replicas: {nodes}
        minReplicas: {nodes}
        maxReplicas: {nodes}
        rayStartParams: {{}}
        template:
          spec:
            restartPolicy: Never
            containers:
              - name: ray-worker
                image: {image}
                env: *environment
                resources:       # a whole machine each; requests equal limits
                  requests: {_resources(cpus, gpus)}
                  limits: {_resources(cpus, gpus)}
                volumeMounts: *mounts
            volumes: *volumes
"""


def slurm(recipe: Recipe, path: Path, *, hours: int) -> str:
    """Return a script for sbatch that trains a recipe on machines of the allocation."""
    gpus, nodes = recipe.cluster.gpus_per_node, recipe.cluster.nodes
    wanted = f"#SBATCH --gpus-per-node={gpus}\n" if gpus else ""
    return f"""\
#!/bin/bash
# sbatch this; the same command goes on where the last one stopped.
#SBATCH --job-name={_name(recipe)}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus_per_node(recipe) + _SPARE_CPUS}
{wanted}#SBATCH --exclusive
#SBATCH --time={hours}:00:00
#SBATCH --signal=B:INT@300       # five minutes before the end, to stop in order
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

# Recipe, tasks, model, runs/ and this Python must lie in folders that all nodes share.
# The command runs on the first node and joins the others with srun into a Ray cluster of its own.
swerl train preflight {path} --set cluster.launcher=slurm
swerl train {path} --set cluster.launcher=slurm &
trap 'kill -INT %1' INT TERM
wait %1 || wait %1
"""


def _name(recipe: Recipe) -> str:
    """Return the run's name as Kubernetes takes it."""
    name = re.sub(r"[^a-z0-9-]+", "-", recipe.name.lower()).strip("-")
    return name[:_NAME_LENGTH].strip("-") or "swerl"


def _resources(cpus: int, gpus: int) -> str:
    memory = f"{max(16, 200 * gpus)}Gi"
    gpu = f', nvidia.com/gpu: "{gpus}"' if gpus else ""
    return f'{{cpu: "{cpus}", memory: {memory}{gpu}}}'
