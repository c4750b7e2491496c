"""The warm start makes a model that a trainer and an engine can load, once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from swerl.core.errors import RecipeError, TrainerError
from swerl.core.events import Event, Progress
from swerl.engines.families import tiny
from swerl.recipe.schema import ModelSection, ModelShape, Recipe, WarmStartSection
from swerl.training import warm_start as warmstart
from swerl.training.warm_start import warm_start

SHAPE = ModelShape(
    hidden_size=32, ffn_hidden_size=32, num_layers=1, num_heads=2, head_dim=16, vocab_size=300
)


def _recipe(*, family: str = "tiny", **settings: float) -> Recipe:
    section = WarmStartSection.model_validate({"steps": 3, "batch_size": 2, **settings})
    return Recipe(name="t", model=ModelSection(family=family, shape=SHAPE, warm_start=section))


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache in the test's folder, and let the tokenizer learn from few texts."""
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
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


@pytest.mark.parametrize(
    "change", [{"steps": 4}, {"lr": 1e-3}, {"wrong_share": 0.5}, {"batch_size": 3}]
)
def test_a_changed_setting_is_another_model(change: dict[str, float]) -> None:
    assert warmstart._key(_recipe(**change)) != warmstart._key(_recipe())
    assert warmstart._key(_recipe()) == warmstart._key(_recipe())


async def test_a_failed_warm_start_leaves_nothing_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise TrainerError("a rank died")

    monkeypatch.setattr(warmstart.MegatronTrainer, "step", fail)
    with pytest.raises(TrainerError):
        await warm_start(_recipe(), log_dir=tmp_path / "logs", emit=lambda _: None)
    assert list((tmp_path / "cache" / "warmstart").iterdir()) == []


async def test_another_family_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        await warm_start(_recipe(family="qwen3"), log_dir=tmp_path, emit=lambda _: None)
    assert "model.path" in caught.value.hint
