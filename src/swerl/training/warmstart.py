"""The warm start: makes a tiny model and teaches it to use its tools, by supervised learning.

The result is a model folder in the cache, named by a hash of everything that it depends on: the
settings and the demonstrations themselves. It is written beside its place and renamed, so it is
whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from swerl.core.errors import RecipeError
from swerl.core.events import Emit, Progress
from swerl.core.files import disk_errors
from swerl.core.learning import Batch, WeightRef
from swerl.core.secrets import cache_dir
from swerl.engines.families import tiny
from swerl.recipe.schema import Recipe, WarmStartSection
from swerl.training import demonstrations
from swerl.training.options import TrainerOptions
from swerl.training.tiny_model import make_tiny_model
from swerl.training.trainer import MegatronTrainer

STAGE = "warm start"
_WARMUP_STEPS = 20
_LR_END = 0.1
_ADAM_BETA2 = 0.95
_NUM_TEXTS = 2000
"""Conversations that the tokenizer learns its words from."""
_TEXTS_SEED = 10_000
"""Their seed: far from every run's, so that all runs of one vocabulary share a tokenizer."""
_NUM_HASHED = 200
"""Conversations that stand for all others in the cache's key."""


async def warm_start(recipe: Recipe, *, log_dir: Path, emit: Emit) -> Path:
    """Return the folder of the recipe's warm-started model, made first where the cache lacks it.

    Raises RecipeError for a family other than `tiny`, TrainerError and RunError on the way.
    """
    if recipe.model.family != "tiny":
        raise RecipeError(
            f"a warm start makes models of family 'tiny', not {recipe.model.family!r}",
            hint="set model.path to a model of that family",
        )
    home = cache_dir() / "warmstart"
    made = home / _key(recipe)
    if made.is_dir():
        return made
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=home, prefix=f".{made.name}."))
    try:
        start = _make_model(work, recipe)
        published = await _train(start, work, recipe, log_dir=log_dir, emit=emit)
        _keep(published.path, made)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made


def _key(recipe: Recipe) -> str:
    """Name the result by the settings and by the conversations that it is made from."""
    family = tiny.build(None)
    wrong_share = recipe.model.warm_start.wrong_share
    rows = islice(demonstrations.rows(family, recipe.seed, wrong_share), _NUM_HASHED)
    parts = [
        recipe.seed,
        recipe.model.shape.model_dump(),
        recipe.model.warm_start.model_dump(),
        [_WARMUP_STEPS, _LR_END, _ADAM_BETA2, _NUM_TEXTS, _TEXTS_SEED],
        [list(row.ids) for row in rows],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _make_model(work: Path, recipe: Recipe) -> Path:
    shape = recipe.model.shape
    words = work / "tokenizer"
    tokenizer = tiny.train_tokenizer(_texts(), shape.vocab_size)
    with disk_errors(words):
        tiny.save_tokenizer(tokenizer, words)
        return make_tiny_model(
            work / "start",
            shape,
            seed=recipe.seed,
            tokenizer=words,
            eos_id=tiny.build(words).stop_ids[0],
        )


def _texts() -> Iterator[str]:
    """Yield rendered conversations; every fix is a guess, so that all expressions occur."""
    family, one_id_per_byte = tiny.build(None), tiny.byte_tokenizer()
    for row in islice(demonstrations.rows(family, _TEXTS_SEED, 1.0), _NUM_TEXTS):
        yield one_id_per_byte.decode(list(row.ids), skip_special_tokens=False)


async def _train(
    start: Path, work: Path, recipe: Recipe, *, log_dir: Path, emit: Emit
) -> WeightRef:
    """Train on demonstrations and return the last weights."""
    section = recipe.model.warm_start
    trainer = MegatronTrainer(
        model=start,
        family=recipe.model.family,
        algorithm="sft",
        algorithm_options={"context_weight": 0.0},
        options=_trainer_options(recipe, work, log_dir),
    )
    emit(Progress(STAGE, 0, section.steps))
    async with trainer:
        for batch in _batches(start, section, recipe.seed):
            stats = await trainer.step(batch)
            note = f"loss {stats.loss:.3f}"
            emit(Progress(STAGE, batch.step + 1, section.steps, note))
        return await trainer.publish()


def _trainer_options(recipe: Recipe, work: Path, log_dir: Path) -> TrainerOptions:
    section = recipe.model.warm_start
    return TrainerOptions(
        checkpoint_dir=work / "checkpoints",
        publish_dir=work / "published",
        log_dir=log_dir / "warm-start",
        ranks=recipe.trainer.ranks,
        tensor_parallel=recipe.trainer.tensor_parallel,
        threads=recipe.trainer.threads,
        lr=section.lr,
        warmup_steps=min(_WARMUP_STEPS, section.steps // 2),
        steps=max(section.steps, 1),
        lr_end=_LR_END,
        adam_beta2=_ADAM_BETA2,
        tokens_per_micro_batch=recipe.trainer.tokens_per_micro_batch,
        seed=recipe.seed,
    )


def _batches(model: Path, section: WarmStartSection, seed: int) -> Iterator[Batch]:
    rows = demonstrations.rows(tiny.build(model), seed, section.wrong_share)
    for step in range(section.steps):
        samples = tuple(islice(rows, section.batch_size))
        yield Batch(step=step, samples=samples, num_episodes=len(samples))


def _keep(folder: Path, made: Path) -> None:
    """Move the finished model to its place; whoever was first there wins."""
    try:
        folder.rename(made)
    except OSError:
        if not made.is_dir():
            with disk_errors(made):
                raise
