"""The templates of docs/guides/cluster.md, read by the programs that would run them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "cluster.md"


def block(language: str) -> str:
    """Return the page's block of code of this language."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return str(text)


def test_bash_parses_the_slurm_script(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(block("bash"))
    parsed = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")
    options = re.findall(r"^#SBATCH --(\S+)$", script.read_text(), flags=re.MULTILINE)
    assert {"nodes=8", "ntasks-per-node=1", "gpus-per-node=8", "exclusive"} <= set(options)


def test_ray_knows_the_options_of_the_slurm_script() -> None:
    pytest.importorskip("ray.scripts.symmetric_run", reason="needs the extra swerl[cluster]")
    joined = block("bash").replace("\\\n", " ")
    (line,) = (line for line in joined.splitlines() if "symmetric-run" in line)
    words = shlex.split(line)
    options = words[words.index("symmetric-run") + 1 : words.index("--")]
    command = [sys.executable, "-m", "ray.scripts.scripts"]
    texts = [
        subprocess.run(
            [*command, name, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for name in ("symmetric-run", "start")
    ]
    for option in (word.partition("=")[0] for word in options if word.startswith("--")):
        assert any(f"{option} " in text for text in texts), option
    assert words[words.index("--") + 1 :][:2] == ["bash", "-c"]


def test_the_ray_job_has_what_kuberay_requires() -> None:
    yaml = pytest.importorskip("yaml", reason="needs the extra swerl[kubernetes]")
    job: dict[str, Any] = yaml.safe_load(block("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert "swerl train" in job["spec"]["entrypoint"]
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 8
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    for group in (head, workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] and container["resources"]["limits"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]} == {"shared", "shm"}
    resources = workers["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["nvidia.com/gpu"] == "8"
