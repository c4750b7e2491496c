"""Time weight updates of the twin's model in real SGLang on the CPU, each way.

    SWERL_SGLANG_PYTHON=sglang-env/bin/python python bench/weight_sync.py

Two trainer ranks share the model; one server. Prints the median of UPDATES updates each way,
pause, checksums and resume included, and the mismatch of log-probabilities after the last.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from swerl.core.contracts import Engine, EngineSetup
from swerl.core.events import ignore
from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.core.turn import Sampling
from swerl.engines import sglang
from swerl.engines.families import tiny
from swerl.recipe.schema import ClusterSection, ModelShape
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from swerl.training.warm_start import make_tiny_model
from swerl.training.weight_sync import sync as weight_sync

UPDATES = 10
PROMPT = tuple(range(3, 103))
NUM_TOKENS = 64
WAYS = ("tensor", "distributed", "disk")


async def measure(root: Path, python: Path) -> list[dict[str, float | str]]:
    """Start a server and a trainer on the same fresh model, and time them."""
    (root / "tokenizer").mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), root / "tokenizer")
    tokenizer = root / "tokenizer"
    model = make_tiny_model(root / "model", ModelShape(), seed=0, tokenizer=tokenizer, eos_id=2)
    options = TrainerOptions(
        ranks=2,
        tensor_parallel=2,
        checkpoint_dir=root / "checkpoints",
        publish_dir=root / "weights",
        log_dir=root,
        warmup_steps=0,
    )
    engine_options = sglang.Options(cpu=True, python=python, start_timeout_s=600)
    setup = EngineSetup(family=None, log_dir=root, model=model)  # type: ignore[arg-type]
    rows = []
    async with (
        sglang.open(engine_options, setup) as engine,
        MegatronTrainer(model=model, family="tiny", algorithm="gspo", options=options) as trainer,
    ):
        for way in WAYS:
            cluster = ClusterSection(weight_sync=way)  # type: ignore[arg-type]
            times = []
            for step in range(UPDATES):
                await trainer.step(await sampled(engine, step))
                start = time.perf_counter()
                await weight_sync.sync(trainer, engine, cluster, ignore)
                times.append(time.perf_counter() - start)
            rows.append(
                {
                    "way": way,
                    "median_s": statistics.median(times),
                    "mismatch": await mismatch(trainer, await sampled(engine, UPDATES)),
                }
            )
    return rows


async def sampled(engine: Engine, step: int) -> Batch:
    """Sample rows, with advantages that pull apart."""
    sampling = Sampling(NUM_TOKENS, temperature=1.0)
    replies = await asyncio.gather(
        *(engine.generate(PROMPT, sampling, f"session-{step}-{n}") for n in range(4))
    )
    rows = [
        Sample(
            episode=f"episode-{n}",
            task="task",
            ids=(*PROMPT, *reply.ids),
            mask=(0,) * len(PROMPT) + (1,) * len(reply.ids),
            logprobs=(0.0,) * len(PROMPT) + reply.logprobs,
            weight_versions=(reply.weight_version,),
            advantage=(-1.0, 1.0)[n % 2],
        )
        for n, reply in enumerate(replies)
    ]
    return Batch(step, tuple(rows), len(rows))


async def mismatch(trainer: MegatronTrainer, batch: Batch) -> float:
    """Return the mean absolute difference of log-probabilities, a sampled token."""
    known = await trainer.logprobs(batch)
    gaps = [
        abs(ours - theirs)
        for row, logprobs in zip(batch.samples, known, strict=True)
        for ours, theirs, trained in zip(logprobs, row.logprobs, row.mask, strict=True)
        if trained
    ]
    return statistics.fmean(gaps)


def main() -> int:
    python = os.environ.get("SWERL_SGLANG_PYTHON")
    if not python:
        print("SWERL_SGLANG_PYTHON names no interpreter with SGLang; nothing is measured")
        return 0
    with tempfile.TemporaryDirectory() as root:
        rows = asyncio.run(measure(Path(root), Path(python)))
    print("| way | seconds an update, median | mismatch after the last |")
    print("|---|---|---|")
    for row in rows:
        print(f"| {row['way']} | {row['median_s']:.3f} | {row['mismatch']:.1e} |")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
