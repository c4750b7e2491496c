"""Manifests, parsed as YAML and bash and compared with the recipe."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from swerl.cluster.manifests import RecipeSource, kuberay, slurm
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe

PATH = Path(__file__).resolve().parents[3] / "recipes" / "qwen35b_8node.toml"
SOURCE = RecipeSource(Path("recipes/qwen35b_8node.toml"), ("name=a b",))


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load([PATH])


def _job(recipe: Recipe) -> str:
    return kuberay(recipe, SOURCE, image="example/swerl:1", volume="claim", secret="keys")


@pytest.fixture(scope="module")
def job(recipe: Recipe) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra swerl[cluster]")
    return yaml.safe_load(_job(recipe))


def test_a_ray_job_asks_for_the_recipes_machines(job: Any) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 8
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert int(container["resources"]["limits"]["cpu"]) >= 2 * 8  # ranks and engines
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"} in container["env"]
    assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]


def test_cpus_of_sandboxes_come_on_top_of_the_others(recipe: Recipe) -> None:
    cluster = recipe.cluster.model_copy(update={"sandbox_cpus": 100})
    spread = _job(recipe.model_copy(update={"cluster": cluster}))
    assert spread.count('cpu: "164"') == 2
    assert _job(recipe).count('cpu: "64"') == 2


def test_a_ray_jobs_command_runs_in_a_shell_on_the_shared_volume(job: Any) -> None:
    shell, option, command = shlex.split(job["spec"]["entrypoint"])
    assert (shell, option) == ("bash", "-c")
    change, _, train = command.partition(" && ")
    assert change == "cd /shared"
    words = shlex.split(train)
    assert words[:3] == ["swerl", "train", "recipes/qwen35b_8node.toml"]
    assert words[3::2] == ["--set"] * 3
    assert words[4::2] == ["name=a b", "cluster.launcher=ray", "cluster.ray_address=auto"]


def test_keys_reach_the_controller_and_no_other_pod(job: Any) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert [each["secretRef"]["name"] for each in head["envFrom"]] == ["keys"]
    (worker,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert "envFrom" not in worker
    assert "nvidia.com/gpu" not in head["resources"]["limits"]


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


def test_a_model_outside_the_volume_is_remarked(recipe: Recipe) -> None:
    assert "model.path = /models/Qwen3.6-35B-A3B is not on it" in _job(recipe)
    model = recipe.model.model_copy(update={"path": Path("/shared/models/q")})
    assert "is not on it" not in _job(recipe.model_copy(update={"model": model}))


@pytest.mark.parametrize(
    ("name", "taken"), [("My_Run.v2" + "x" * 60, "my-run-v2xxx"), ("35b", "swerl-35b\n")]
)
def test_the_names_are_ones_that_kubernetes_takes(recipe: Recipe, name: str, taken: str) -> None:
    assert f"  name: {taken}" in _job(recipe.model_copy(update={"name": name}))


def test_a_slurm_script_asks_for_the_recipes_whole_machines(recipe: Recipe) -> None:
    text = slurm(recipe, SOURCE, hours=12)
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    for line in ("--nodes=8", "--gpus-per-node=8", "--exclusive", "--mem=0", "--time=12:00:00"):
        assert f"#SBATCH {line}" in asked


def test_slurms_signal_before_the_end_reaches_the_run(recipe: Recipe, tmp_path: Path) -> None:
    # A stand-in for swerl: it writes down how it was called, and which signal ended it.
    program = tmp_path / "swerl"
    program.write_text(
        "#!/bin/bash\n"
        f'printf "%s|" "$@" >> {tmp_path}/calls; echo >> {tmp_path}/calls\n'
        '[ "$2" = preflight ] && exit 0\n'
        f"trap 'echo told > {tmp_path}/signal; exit 143' TERM\n"
        "echo trains\n"
        "while :; do sleep 0.2; done\n"
    )
    program.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(slurm(recipe, SOURCE, hours=12))
    job = subprocess.Popen(
        ["bash", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout and job.stdout.readline() == "trains\n"
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 143
    assert (tmp_path / "signal").read_text() == "told\n"
    arguments = "recipes/qwen35b_8node.toml|--set|name=a b|--set|cluster.launcher=slurm|\n"
    calls = (tmp_path / "calls").read_text()
    assert calls == f"train|preflight|{arguments}train|{arguments}"
