"""Manifests that others read: parsed as YAML and bash, and compared with what the recipe asks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from swerl.cluster.manifests import kuberay, slurm
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe

PATH = Path(__file__).resolve().parents[2] / "recipes" / "qwen35b_8node.toml"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load([PATH])


@pytest.fixture(scope="module")
def job(recipe: Recipe) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra swerl[cluster]")
    return yaml.safe_load(kuberay(recipe, PATH, image="example/swerl:1", volume="claim"))


def test_a_ray_job_asks_for_the_recipes_machines(job: Any) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert "--set cluster.launcher=ray" in job["spec"]["entrypoint"]
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 8
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"} in container["env"]


def test_a_ray_jobs_volumes_are_mounted_by_every_pod_and_parameters_are_text(job: Any) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]
    assert all(isinstance(value, str) for value in head["rayStartParams"].values())
    for group in (head, *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
        assert pod["containers"][0]["image"] == "example/swerl:1"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}


def test_the_names_are_ones_that_kubernetes_takes(recipe: Recipe) -> None:
    odd = recipe.model_copy(update={"name": "My_Run.v2" + "x" * 60})
    assert "  name: my-run-v2xxx" in kuberay(odd, PATH, image="i", volume="v")


def test_a_slurm_script_is_bash_and_asks_for_the_recipes_machines(
    recipe: Recipe, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(slurm(recipe, PATH, hours=12))
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    asked = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    for line in ("--nodes=8", "--gpus-per-node=8", "--ntasks-per-node=1", "--time=12:00:00"):
        assert f"#SBATCH {line}" in asked
