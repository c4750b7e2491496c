"""The warm start makes a model that trainer and engine load, from rows as real Episodes have."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swerl.core.chat import Message, Role
from swerl.core.errors import RecipeError, TrainerError
from swerl.core.events import Event, Progress
from swerl.core.sample import to_samples
from swerl.core.sandbox import Limits
from swerl.core.turn import Sampling
from swerl.engines._weights import checksum
from swerl.engines.families import tiny
from swerl.engines.families.tiny import TinyShape
from swerl.engines.scripted import ScriptedEngine
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.harnesses import builtin
from swerl.recipe.schema import ModelSection, Recipe
from swerl.sandboxes import local
from swerl.tasks.twin import make_tasks, make_variants
from swerl.training import warm_start as warmstart
from swerl.training.warm_start import Demonstration, make_tiny_model, repairs, to_row, warm_start

SHAPE = TinyShape(
    hidden_size=32, ffn_hidden_size=32, num_layers=1, num_heads=2, head_dim=16, vocab_size=300
)


def _recipe(*, family: str = "tiny") -> Recipe:
    return Recipe(name="t", model=ModelSection(family=family, warm_start_steps=3))


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache in the test's folder; make a tiny model and a tokenizer of few texts."""
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warmstart, "_SHAPE", SHAPE)
    monkeypatch.setattr(warmstart, "_BATCH_SIZE", 2)
    monkeypatch.setattr(warmstart, "_NUM_TEXTS", 20)


async def test_a_second_call_finds_the_model_in_the_cache(tmp_path: Path) -> None:
    events: list[Event] = []
    made = await warm_start(_recipe(), log_dir=tmp_path / "logs", emit=events.append)
    steps = [(e.done, e.total) for e in events if isinstance(e, Progress)]
    losses = [float(e.note.split()[-1]) for e in events if isinstance(e, Progress) and e.note]
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert losses[0] == pytest.approx(math.log(SHAPE.vocab_size), abs=0.1)
    assert losses[-1] < losses[0]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in made.iterdir()
    }
    assert tiny.build(made).encode_reply

    events.clear()
    assert await warm_start(_recipe(), log_dir=tmp_path / "logs", emit=events.append) == made
    assert events == []
    assert [path.name for path in made.parent.iterdir()] == [made.name]


async def test_a_failed_warm_start_leaves_nothing_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise TrainerError("a rank died")

    monkeypatch.setattr(warmstart.MegatronTrainer, "step", fail)
    with pytest.raises(TrainerError):
        await warm_start(_recipe(), log_dir=tmp_path / "logs", emit=lambda _: None)
    assert list((tmp_path / "cache" / "warmstart").iterdir()) == []


async def test_another_family_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        await warm_start(_recipe(family="qwen3"), log_dir=tmp_path, emit=lambda _: None)
    assert "model.path" in caught.value.hint


@pytest.mark.parametrize(("seed", "slip"), [(0, ""), (1, ""), (1, "c ** d")])
async def test_a_row_equals_that_of_a_real_scripted_episode(
    tmp_path: Path, seed: int, slip: str
) -> None:
    (task,) = make_tasks(tmp_path, split="train", count=1, seed=seed)
    (variant,) = make_variants(split="train", count=1, seed=seed)
    family = tiny.build(None)
    demonstration = Demonstration(variant, variant.good, slip)
    replies = _replies(demonstration)
    engine = ScriptedEngine(family, lambda _: replies)
    backend = local.build(local.Options())
    async with (
        Gateway(engine=engine, family=family) as gateway,
        backend.open(task.image, Limits(), workdir=task.workdir) as sandbox,
    ):
        session = gateway.open("s", sampling=Sampling(500), limits=SessionLimits())
        agent = builtin.build(builtin.Options())
        done = await agent.run(sandbox, task, session.endpoint(session.url), 60)
        edited = (await sandbox.read(f"{task.workdir}/{variant.file}")).decode()
        (sample,) = to_samples(await session.close(), episode="s", task="t")
    row = to_row(family, demonstration, "row")
    assert done.code == 0, done.log
    assert edited == variant.fixed
    assert sample.ids == row.ids
    assert sample.mask == row.mask or slip


def _replies(demonstration: Demonstration) -> list[Message]:
    messages = [one.message for one in demonstration.conversation()]
    return [message for message in messages if message.role is Role.ASSISTANT]


def test_a_slip_is_never_in_the_file() -> None:
    some = list(islice(repairs(0, 0.5), 500))
    slips = [one for one in some if one.slip]
    assert 0.08 < len(slips) / len(some) < 0.22
    assert not [one for one in slips if f"return {one.slip}" in one.variant.source]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), folder)
    return folder


def test_a_seed_gives_the_same_weights_every_time(tmp_path: Path, tokenizer: Path) -> None:
    folders = [
        make_tiny_model(tmp_path / name, TinyShape(), seed=seed, tokenizer=tokenizer, eos_id=2)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    sums = [checksum(folder) for folder in folders]
    assert sums[0] == sums[1] != sums[2]
    assert (folders[0] / "tokenizer.json").read_bytes() == (
        tokenizer / "tokenizer.json"
    ).read_bytes()


def test_transformers_finds_every_weight_it_expects(tmp_path: Path, tokenizer: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", TinyShape(), seed=0, tokenizer=tokenizer, eos_id=2)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(param.numel() for param in model.parameters()) == 459_520
    matrix = model.model.layers[0].mlp.up_proj.weight
    assert matrix.dtype == torch.float32
    assert matrix.std().item() == pytest.approx(TinyShape().init_std, rel=0.02)
