"""GPUs as nvidia-smi 550 prints them: parsed and judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.cluster.checks import (
    FindingState,
    GpuNeed,
    check_gpus,
    gpu_uuids,
    judge_gpus,
    read_gpus,
    read_users,
)

TWO = """\
0, GPU-aaa, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4
1, GPU-bbb, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 70001
"""
USER = "GPU-bbb, 4711, python3, 69990\n"


def test_a_foreign_process_is_named() -> None:
    found = list(judge_gpus("n1", GpuNeed(2, "h100"), read_gpus(TWO), read_users(USER)))
    assert [each.state for each in found] == [FindingState.OK, FindingState.FAIL, FindingState.OK]
    assert "1 of 2 free; in use by python3 (pid 4711, 69990 MiB)" in found[1].found
    assert "swerl never does" in found[1].fix
    assert found[2].found == "550.54.15"


@pytest.mark.parametrize("own", ["0", "GPU-aaa"])
def test_a_gpu_that_is_not_the_runs_may_be_in_use(own: str) -> None:
    wanted = GpuNeed(1, "h100", given=(own,))
    found = list(judge_gpus("n1", wanted, read_gpus(TWO), read_users(USER)))
    assert [each.state for each in found] == [FindingState.OK] * 3
    assert found[1].found == "1 of 1 free"


@pytest.mark.parametrize("wanted", [GpuNeed(8, "h100"), GpuNeed(2, "h200")])
def test_too_few_or_another_kind_fails(wanted: GpuNeed) -> None:
    first, *_ = judge_gpus("n1", wanted, read_gpus(TWO), {})
    assert first.state is FindingState.FAIL
    assert f"asks for {wanted.num_gpus} x {wanted.kind}" in first.fix


def test_a_machine_without_nvidia_smi_fails_only_if_gpus_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    (found,) = check_gpus("n1", GpuNeed(8, "h100"))
    assert (found.state, found.found) == (FindingState.FAIL, "nvidia-smi: not installed")
    (found,) = check_gpus("n1", GpuNeed(0, "h100"))
    assert found.state is FindingState.OK


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
