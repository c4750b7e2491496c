"""Manifests that start a recipe's machines: a RayJob for KubeRay, a script for Slurm's sbatch."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from swerl.cluster.open import cpus_per_node
from swerl.recipe.schema import Recipe

RAY_VERSION = "2.60.0"
"""Ray version of a manifest if Ray is not installed here; the image must hold the same one."""
SHARED = "/shared"
"""Mount path of the shared volume in a pod."""
_NAME_LENGTH = 40
_CPUS_PER_GPU = 8
"""Cores of a pod per GPU, for a rank and an engine; clouds offer 12 and more."""
_MEMORY_PER_GPU_GIB = 200
_SPARE_CPUS = 4
"""Further cores of a CPU pod: for Ray's daemons, data and the sandboxes' traffic."""


@dataclass(frozen=True, slots=True)
class RecipeSource:
    """A recipe as the command line names it."""

    path: Path
    settings: tuple[str, ...] = ()
    """Overrides, KEY=VALUE."""

    def words(self, launcher: str) -> str:
        """Return the arguments of `swerl train` for a shell."""
        sets = (*self.settings, f"cluster.launcher={launcher}")
        return shlex.join([str(self.path), *(word for each in sets for word in ("--set", each))])


def kuberay(recipe: Recipe, source: RecipeSource, *, image: str, volume: str, secret: str) -> str:
    """Return a RayJob (ray.io/v1) that trains a recipe and takes its machines down at the end."""
    # The job runs on the head in the image's folder; relative paths must start at the volume.
    num_workers = recipe.cluster.nodes
    command = f"cd {SHARED} && swerl train {source.words('ray')} --set cluster.ray_address=auto"
    entrypoint = f"bash -c {shlex.quote(command)}"
    return f"""\
# kubectl apply -f this; then: kubectl logs -f job/{_name(recipe)}
# KubeRay (v1.2 or newer) starts one head, which trains nothing, and {num_workers} workers.
{_remarks(recipe, secret)}apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: {_name(recipe)}
  labels:
    app.kubernetes.io/managed-by: swerl
    swerl/run: {_name(recipe)}
spec:
  entrypoint: {json.dumps(entrypoint)}
  # The command resumes after a crash, so a second try loses nothing.
  backoffLimit: 2
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  rayClusterSpec:
    rayVersion: "{_ray_version()}"     # that of the image
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
              envFrom:           # keys of sandboxes and metrics, for the controller only
                - secretRef: {{name: {secret}, optional: true}}
              resources:         # controller, gateway and grading run here
                requests: {{cpu: "16", memory: 64Gi}}
                limits: {{cpu: "16", memory: 64Gi}}
              volumeMounts: &mounts
                - {{name: shared, mountPath: {SHARED}}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes: &volumes
            # Recipe, tasks, models and the run folder: ReadWriteMany, the same on all pods.
            - name: shared
              persistentVolumeClaim: {{claimName: {volume}}}
            # Tensors sent between processes of one pod.
            - name: shm
              emptyDir: {{medium: Memory, sizeLimit: 64Gi}}
{_workers(recipe, image)}"""


def _workers(recipe: Recipe, image: str) -> str:
    nodes = recipe.cluster.nodes
    return f"""\
    workerGroupSpecs:
      - groupName: trainers
        replicas: {nodes}
        minReplicas: {nodes}
        maxReplicas: {nodes}
        rayStartParams: {{}}
        template:
          spec:
            restartPolicy: Never
{_tolerations(recipe.cluster.gpus_per_node)}            containers:
              - name: ray-worker
                image: {image}
                env: *environment
                resources:       # a whole machine each; requests equal limits
                  requests: {_resources(recipe)}
                  limits: {_resources(recipe)}
                volumeMounts: *mounts
            volumes: *volumes
"""


def slurm(recipe: Recipe, source: RecipeSource, *, hours: int) -> str:
    """Return a script for sbatch that trains a recipe on machines of the allocation."""
    gpus, nodes = recipe.cluster.gpus_per_node, recipe.cluster.nodes
    wanted = f"#SBATCH --gpus-per-node={gpus}\n" if gpus else ""
    words = source.words("slurm")
    return f"""\
#!/bin/bash
# Submit with sbatch; submitted again, it resumes the run.
#SBATCH --job-name={_name(recipe)}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{wanted}# Whole machines: --exclusive takes all cores, --mem=0 all memory.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time={hours}:00:00
# SIGTERM to this script five minutes before the end, for an orderly stop.
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

# All nodes must share the folders of recipe, tasks, model, runs/ and swerl's Python. `swerl` and
# the keys of sandboxes come from the environment in which you call sbatch.
# The command runs on the first node and joins the others with srun into a Ray cluster of its own.
swerl train preflight {words}
# exec: swerl gets the signal itself; bash would hold it back until its child ends.
exec swerl train {words}
"""


def _remarks(recipe: Recipe, secret: str) -> str:
    """Return the prerequisites as comments."""
    lines = [f"The claim holds the recipe and the files it names, at {SHARED} in the pods."]
    model = recipe.model.path
    if model is not None and model.is_absolute() and not model.is_relative_to(SHARED):
        lines.append(f"model.path = {model} is not on it: put it into the image, or pass")
        lines.append(f"--set model.path={SHARED}/... to this command.")
    lines.append(f"Keys: kubectl create secret generic {secret} --from-literal=E2B_API_KEY=...")
    if recipe.cluster.gpus_per_node and recipe.cluster.nodes > 1:
        lines.append("NCCL does not find InfiniBand or RoCE by itself: add what your device plugin")
        lines.append("requires (a resource such as rdma/..., IPC_LOCK, NCCL_* in env).")
    return "".join(f"# {line}\n" for line in lines)


def _ray_version() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        return RAY_VERSION


def _name(recipe: Recipe) -> str:
    """Return the run's name in the form that Kubernetes accepts for services."""
    name = re.sub(r"[^a-z0-9-]+", "-", recipe.name.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"swerl-{name}"
    return name[:_NAME_LENGTH].strip("-")


def _tolerations(gpus: int) -> str:
    if not gpus:
        return ""
    return """\
            tolerations:         # clouds keep other pods off machines with GPUs
              - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
"""


def _resources(recipe: Recipe) -> str:
    gpus = recipe.cluster.gpus_per_node
    if not gpus:
        return f'{{cpu: "{cpus_per_node(recipe) + _SPARE_CPUS}", memory: 16Gi}}'
    memory = f"{_MEMORY_PER_GPU_GIB * gpus}Gi"
    cpus = _CPUS_PER_GPU * gpus + recipe.cluster.sandbox_cpus
    return f'{{cpu: "{cpus}", memory: {memory}, nvidia.com/gpu: "{gpus}"}}'
