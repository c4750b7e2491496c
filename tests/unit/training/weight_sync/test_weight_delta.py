"""Deltas from a real trainer into a real engine, whose folder is that of another machine."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")
pytest.importorskip("zstandard", reason="needs the extra swerl[zstd]")

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, RecipeError
from swerl.core.events import ignore
from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.core.turn import Sampling
from swerl.engines import sglang, torch_cpu
from swerl.engines._delta_http import KEY, Receiver
from swerl.engines._sglang_client import connect
from swerl.engines._sglang_pool import ClientSettings
from swerl.engines._sglang_wire import ServedShape
from swerl.recipe.check import check
from swerl.recipe.schema import ClusterSection, LoraSection, Recipe
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from swerl.training.weight_sync.sync import sync

PROMPT = tuple(range(3, 40))


async def test_an_engine_serves_deltas_and_a_new_one_catches_up(
    tiny_model: Path,
    options: TrainerOptions,
    random_batch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = options.model_copy(update={"delta_dir": tmp_path / "trainer"})
    options.publish_dir.mkdir(exist_ok=True)
    setup = EngineSetup(family=None, log_dir=tmp_path, model=tiny_model)  # type: ignore[arg-type]
    there = tmp_path / "machine"
    async with (
        MegatronTrainer(
            model=tiny_model, family="tiny", algorithm="gspo", options=options
        ) as trainer,
        torch_cpu.open(torch_cpu.Options(), setup) as engine,
    ):
        for step in range(2):
            await trainer.step(random_batch(step))
            ref = await trainer.publish()
            assert ref.delta is not None and ref.delta.parent == options.publish_dir
            assert await engine.load(replace(ref, path=there / ref.path.name)) == ref.version
        reply = await engine.generate(PROMPT, Sampling(6, seed=1), "s")
        await trainer.step(random_batch(2))
        torn = await trainer.publish()
        assert torn.delta is not None
        torn.delta.write_bytes(torn.delta.read_bytes()[:-9])
        with pytest.raises(EngineError, match="missing or damaged"):
            await engine.load(replace(torn, path=there / torn.path.name))
        # The version before it goes on serving.
        after = await engine.generate(PROMPT, Sampling(6, seed=1), "t")
        assert (after.ids, after.weight_version) == (reply.ids, "000002")
    # A machine without any version and without a shared disk, and an engine on the initial model.
    monkeypatch.setenv(KEY, "a key of both machines")
    async with (
        Receiver(tmp_path / "fresh", "a key of both machines").listen("127.0.0.1", 0) as port,
        torch_cpu.open(torch_cpu.Options(), setup) as there_only,
        sglang.open(sglang.Options(url=there_only.url, receiver_port=port), setup) as engine,
    ):
        await engine.load(ref)
        again = await engine.generate(PROMPT, Sampling(6, seed=1), "s")
        assert again.ids == reply.ids
        assert again.logprobs == pytest.approx(reply.logprobs, abs=1e-5)
        assert again.weight_version == "000002"
        shutil.rmtree(tmp_path / "fresh")
        with pytest.raises(EngineError, match=r"could not rebuild weights '000003'.*damaged"):
            await engine.load(torn)
        after = await engine.generate(PROMPT, Sampling(6, seed=1), "t")
        assert (after.ids, after.weight_version) == (reply.ids, "000002")


async def test_ten_updates_of_adapters_alone_reach_an_engine_elsewhere(
    tiny_model: Path,
    options: TrainerOptions,
    random_batch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora, key = LoraSection(rank=2), "a key of both machines"
    monkeypatch.setenv(KEY, key)
    options = options.model_copy(update={"delta_dir": tmp_path / "trainer", "lora": lora})
    options.publish_dir.mkdir(exist_ok=True)
    setup = EngineSetup(family=None, log_dir=tmp_path, model=tiny_model)  # type: ignore[arg-type]
    async with (
        MegatronTrainer(
            model=tiny_model, family="tiny", algorithm="gspo", options=options
        ) as trainer,
        Receiver(tmp_path / "there", key).listen("127.0.0.1", 0) as port,
        torch_cpu.open(torch_cpu.Options(), setup) as there,
        connect(
            [there.url],
            shape=ServedShape(),
            settings=ClientSettings(streams=False, adapters="folder", receiver_port=port),
        ) as engine,
    ):
        for step in range(10):
            await trainer.step(random_batch(step))
            version = await sync(trainer, engine, ClusterSection(), ignore)
            ref = await trainer.publish(adapters=True)
            for path in ref.path.iterdir():
                found = tmp_path / "there" / ref.path.name / path.name
                assert found.read_bytes() == path.read_bytes()
        names = {path.name for path in ref.path.iterdir()}
        assert names == {"adapter_config.json", "adapter_model.safetensors"}
        shutil.rmtree(tmp_path / "trainer")  # the engine has not read the trainer's own
        reply = await engine.generate(PROMPT, Sampling(20, seed=1), "s")
        assert reply.weight_version == version == "000010"
        row = Sample("e", "t", PROMPT + reply.ids, (0,) * 37 + (1,) * len(reply.ids),
                     (0.0,) * 37 + reply.logprobs)  # fmt: skip
        (known,) = await trainer.logprobs(Batch(0, (row,), 1))
        assert known[37:] == pytest.approx(reply.logprobs, abs=1e-5)


def test_deltas_are_for_weights_on_disk() -> None:
    cluster = {"weight_delta": "/dev/shm/swerl", "weight_sync": "distributed"}
    with pytest.raises(RecipeError, match="weight_delta is for weights on disk"):
        check(Recipe.model_validate({"name": "a", "cluster": cluster}))


def test_receivers_need_a_running_server_and_deltas() -> None:
    engine = {"type": "sglang", "receiver_port": 30100}
    with pytest.raises(RecipeError, match=r"needs engine\.url and cluster\.weight_delta"):
        check(Recipe.model_validate({"name": "a", "engine": engine}))
