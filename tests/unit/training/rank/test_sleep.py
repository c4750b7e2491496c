"""A rank lends its memory to the engine between steps, and no bit of its state changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swerl.core.learning import Batch
from swerl.training import batch as batches
from tests.unit.training.rank.family_ranks import job_of, run_ranks

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "layout",
    [
        {"ranks": 1, "dtype": "bf16"},
        {"ranks": 2, "tensor_parallel": 2, "dtype": "fp32"},
        {"ranks": 2, "dtype": "bf16", "offload_optimizer": True},
    ],
    ids=["bf16", "tensor ranks", "offloaded optimizer"],
)
def test_a_rank_that_slept_has_the_same_bits_and_frees_its_memory(
    layout: dict[str, Any], tiny_model: Path, random_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    """The allocator is counted: the bytes of all live tensors, but for the host's own block."""
    files = [tmp_path / f"batch-{number}.parquet" for number in range(2)]
    for number, file in enumerate(files):
        batches.write(file, random_batch(number))
    options = {**layout, "checkpoint_dir": str(tmp_path / "checkpoints"), "async_save": False}
    out = tmp_path / "found.pt"
    job = job_of(tiny_model, files, out, options, algorithm="gspo", sleeps=True)
    run_ranks(tmp_path / "jobs.json", {layout["ranks"]: [job]})
    found = torch.load(out, weights_only=False)
    same = {name for name, value in found.items() if value is True}
    assert same == {
        "asleep_state_is_equal",
        "asleep_weights_are_equal",
        "awaited_save_is_equal",
        "gradients_are_zero",
        "state_is_equal",
        "weights_are_equal",
    }
    # What stays are random states and such, and moments that are offloaded anyway. Gradients are
    # on the device alone.
    assert found["asleep"] < 0.05 * found["awake"]
    assert found["host"] < found["awake_again"] <= found["awake"]
    assert 0 < found["host_at_start"] <= found["host"]
