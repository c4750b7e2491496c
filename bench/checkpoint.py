"""Seconds that checkpoints take: saving beside training and before it, restoring, exporting.

`python bench/checkpoint.py [--json FILE]`: one rank, the twin's model and a larger one. Every time
is the best of `--repeats`, as the controller sees it; a busy machine makes them longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.core.files import write_json
from swerl.engines.families import tiny
from swerl.engines.families.tiny import TinyShape
from swerl.recipe.schema import Recipe
from swerl.training.checkpoint.folder import read_meta
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from swerl.training.warm_start import make_tiny_model

SHAPES = {
    "twin": TinyShape(),
    "large": TinyShape(num_layers=8, hidden_size=768, ffn_hidden_size=3072, num_heads=12),
}


@dataclass(frozen=True, slots=True)
class Times:
    """One line of the table; seconds but for the first two and the last."""

    model: str
    num_params: int
    checkpoint_mb: float
    blocked_async_s: float
    """Until `save` returns and training goes on."""
    whole_async_s: float
    """Until the checkpoint is whole, training idle."""
    blocked_sync_s: float
    restore_s: float
    export_s: float
    """Of the whole command, its start included."""
    export_peak_gib: float


async def measure(root: Path, model: str, repeats: int) -> Times:
    """Save, restore and export one model."""
    run = root / model
    (run / "tokenizer").mkdir(parents=True)
    tokenizer = tiny.byte_tokenizer()
    tiny.save_tokenizer(tokenizer, run / "tokenizer")
    folder = run / "initial_model"
    make_tiny_model(folder, SHAPES[model], seed=0, tokenizer=run / "tokenizer", eos_id=2)
    write_json(run / "recipe.resolved.json", Recipe(name=model).model_dump(mode="json"))
    beside = await _times(run, repeats, async_save=True)
    before = await _times(run, repeats, async_save=False)
    meta = read_meta(run / "checkpoints" / "00001")
    export_s, peak_gib = min(_export(run) for _ in range(repeats))
    return Times(
        model,
        meta.num_params,
        meta.num_bytes / 1e6,
        blocked_async_s=beside[0],
        whole_async_s=beside[1],
        blocked_sync_s=before[0],
        restore_s=min(beside[2], before[2]),
        export_s=export_s,
        export_peak_gib=peak_gib,
    )


async def _times(run: Path, repeats: int, *, async_save: bool) -> tuple[float, float, float]:
    options = TrainerOptions(
        checkpoint_dir=run / "checkpoints",
        publish_dir=run / "weights",
        log_dir=run / "logs",
        async_save=async_save,
    )
    rows: list[tuple[float, float, float]] = []
    async with MegatronTrainer(
        model=run / "initial_model", family="tiny", algorithm="sft", options=options
    ) as trainer:
        for _ in range(repeats):
            started = time.perf_counter()
            blocked = await _timed(trainer.save(1))
            await trainer.saved()
            rows.append((blocked, time.perf_counter() - started, await _timed(trainer.restore(1))))
    return (min(r[0] for r in rows), min(r[1] for r in rows), min(r[2] for r in rows))


async def _timed(call: Awaitable[object]) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


def _export(run: Path) -> tuple[float, float]:
    out = run / "exported"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "swerl.cli", "export", str(run), "-o", str(out)]
    started = time.perf_counter()
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds = time.perf_counter() - started
    found = re.search(r"memory +([\d.]+) GiB", text)
    assert found
    return seconds, float(found[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = [
            asyncio.run(measure(Path(work), model, arguments.repeats)) for model in arguments.models
        ]
    for times in found:
        print("  ".join(f"{key} {value}" for key, value in asdict(times).items()))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(times) for times in found], indent=1))


if __name__ == "__main__":
    main()
