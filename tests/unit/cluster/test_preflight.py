"""The preflight on this machine, real: every check runs, and a bad machine is named."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from swerl.cluster import checks
from swerl.cluster.checks import FindingState, MachineFinding
from swerl.cluster.node import LocalNode
from swerl.cluster.open import Nodes
from swerl.cluster.preflight import check_nodes, require_fit
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
    found = await _all(RECIPE, nodes, tmp_path)
    assert {each.state for each in found} == {FindingState.OK}, found
    for name in ("GPUs", "torch", "ports", "disk"):
        assert [each.node for each in found if each.check == name] == ["n1"]
    for name in ("versions", "shared folder", "clock"):
        assert [each.node for each in found if each.check == name] == ["n1", "n2"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class Quick(LocalNode):
    """A machine that is fit by itself."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if function is checks.examine:
            return []  # type: ignore[return-value]
        return await super().call(function, *args, **kwargs)


class Crooked(Quick):
    """A machine whose clock is ahead, whose folder is its own, and whose torch is another."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if function is time.time:
            return function(*args, **kwargs) + 300  # type: ignore[operator,return-value]
        if function is checks.write_token:
            return None  # type: ignore[return-value]
        if function is checks.versions:
            return checks.versions() | {"torch": "1.0"}  # type: ignore[return-value]
        return await super().call(function, *args, **kwargs)


async def test_a_machine_that_is_unlike_the_others_is_named(tmp_path: Path) -> None:
    nodes = (Quick(name="good"), Crooked(name="bad"))
    found = await _all(RECIPE, nodes, tmp_path)
    failed = {(each.node, each.check) for each in found if each.state is FindingState.FAIL}
    shared = "shared folder"
    assert failed == {("bad", "versions"), ("good", shared), ("bad", shared), ("bad", "clock")}
    with pytest.raises(ClusterError, match="4 checks of the machines failed") as error:
        await require_fit(RECIPE, Nodes(nodes, nodes), tmp_path, disk_bytes=1)
    assert f"good: {shared}: does not see the files of bad" in str(error.value)
    assert "torch differ" in error.value.hint
    assert "swerl train preflight" in error.value.hint


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = checks.check_ports("n1", "127.0.0.1", [port])
    assert found.state is FindingState.FAIL
    assert (found.check, "in use" in found.found) == (f"port {port}", True)


def kernels(gpu: str, triton: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, MachineFinding]:
    """Return the findings on a machine that has `email` in the place of kernels."""
    monkeypatch.setattr(checks, "versions", lambda: {"triton": triton} if triton else {})
    return {each.check: each for each in checks.check_kernels("n1", ("email",), gpu)}


def test_absent_kernels_fail_with_the_extra_that_has_them() -> None:
    (found,) = checks.check_kernels("n1", ("no_such_kernels",), "b200")
    assert (found.state, found.found) == (FindingState.FAIL, "not installed: no_such_kernels")
    assert "swerl[gpu]" in found.fix and "trainer.require_kernels = false" in found.fix


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
    found = kernels(gpu, triton, monkeypatch)
    assert found["kernels"].state is FindingState.OK
    assert (found["triton"].state is FindingState.OK) == good


def test_other_gpus_take_any_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "triton" not in kernels("b200", "3.6.0", monkeypatch)


async def test_a_run_without_its_kernels_does_not_start(tmp_path: Path) -> None:
    node = LocalNode(name="n1")
    with pytest.raises(ClusterError, match="kernels: not installed: no_such"):
        await require_fit(
            RECIPE, Nodes((node,), (node,)), tmp_path, disk_bytes=1, modules=("no_such",)
        )


async def test_too_little_disk_is_reported_with_the_size_needed(tmp_path: Path) -> None:
    asked = checks.MachineNeed("n1", "127.0.0.1", checks.GpuNeed(0, ""), tmp_path, 1 << 60)
    disk = checks._check_disk(asked)
    assert disk.state is FindingState.FAIL
    assert "1,073,741,824.0 GiB needed" in disk.found
