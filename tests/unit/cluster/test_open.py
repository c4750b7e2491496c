"""A recipe's cluster section becomes machines; misfits are refused at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swerl.cluster.hosts import slurm_hosts
from swerl.cluster.open import open_nodes, trainer_nodes
from swerl.core.errors import ClusterError, RecipeError
from swerl.recipe.schema import Recipe


def _recipe(trainer: dict[str, Any], cluster: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "r", "trainer": trainer, "cluster": cluster})


@pytest.mark.parametrize(
    ("trainer", "cluster", "nodes"),
    [
        ({"ranks": 2}, {}, 1),
        ({"ranks": 64}, {"nodes": 8, "gpus_per_node": 8, "launcher": "ray"}, 8),
        (
            {"ranks": 32},
            {"nodes": 8, "gpus_per_node": 8, "launcher": "ray", "colocate": False},
            4,
        ),
    ],
)
def test_ranks_fill_whole_nodes(trainer: dict[str, Any], cluster: dict[str, Any], nodes: int):
    assert trainer_nodes(_recipe(trainer, cluster)) == nodes


@pytest.mark.parametrize(
    ("trainer", "cluster", "error"),
    [
        ({"ranks": 2}, {"nodes": 2}, "cluster.launcher = 'local'"),
        ({"ranks": 3}, {"nodes": 2, "launcher": "ray"}, "does not spread evenly"),
        ({"ranks": 4, "tensor_parallel": 4}, {"nodes": 2, "launcher": "ray"}, "tensor group"),
    ],
)
def test_a_layout_that_nodes_cannot_hold_is_refused(
    trainer: dict[str, Any], cluster: dict[str, Any], error: str
) -> None:
    with pytest.raises(RecipeError, match=error):
        trainer_nodes(_recipe(trainer, cluster))


async def test_a_host_list_of_another_length_is_refused(tmp_path: Path) -> None:
    recipe = _recipe({"ranks": 2}, {"nodes": 2, "launcher": "ssh", "hosts": ["one"]})
    with pytest.raises(RecipeError, match=r"cluster.nodes = 2, but there are 1 hosts"):
        async with open_nodes(recipe, tmp_path):
            pass


def test_slurm_outside_of_an_allocation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ClusterError, match="no Slurm allocation"):
        slurm_hosts(8)


def test_slurms_hosts_are_read_by_its_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in with scontrol's contract: `show hostnames LIST` prints a name a line.
    program = tmp_path / "scontrol"
    program.write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    hosts, step = slurm_hosts(8)
    assert hosts == ("n1", "n2")
    assert step[0] == "srun" and step[-1] == "--nodelist" and "--gpus-per-node=8" in step
    assert "--exact" not in step  # a step of one task would have one core
