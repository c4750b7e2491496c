"""A checkpoint of any layout as a model folder: the published weights, to the last bit."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from swerl.core.errors import InputError, TrainerError
from swerl.core.files import write_json
from swerl.core.learning import Batch, WeightRef
from swerl.engines._weights import checksum
from swerl.recipe.schema import LoraSection, Recipe, TrainerSection
from swerl.runs.layout import Best, RunFolder, RunState
from swerl.training.adapter_folder import write_adapters
from swerl.training.checkpoint import folder as checkpoints
from swerl.training.export import ExportOptions, export
from swerl.training.options import TrainerOptions
from tests.unit.training.conftest import trainer_of

MakeBatch = Callable[..., Batch]
WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = None
from swerl.cli.main import app
app()
"""


@dataclass
class Run:
    """A run folder with one checkpoint, and what was published at that step."""

    root: Path
    published: WeightRef


def _folder(root: Path, model: Path, trainer: TrainerSection) -> Path:
    """Make the folder of a run that begins with this model; return the model's place in it."""
    (root / "checkpoints").mkdir(parents=True)
    shutil.copytree(model, root / "initial_model")
    recipe = Recipe(name="small", trainer=trainer)
    write_json(root / "recipe.resolved.json", recipe.model_dump(mode="json"))
    return root / "initial_model"


@pytest.fixture
async def run(
    tmp_path: Path, tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> Run:
    root = tmp_path / "small"
    model = _folder(root, tiny_model, TrainerSection())
    changes = {"checkpoint_dir": root / "checkpoints", "ranks": 2, "tensor_parallel": 2}
    async with trainer_of(model, options.model_copy(update=changes)) as trainer:
        await trainer.step(random_batch(0))
        published = await trainer.publish()
        await trainer.save(1)
        await trainer.saved()
    return Run(root, published)


async def test_an_export_is_the_published_model(run: Run, tmp_path: Path) -> None:
    _check_content(run, tmp_path / "model")
    _check_types_and_files(run, tmp_path)
    _check_bad_input(run, tmp_path)


def _check_content(run: Run, out: Path) -> None:
    """Export by the command, where Megatron-Core cannot be imported."""
    score = {"pass_at_1": {"mean": 0.5, "low": 0.2, "high": 0.8, "num_tasks": 8}}
    (run.root / "evals").mkdir()
    write_json(run.root / "evals" / "eval-heldout-00001.json", score)
    command = [sys.executable, "-c", WITHOUT_MEGATRON, "export", str(run.root), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert run.published.checksum in done.stdout
    assert checksum(out) == run.published.checksum
    ids = torch.arange(5, 30)[None]
    exported, published = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (out, run.published.path)
    )
    assert torch.equal(exported(ids).logits, published(ids).logits)
    assert AutoTokenizer.from_pretrained(out)("a")["input_ids"]
    card = (out / "README.md").read_text()
    assert "small, step 1" in card and run.published.checksum in card
    assert "heldout: 0.500 of 8 tasks solved, 95 % interval 0.200 to 0.800" in card
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert not list(out.parent.glob(".*.part"))


def _check_types_and_files(run: Run, tmp_path: Path) -> None:
    done = export(
        run.root, tmp_path / "half", ExportOptions(step=1, dtype="bf16", max_bytes=60_000)
    )
    files = sorted(done.folder.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    wanted = load_file(run.published.path / "model.safetensors")
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == wanted.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)
    assert sum(tensor.numel() for tensor in found.values()) == done.num_params
    config = json.loads((done.folder / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(done.folder, dtype="auto")
    assert loaded.dtype == torch.bfloat16


def _check_bad_input(run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="already there"):
        export(run.root, tmp_path / "model", ExportOptions())
    with pytest.raises(InputError, match="it has no adapters"):
        export(run.root, tmp_path / "new", ExportOptions(adapter=True))
    with pytest.raises(InputError, match="no checkpoint of step 7") as error:
        export(run.root, tmp_path / "new", ExportOptions(step=7))
    assert "1" in error.value.hint
    with pytest.raises(InputError, match="has been evaluated"):
        export(run.root, tmp_path / "new", ExportOptions(best=True))
    RunFolder(run.root).write_state(RunState(step=1, best=Best(0, "heldout", 0.5)))
    with pytest.raises(InputError, match="did better than the initial model"):
        export(run.root, tmp_path / "new", ExportOptions(best=True))
    RunFolder(run.root).write_state(RunState(step=1, best=Best(1, "heldout", 0.5)))
    assert export(run.root, tmp_path / "best", ExportOptions(best=True)).step == 1
    with pytest.raises(InputError, match="is no run folder"):
        export(tmp_path, tmp_path / "new", ExportOptions())
    shard = next((run.root / "checkpoints" / "00001").glob("__1_*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(TrainerError, match=f"content of its file {shard.name} has changed"):
        export(run.root, tmp_path / "new", ExportOptions())
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*.part"))


@pytest.mark.integration
async def test_a_lora_run_exports_its_adapters_and_the_model_with_them(
    tmp_path: Path, tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> None:
    root, lora = tmp_path / "small", LoraSection(rank=4)
    model = _folder(root, tiny_model, TrainerSection(lora=lora))
    changes = {"checkpoint_dir": root / "checkpoints", "lora": lora}
    async with trainer_of(model, options.model_copy(update=changes), kl_coef=0.05) as trainer:
        first = await trainer.step(random_batch(0))
        second = await trainer.step(random_batch(1))
        published = await trainer.publish()
        await trainer.save(2)
        await trainer.saved()
    # The reference is the model without its adapters, which differs from the second step on.
    assert first.extra["kl"] == 0 < second.extra["kl"]
    merged = export(root, tmp_path / "merged", ExportOptions())
    adapter = export(root, tmp_path / "adapter", ExportOptions(adapter=True))
    wanted = load_file(published.path / "model.safetensors")
    initial = load_file(tiny_model / "model.safetensors")
    found = load_file(merged.folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-7) for name in wanted)
    changed = {name for name in found if not torch.equal(found[name], initial[name])}
    assert changed == {name for name in found if name.endswith("_proj.weight")}
    in_state = checkpoints.read_meta(root / "checkpoints" / "00002").num_params
    assert in_state == adapter.num_params < merged.num_params / 4
    with pytest.raises(InputError, match="is already there"):
        export(root, adapter.folder, ExportOptions(adapter=True))
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    served = peft.PeftModel.from_pretrained(base, adapter.folder).eval()
    ids = torch.arange(5, 30)[None]
    whole = AutoModelForCausalLM.from_pretrained(merged.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(served(ids).logits, whole(ids).logits, atol=1e-5)


def test_an_adapter_names_its_model_by_the_id_of_the_hub(tmp_path: Path) -> None:
    tensors = {"base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": torch.ones(1, 2)}
    model = Path("/home/me/hub/models--Qwen--Qwen3-8B/snapshots/abc")
    write_adapters(tmp_path, tensors, LoraSection(rank=1), model=model)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("Qwen/Qwen3-8B", "abc")
