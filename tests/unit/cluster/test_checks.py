"""Checks of machines, real ones on this machine; GPUs as nvidia-smi 550 prints them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from swerl.cluster import checks
from swerl.cluster.checks import (
    FindingState,
    MachineFinding,
    MachineNeed,
    check_gpus,
    check_nodes,
    gpu_uuids,
    judge_gpus,
    read_gpus,
    read_users,
    require_fit,
)
from swerl.cluster.node import LocalNode
from swerl.cluster.open import Nodes
from swerl.core.errors import ClusterError
from swerl.recipe.schema import Recipe

P = ParamSpec("P")
T = TypeVar("T")
RECIPE = Recipe.model_validate({"name": "checked", "trainer": {"ranks": 2}})


async def _all(recipe: Recipe, nodes: tuple[LocalNode, ...], folder: Path) -> list[MachineFinding]:
    both = Nodes(nodes, nodes)
    return [each async for each in check_nodes(recipe, both, folder, disk_bytes=1 << 20)]


async def test_two_nodes_pass_and_leave_nothing_behind(tmp_path: Path) -> None:
    nodes = (LocalNode(name="n1"), Quick(name="n2"))
    findings = await _all(RECIPE, nodes, tmp_path)
    assert {each.state for each in findings} == {FindingState.OK}, findings
    for name in ("GPUs", "torch", "cores", "disk"):
        assert [each.node for each in findings if each.check == name] == ["n1"]
    for name in ("versions", "shared folder"):
        assert [each.node for each in findings if each.check == name] == ["n1", "n2"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class Quick(LocalNode):
    """A machine that is fit by itself."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if function is checks.examine:
            return []  # type: ignore[return-value]
        return await super().call(function, *args, **kwargs)


class Crooked(Quick):
    """A machine whose folder is its own, and whose torch is another."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if function is checks.write_token:
            return None  # type: ignore[return-value]
        if function is checks.versions:
            return checks.versions() | {"torch": "1.0"}  # type: ignore[return-value]
        return await super().call(function, *args, **kwargs)


async def test_a_machine_that_is_unlike_the_others_is_named(tmp_path: Path) -> None:
    nodes = (Quick(name="good"), Crooked(name="bad"))
    findings = await _all(RECIPE, nodes, tmp_path)
    failed = {(each.node, each.check) for each in findings if each.state is FindingState.FAIL}
    shared = "shared folder"
    assert failed == {("bad", "versions"), ("good", shared), ("bad", shared)}
    with pytest.raises(ClusterError, match="3 checks of the machines failed") as error:
        await require_fit(RECIPE, Nodes(nodes, nodes), tmp_path, disk_bytes=1)
    assert f"good: {shared}: does not see the files of bad" in str(error.value)
    assert "torch differ" in error.value.hint
    assert "swerl doctor" in error.value.hint


def kernels(gpu: str, triton: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, MachineFinding]:
    """Return the findings on a machine that has `email` in the place of kernels."""
    monkeypatch.setattr(checks, "versions", lambda: {"triton": triton} if triton else {})
    return {each.check: each for each in checks.check_kernels("n1", ("email",), gpu)}


def test_absent_kernels_fail_with_the_extra_that_has_them() -> None:
    (finding,) = checks.check_kernels("n1", ("no_such_kernels",), "b200")
    assert (finding.state, finding.detail) == (FindingState.FAIL, "not installed: no_such_kernels")
    assert "[gpu]" in finding.fix


@pytest.mark.parametrize(
    ("gpu", "triton", "good"),
    [
        ("h100", "3.7.1", True),
        ("h200", "3.7.0", False),
        ("h100", "3.4.0+git1", False),
        ("h100", "3.3.1", True),
        ("h100", "", False),
    ],
)
def test_a_triton_that_computes_wrong_gradients_fails(
    gpu: str, triton: str, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = kernels(gpu, triton, monkeypatch)
    assert findings["kernels"].state is FindingState.OK
    assert (findings["triton"].state is FindingState.OK) == good


def test_other_gpus_take_any_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "triton" not in kernels("b200", "3.6.0", monkeypatch)


async def test_a_run_without_its_kernels_does_not_start(tmp_path: Path) -> None:
    node = LocalNode(name="n1")
    with pytest.raises(ClusterError, match="kernels: not installed: no_such"):
        await require_fit(
            RECIPE, Nodes((node,), (node,)), tmp_path, disk_bytes=1, modules=("no_such",)
        )


async def test_too_little_disk_is_reported_with_the_size_needed(tmp_path: Path) -> None:
    disk = checks.check_disk(MachineNeed("n1", tmp_path, disk_bytes=1 << 60))
    assert disk.state is FindingState.FAIL
    assert "1,073,741,824.0 GiB needed" in disk.detail


TWO = """\
0, GPU-aaa, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4
1, GPU-bbb, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 70001
"""
USER = "GPU-bbb, 4711, python3, 69990\n"


def need(num_gpus: int, gpu: str, *gpus: str) -> MachineNeed:
    return MachineNeed("n1", Path("/"), num_gpus=num_gpus, gpu=gpu, gpus=gpus)


def test_a_foreign_process_is_named() -> None:
    findings = list(judge_gpus(need(2, "h100"), read_gpus(TWO), read_users(USER)))
    assert [finding.state for finding in findings] == [FindingState.OK, FindingState.FAIL]
    assert "1 of 2 free; in use by python3 (pid 4711, 69990 MiB)" in findings[1].detail
    assert "swerl never does" in findings[1].fix
    assert "driver 550.54.15" in findings[0].detail


@pytest.mark.parametrize("own", ["0", "GPU-aaa"])
def test_a_gpu_that_is_not_the_runs_may_be_in_use(own: str) -> None:
    wish = need(1, "h100", own)
    findings = list(judge_gpus(wish, read_gpus(TWO), read_users(USER)))
    assert [finding.state for finding in findings] == [FindingState.OK] * 2
    assert findings[1].detail == "1 of 1 free"


@pytest.mark.parametrize("wish", [need(8, "h100"), need(2, "h200")])
def test_too_few_or_another_kind_fails(wish: MachineNeed) -> None:
    first, *_ = judge_gpus(wish, read_gpus(TWO), {})
    assert first.state is FindingState.FAIL
    assert f"asks for {wish.num_gpus} x {wish.gpu}" in first.fix


def test_a_machine_without_nvidia_smi_fails_only_if_gpus_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    (findings,) = check_gpus(need(8, "h100"))
    assert (findings.state, findings.detail) == (FindingState.FAIL, "nvidia-smi: not installed")
    (findings,) = check_gpus(need(0, "h100"))
    assert findings.state is FindingState.OK


def test_the_uuids_of_a_runs_gpus_follow_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{TWO}'\n".replace("\n1,", "\\n1,", 1))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu_uuids(("1", "GPU-aaa")) == ("bbb", "aaa")
    assert gpu_uuids(("2",)) == ()
    monkeypatch.setenv("PATH", "")
    assert gpu_uuids(("1",)) == ()


def test_fewer_cores_than_ranks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert checks.check_cores("n1", 2).state is FindingState.OK
    assert checks.check_cores("n1", 3).state is FindingState.FAIL
