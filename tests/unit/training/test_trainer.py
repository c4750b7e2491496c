"""The trainer's ranks as real processes, against transformers and AdamW and against each other."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swerl.core import experts
from swerl.core.contracts import EngineSetup
from swerl.core.errors import PluginError, TrainerError
from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.core.turn import Completion, RoutedExperts, Sampling
from swerl.engines import torch_cpu
from swerl.engines._weights import checksum
from swerl.engines.families import tiny
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from tests.unit.training.conftest import trainer_of
from tests.unit.training.rank.references import adamw, logp, sft_loss, take_step

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")


MakeBatch = Callable[..., Batch]


def _trainer(model: Path, options: TrainerOptions, algorithm: str = "gspo") -> MegatronTrainer:
    weights = {"context_weight": 0.1} if algorithm == "sft" else {}
    return trainer_of(model, options, algorithm, **weights)


def _transformers(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _gap(folder: Path, reference: torch.nn.Module) -> float:
    """Return the largest difference of any weight."""
    wanted = reference.state_dict()
    return max(
        float((weight - wanted[name]).abs().max())
        for name, weight in load_file(folder / "model.safetensors").items()
    )


def _gspo_loss(model: torch.nn.Module, start: torch.nn.Module, batch: Batch) -> torch.Tensor:
    losses = []
    for row in batch.samples:
        mask = torch.tensor(row.mask[1:], dtype=torch.float32)
        own = logp(model, row)
        with torch.no_grad():
            ref = logp(start, row)
        ratio = (((own - torch.tensor(row.logprobs[1:])) * mask).sum() / mask.sum()).exp()
        gain = torch.minimum(ratio * row.advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * row.advantage)
        kl = (((ref - own).exp() - 1 - (ref - own)) * mask).sum() / mask.sum()
        losses.append((0.05 * kl - gain) * row.share / batch.num_episodes)
    return torch.stack(losses).sum()


async def test_sft_matches_transformers_and_adamw(
    tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> None:
    reference = _transformers(tiny_model)
    optimizer = adamw(reference)
    async with _trainer(tiny_model, options, "sft") as trainer:
        rows = await trainer.logprobs(random_batch(0))
        for row, sample in zip(rows, random_batch(0).samples, strict=True):
            expected = logp(reference, sample)[torch.tensor(sample.mask[1:]) > 0]
            assert float((torch.tensor(row) - expected.detach()).abs().max()) <= 1e-4
        for step in range(3):
            batch = random_batch(step, sampled=False)
            stats = await trainer.step(batch)
            loss, norm = take_step(optimizer, sft_loss(reference, batch), step)
            assert stats.loss == pytest.approx(loss, rel=1e-5)
            assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
            assert stats.num_tokens == sum(row.num_trained_tokens for row in batch.samples)
            assert stats.mismatch == 0.0
            if step == 0:
                for row, trained in zip(stats.logprobs, rows, strict=True):
                    assert list(row) == pytest.approx(list(trained), abs=1e-6)
        published = await trainer.publish()
    assert published.version == "000003"
    assert published.checksum == checksum(published.path)
    assert _gap(published.path, reference) <= 1e-5
    row = random_batch(9).samples[0]
    loaded = _transformers(published.path)
    assert float((logp(loaded, row) - logp(reference, row)).detach().abs().max()) <= 1e-4


@pytest.mark.integration
async def test_the_engines_tokens_have_the_trainers_log_probabilities(
    tiny_model: Path, options: TrainerOptions
) -> None:
    warm = options.model_copy(update={"temperature": 0.8})
    family = tiny.build(tiny_model)
    setup = EngineSetup(family=family, log_dir=options.log_dir, model=tiny_model)
    prompts = [tuple(range(10, 20 + 7 * number)) for number in range(6)]
    async with (
        _trainer(tiny_model, warm) as trainer,
        torch_cpu.open(torch_cpu.Options(), setup) as engine,
    ):
        for step in range(2):
            version = await engine.load(await trainer.publish())
            sampling = Sampling(30, temperature=0.8, stop_token_ids=family.stop_ids)
            replies = await asyncio.gather(
                *(engine.generate(prompt, sampling, str(prompt)) for prompt in prompts)
            )
            rows = [_row(*pair, version) for pair in zip(prompts, replies, strict=True)]
            stats = await trainer.step(Batch(step, tuple(rows), len(rows)))
            assert stats.mismatch <= 1e-5
            assert stats.extra["mismatch_max"] <= 1e-4
            assert stats.extra["ratio"] == pytest.approx(1.0, abs=1e-5)
            assert 0 < stats.extra["entropy"] < 6


def _row(prompt: tuple[int, ...], reply: Completion, version: str) -> Sample:
    num_prompt, num_reply = len(prompt), len(reply.ids)
    return Sample(
        episode=f"episode-{num_prompt}",
        task="task",
        ids=prompt + reply.ids,
        mask=(0,) * num_prompt + (1,) * num_reply,
        logprobs=(0.0,) * num_prompt + reply.logprobs,
        weight_versions=(version,),
        advantage=1.0 if num_prompt % 2 else -1.0,
    )


async def test_gspo_matches_transformers_and_resumes_bit_for_bit(
    tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> None:
    reference, start = _transformers(tiny_model), _transformers(tiny_model)
    optimizer = adamw(reference)
    async with _trainer(tiny_model, options) as trainer:
        for step in range(3):
            batch = random_batch(step)
            stats = await trainer.step(batch)
            loss, norm = take_step(optimizer, _gspo_loss(reference, start, batch), step)
            assert stats.loss == pytest.approx(loss, abs=1e-5)
            assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
            assert stats.mismatch > 0
        before = await trainer.publish()
        assert _gap(before.path, reference) <= 1e-5
        await trainer.save(3)
        unlearnable = replace(batch.samples[0], advantage=float("nan"))
        with pytest.raises(TrainerError, match="step 3 has loss") as error:
            await trainer.step(Batch(3, (unlearnable, *random_batch(3).samples[1:]), 6))
        assert "unchanged" in error.value.hint
        assert (await trainer.publish()).checksum == before.checksum
        await trainer.step(random_batch(3))
        straight = await trainer.publish()
    async with _trainer(tiny_model, options) as resumed:
        await resumed.restore(3)
        await resumed.step(random_batch(3))
        again = await resumed.publish()
    assert again.version == straight.version == "000004"
    assert again.checksum == straight.checksum


@pytest.mark.parametrize(
    "tensor_parallel",
    [
        pytest.param(1, id="data-parallel"),
        pytest.param(2, id="tensor-parallel", marks=pytest.mark.integration),
    ],
)
async def test_two_ranks_equal_one(
    tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch, tensor_parallel: int
) -> None:
    two = options.model_copy(update={"ranks": 2, "tensor_parallel": tensor_parallel})
    reference, start = _transformers(tiny_model), _transformers(tiny_model)
    optimizer = adamw(reference)
    async with _trainer(tiny_model, two) as trainer:
        for step in range(3):
            # The last batch has fewer rows than there are ranks.
            batch = random_batch(step) if step < 2 else _single_row(random_batch(step))
            stats = await trainer.step(batch)
            loss, _ = take_step(optimizer, _gspo_loss(reference, start, batch), step)
            assert stats.loss == pytest.approx(loss, abs=1e-5)
            assert stats.num_tokens == sum(row.num_trained_tokens for row in batch.samples)
        published = await trainer.publish()
        await trainer.save(3)
    assert _gap(published.path, reference) <= 1e-5
    async with _trainer(tiny_model, options) as single:
        await single.restore(3)
        assert (await single.publish()).checksum == published.checksum


@pytest.mark.integration
async def test_a_damaged_record_of_one_rank_is_an_error_and_the_trainer_continues(
    tmp_path: Path, tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> None:
    two = options.model_copy(update={"ranks": 2, "routing_replay": True})
    path = tmp_path / "experts.bin"
    [stored] = experts.store(path, [RoutedExperts(0, 1, 1, 1, b"abc")])
    batch = random_batch(0)
    rows = (replace(batch.samples[0], routed=(stored,)), *batch.samples[1:])
    async with _trainer(tiny_model, two, "sft") as trainer:
        path.write_bytes(b"abd")
        with pytest.raises(TrainerError, match="the checksum of the 3 bytes at 0 differs"):
            await trainer.step(replace(batch, samples=rows))
        stats = await trainer.step(batch)
    assert stats.num_tokens == sum(row.num_trained_tokens for row in rows)


def _single_row(batch: Batch) -> Batch:
    return Batch(batch.step, (replace(batch.samples[2], share=1.0),), 1)


async def test_a_rank_that_dies_mid_step_is_a_trainer_error(
    tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> None:
    async with _trainer(tiny_model, options) as trainer:
        step = asyncio.create_task(trainer.step(random_batch(0, num_rows=300)))
        await asyncio.sleep(0.1)
        os.kill(trainer.pids[0], signal.SIGKILL)
        with pytest.raises(TrainerError, match="a rank of the trainer died") as error:
            await step
        assert "trainer-rank0.log" in error.value.hint
        with pytest.raises(TrainerError):
            await trainer.publish()


OWN_LOSS = """\
from pydantic import BaseModel
from swerl.training.algorithms import sft
class Options(BaseModel):
    pass
class Mine(sft.Sft):
    def loss(self, inputs):
        return inputs.logp_bt.sum()
def build(options):
    return Mine(sft.Options())
"""


@pytest.mark.integration
async def test_an_error_in_a_users_loss_is_named_and_the_ranks_live_on(
    tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    async with _trainer(tiny_model, options, f"{tmp_path}/mine.py") as trainer:
        with pytest.raises(PluginError, match=rf"^ALGORITHM FAILED {tmp_path}/mine\.py:7: Attr"):
            await trainer.step(random_batch(0))
        assert trainer.pids


async def test_disk_trouble_is_reported_and_costs_no_weights(
    tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> None:
    async with _trainer(tiny_model, options) as trainer:
        await trainer.step(random_batch(0))
        before = await trainer.publish()
        unlimited = resource.prlimit(trainer.pids[0], resource.RLIMIT_FSIZE, (4096, -1))
        with pytest.raises(TrainerError, match="cannot write"):
            await trainer.publish()
        with pytest.raises(TrainerError, match="cannot write"):
            await trainer.save(1)
            await trainer.saved()
        resource.prlimit(trainer.pids[0], resource.RLIMIT_FSIZE, unlimited)
        assert checksum(before.path) == before.checksum
        assert not list(options.checkpoint_dir.glob("0*"))
        await trainer.save(1)
        await trainer.saved()
        assert (await trainer.publish()).checksum == before.checksum
        (shard,) = options.checkpoint_dir.glob("00001/*.distcp")
        shard.write_bytes(shard.read_bytes()[:5000])
        with pytest.raises(TrainerError, match="distcp has 5,000 bytes of"):
            await trainer.restore(1)
        with pytest.raises(TrainerError, match=r"no checkpoint.*there: 1"):
            await trainer.restore(7)


@pytest.mark.integration
async def test_a_model_that_does_not_fit_is_an_error_at_start(
    tiny_model: Path, options: TrainerOptions
) -> None:
    three = options.model_copy(update={"ranks": 3, "tensor_parallel": 3})
    trainer = _trainer(tiny_model, three)
    with pytest.raises(TrainerError, match=r"attention heads.*tensor_parallel"):
        await trainer.start()
    assert not trainer.pids


ORPHAN_SCRIPT = """
import asyncio, sys
from pathlib import Path
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer

async def main() -> None:
    options = TrainerOptions.model_validate_json(sys.argv[2])
    trainer = MegatronTrainer(
        model=Path(sys.argv[1]), family="tiny", algorithm="sft", options=options
    )
    await trainer.start()
    print(*trainer.pids, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.integration
async def test_no_rank_outlives_a_killed_controller(
    tiny_model: Path, options: TrainerOptions
) -> None:
    controller = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        ORPHAN_SCRIPT,
        str(tiny_model),
        options.model_copy(update={"ranks": 2}).model_dump_json(),
        stdout=asyncio.subprocess.PIPE,
    )
    assert controller.stdout
    pids = [int(pid) for pid in (await controller.stdout.readline()).split()]
    assert len(pids) == 2
    controller.kill()
    await controller.wait()
    async with asyncio.timeout(5):
        # Another process's children cannot be waited for, only looked at.
        while any(_is_alive(pid) for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
