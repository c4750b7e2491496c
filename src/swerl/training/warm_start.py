"""Make a tiny model and teach it to use its tools, by supervised learning on demonstrations.

The result is a model folder in the cache, named by a hash of the settings and the demonstrations.
It is written under a temporary name and renamed, so it is whole or absent.

A demonstration is a scripted repair of one of the twin's repositories. Its row follows the path of
the built-in agent and the gateway: the prompt is rendered once, each reply is encoded as the model
would write it, each tool result is rendered as a tail. A test compares rows with real Episodes.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.core.changes import FileEdit
from swerl.core.chat import ChatRequest, Message, Role
from swerl.core.contracts import Family
from swerl.core.errors import InputError, RecipeError
from swerl.core.events import Emit, Progress
from swerl.core.files import disk_errors
from swerl.core.learning import Batch, WeightRef
from swerl.core.sample import Sample
from swerl.core.secrets import cache_dir
from swerl.engines.families import tiny
from swerl.engines.families.tiny import TinyShape
from swerl.harnesses import builtin
from swerl.harnesses._builtin_tools import answer, not_once
from swerl.recipe.schema import Recipe
from swerl.tasks.twin import WORKDIR, Split, Variant, draw
from swerl.training.model_folder import copy_tokenizer
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer

if TYPE_CHECKING:
    import torch

STAGE = "warm start"
_SHAPE = TinyShape()
_BATCH_SIZE = 32
"""Demonstrations per step."""
_LR = 3e-3
"""Peak learning rate; it falls linearly to a tenth."""
_WRONG_SHARE = 0.7
"""Share of demonstrations with a random fix, so that RL has something left to improve."""
_WARMUP_STEPS = 20
_LR_END = 0.1
_ADAM_BETA2 = 0.95
_NUM_TEXTS = 2000
"""Conversations that train the tokenizer."""
_TEXTS_SEED = 10_000
"""Their seed: fixed, so that all runs with one vocabulary size share a tokenizer."""
_FAILED_EDIT_SHARE = 0.15
"""Share of repairs with a failing edit: the policy must learn to continue after an error."""
_NUM_HASHED = 200
"""Conversations hashed into the cache's key, in place of all of them."""


async def warm_start(recipe: Recipe, *, log_dir: Path, emit: Emit) -> Path:
    """Return the folder of the recipe's warm-started model; make it if the cache lacks it.

    Raises RecipeError for a family other than `tiny`, and TrainerError or RunError if it fails.
    """
    if recipe.model.family != "tiny":
        raise RecipeError(
            f"a warm start makes models of family 'tiny', not {recipe.model.family!r}",
            hint="set model.path to a model of that family",
        )
    home = cache_dir() / "warmstart"
    folder = home / _key(recipe)
    if folder.is_dir():
        return folder
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=home, prefix=f".{folder.name}."))
    try:
        start = _make_model(work, recipe)
        published = await _train(start, work, recipe, log_dir=log_dir, emit=emit)
        _keep(published.path, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _key(recipe: Recipe) -> str:
    family = tiny.build(None)
    rows = islice(demonstration_rows(family, recipe.seed, _WRONG_SHARE), _NUM_HASHED)
    parts = [
        [recipe.seed, recipe.model.warm_start_steps],
        asdict(_SHAPE),
        [_BATCH_SIZE, _LR, _WARMUP_STEPS, _LR_END, _ADAM_BETA2, _NUM_TEXTS, _TEXTS_SEED],
        [list(row.ids) for row in rows],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _make_model(work: Path, recipe: Recipe) -> Path:
    words = work / "tokenizer"
    tokenizer = tiny.train_tokenizer(_texts(), _SHAPE.vocab_size)
    with disk_errors(words):
        tiny.save_tokenizer(tokenizer, words)
        return make_tiny_model(
            work / "start",
            _SHAPE,
            seed=recipe.seed,
            tokenizer=words,
            eos_id=tiny.build(words).stop_ids[0],
        )


def _texts() -> Iterator[str]:
    """Yield rendered conversations. Every fix is random, so that all expressions occur."""
    family, one_id_per_byte = tiny.build(None), tiny.byte_tokenizer()
    for row in islice(demonstration_rows(family, _TEXTS_SEED, 1.0), _NUM_TEXTS):
        yield one_id_per_byte.decode(list(row.ids), skip_special_tokens=False)


async def _train(
    start: Path, work: Path, recipe: Recipe, *, log_dir: Path, emit: Emit
) -> WeightRef:
    num_steps = recipe.model.warm_start_steps
    trainer = MegatronTrainer(
        model=start,
        family=recipe.model.family,
        algorithm="sft",
        options=_trainer_options(recipe, work, log_dir),
    )
    emit(Progress(STAGE, 0, num_steps))
    async with trainer:
        for batch in _batches(start, num_steps, recipe.seed):
            stats = await trainer.step(batch)
            note = f"loss {stats.loss:.3f}"
            emit(Progress(STAGE, batch.step + 1, num_steps, note))
        return await trainer.publish()


def _trainer_options(recipe: Recipe, work: Path, log_dir: Path) -> TrainerOptions:
    num_steps = recipe.model.warm_start_steps
    return TrainerOptions(
        checkpoint_dir=work / "checkpoints",
        publish_dir=work / "published",
        log_dir=log_dir / "warm-start",
        ranks=recipe.trainer.ranks,
        tensor_parallel=recipe.trainer.tensor_parallel,
        lr=_LR,
        warmup_steps=min(_WARMUP_STEPS, num_steps // 2),
        steps=max(num_steps, 1),
        lr_end=_LR_END,
        adam_beta2=_ADAM_BETA2,
        tokens_per_micro_batch=recipe.trainer.tokens_per_micro_batch,
        seed=recipe.seed,
    )


def _batches(model: Path, num_steps: int, seed: int) -> Iterator[Batch]:
    rows = demonstration_rows(tiny.build(model), seed, _WRONG_SHARE)
    for step in range(num_steps):
        samples = tuple(islice(rows, _BATCH_SIZE))
        yield Batch(step=step, samples=samples, num_episodes=len(samples))


def _keep(folder: Path, cached: Path) -> None:
    """Rename the finished model into the cache; if another process was first, keep its model."""
    try:
        folder.rename(cached)
    except OSError:
        if not cached.is_dir():
            with disk_errors(cached):
                raise


@dataclass(frozen=True, slots=True)
class DemoMessage:
    message: Message
    is_trained: bool = False


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A repair of one variant, right or wrong.

    With `slip`, an edit of text that is not in the file comes first. That edit is not trained, but
    the reply to the tool's error is.
    """

    variant: Variant
    fix: str
    """The expression that replaces the wrong one."""
    slip: str = ""
    """An expression that is not in the file; empty for none."""

    def conversation(self) -> Iterator[DemoMessage]:
        look, change, submit = self._replies(self.variant.bad)
        yield DemoMessage(Message(Role.USER, self.variant.prompt))
        yield DemoMessage(look, is_trained=True)
        yield DemoMessage(Message(Role.TOOL, self.variant.source.rstrip("\n")))
        if self.slip:
            yield DemoMessage(self._replies(self.slip)[1])
            error = not_once(f"{WORKDIR}/{self.variant.file}", 0)
            yield DemoMessage(Message(Role.TOOL, answer(error)))
        yield DemoMessage(change, is_trained=True)
        yield DemoMessage(Message(Role.TOOL, "ok"))
        yield DemoMessage(submit, is_trained=True)

    def _replies(self, bad: str) -> Sequence[Message]:
        return builtin.script([FileEdit(self.variant.file, f"return {bad}", f"return {self.fix}")])


def repairs(seed: int, wrong_share: float) -> Iterator[Demonstration]:
    """Yield repairs of training variants without end.

    A share `wrong_share` of the fixes is random, right or wrong, so that reinforcement learning has
    something left to improve.
    """
    rng = random.Random(f"demonstrations/{seed}")
    while True:
        variant = draw(rng, Split.TRAIN)
        is_random = rng.random() < wrong_share
        fix = rng.choice(variant.guesses()) if is_random else variant.good
        slip = draw(rng, Split.TRAIN).bad if rng.random() < _FAILED_EDIT_SHARE else ""
        yield Demonstration(variant, fix, "" if f"return {slip}" in variant.source else slip)


def demonstration_rows(family: Family, seed: int, wrong_share: float) -> Iterator[Sample]:
    for number, demonstration in enumerate(repairs(seed, wrong_share)):
        yield to_row(family, demonstration, f"demonstration-{number}")


def to_row(family: Family, demonstration: Demonstration, name: str) -> Sample:
    """Return a demonstration's tokens as the gateway records them."""
    ids: list[int] = []
    mask: list[int] = []
    past: list[Message] = []
    for turn in demonstration.conversation():
        if turn.message.role is Role.ASSISTANT:
            added = family.encode_reply(turn.message)
        elif not ids:
            added = family.render(ChatRequest((turn.message,)))
        else:
            added = family.render_tail([turn.message], past=past, last_id=ids[-1])
        ids += added
        past.append(turn.message)
        mask += [int(turn.is_trained)] * len(added)
    return Sample(name, name, tuple(ids), tuple(mask), (0.0,) * len(ids))


def make_tiny_model(
    folder: Path, shape: TinyShape, *, seed: int, tokenizer: Path, eos_id: int
) -> Path:
    """Write a small dense Qwen3 with its config and tokenizer; return `folder`.

    The same shape and seed give the same bytes. Matrices are drawn from a normal distribution,
    norms are 1. Raises InputError if `tokenizer` has no tokenizer.json.
    """
    if not (tokenizer / "tokenizer.json").is_file():
        raise InputError(
            f"no tokenizer.json in {tokenizer}", hint="give the folder of a trained tokenizer"
        )
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer, folder)
    config = json.dumps(_config(shape, eos_id), indent=2, sort_keys=True)
    (folder / "config.json").write_text(config + "\n")
    from safetensors.torch import save_file

    save_file(_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config(shape: TinyShape, eos_id: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "initializer_range": shape.init_std,
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }


def _weights(shape: TinyShape, seed: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(size)
        if len(size) == 1
        else torch.empty(size).normal_(0.0, shape.init_std, generator=generator)
        for name, size in _sizes(shape)
    }


def _sizes(shape: TinyShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = shape.hidden_size, shape.ffn_hidden_size
    query, group = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (query, hidden)
        yield prefix + "self_attn.k_proj.weight", (group, hidden)
        yield prefix + "self_attn.v_proj.weight", (group, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, query)
        yield prefix + "self_attn.q_norm.weight", (shape.head_dim,)
        yield prefix + "self_attn.k_norm.weight", (shape.head_dim,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (wide, hidden)
        yield prefix + "mlp.up_proj.weight", (wide, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
