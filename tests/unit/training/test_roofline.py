"""The counts of bench/roofline.py agree with the planner."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swerl.plan.parameters import row_cost
from swerl.plan.shape import shape_from_config

ROOT = Path(__file__).parents[3]
ROWS = (1024, 1024)
SMALL: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""A small hybrid with experts."""


def counted(folder: Path, config: dict[str, Any], *settings: str, trained: float) -> dict[str, Any]:
    """Return what bench/roofline.py prints as JSON for a model of this config."""
    (folder / "config.json").write_text(json.dumps(config))
    layout = {"ranks": 8, "tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 4}
    keys = [f"trainer.{key}={value}" for key, value in layout.items()]
    sets = [f"--set={key}" for key in (f"model.path={folder}", *keys, *settings)]
    command = [sys.executable, "bench/roofline.py", "recipes/qwen35b_8node.toml", *sets]
    command += [f"--trained={trained}", "--rows", *map(str, ROWS)]
    out = folder / "roofline.json"
    done = subprocess.run(
        [*command, f"--json={out}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.integration
def test_the_counted_matrix_products_are_the_planners_operations(tmp_path: Path) -> None:
    """Every position is trained and nothing is recomputed, as the planner's formula assumes."""
    found = counted(tmp_path, SMALL, "trainer.recompute=false", trained=1)
    products = ("matrix products", "expert products", "fp32 products", "delta rule", "attention")
    of_rank = {kind: found["classes"][kind]["flops"] for kind in products}
    # The kernel recomputes the scores: 2.5 times the forward products, where the formula has 2.
    of_rank["attention"] *= 3 / 3.5
    cost = row_cost(shape_from_config("small", SMALL))
    gpus = 2 * 2
    assert gpus * sum(of_rank.values()) == pytest.approx(sum(map(cost.of, ROWS)), rel=0.02)
