"""A rank lends its memory to the engine between steps, and no bit of its state changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swerl.core.learning import Batch
from swerl.training import batch as batches
from swerl.training.options import TrainerOptions

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

pytestmark = pytest.mark.integration


def _run(options: TrainerOptions, model: Path, rows: list[Batch], folder: Path) -> dict[str, Any]:
    paths = []
    for number, each in enumerate(rows):
        paths.append(str(folder / f"batch-{number}.parquet"))
        batches.write(Path(paths[-1]), each)
    job = folder / "job.json"
    given = json.loads(options.model_dump_json())
    job.write_text(json.dumps({"options": given, "model": str(model), "batches": paths}))
    command = [sys.executable, "-m", "tests.unit.training.rank.sleep_rank", str(job)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(options.ranks)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 0, said[-2000:]
    found: dict[str, Any] = json.loads(job.with_suffix(".found").read_text())
    return found


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
    layout: dict[str, Any],
    options: TrainerOptions,
    tiny_model: Path,
    random_batch: Callable[..., Batch],
    tmp_path: Path,
) -> None:
    """The allocator is counted: the bytes of all live tensors, but for the host's own block."""
    rows = [random_batch(0), random_batch(1)]
    layout = {**layout, "async_save": False}
    found = _run(options.model_copy(update=layout), tiny_model, rows, tmp_path)
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
