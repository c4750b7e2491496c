"""Export a run's checkpoint as a model folder that transformers and SGLang load.

A run with LoRA has adapters in its checkpoint: they are merged into the model's own weights, or
written as PEFT's folder. Tensors are converted one by one, so any model needs a few times the
memory of one file of 2 GB. It needs neither a GPU nor Megatron-Core. The parallel layout of the
run does not matter: a checkpoint names its tensors by the whole model.
"""

# heavy imports: this file only runs in exports

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from swerl import __version__
from swerl.core import plugins
from swerl.core.chat import Json
from swerl.core.contracts import MegatronMapping
from swerl.core.errors import InputError, RunError
from swerl.core.files import disk_errors, read_json, write_json, write_text
from swerl.engines._weights import shards
from swerl.recipe.hub import model_name
from swerl.recipe.load import recorded
from swerl.recipe.schema import Recipe
from swerl.recipe.sections import INITIAL_MODEL
from swerl.runs.layout import RunFolder
from swerl.training.adapter_folder import Factors, in_pairs, merge, to_peft, write_adapters
from swerl.training.checkpoint import folder as checkpoints
from swerl.training.checkpoint.files import CheckpointReader
from swerl.training.checkpoint.folder import CheckpointMeta, folder_of
from swerl.training.model_folder import SHARD_BYTES, LazyTensors, ShardWriter, copy_tokenizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Export types besides `auto`, which keeps the types in training."""
_OPTIMIZER = "optimizer."
_ALWAYS_FP32 = ("A_log", "expert_bias")
"""Ends of parameters for which bf16 is too coarse; training holds them in fp32, too."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    step: int | None = None
    """None for the newest checkpoint."""
    best: bool = False
    """Export the step that was best in evaluation."""
    dtype: str = "auto"
    max_bytes: int = SHARD_BYTES
    """Largest file."""
    adapter: bool = False
    """Write the adapters of a run with LoRA by themselves, as PEFT stores them."""


@dataclass(frozen=True, slots=True)
class ExportedModel:
    folder: Path
    step: int
    num_params: int
    num_bytes: int
    checksum: str
    """Checksum of the content, as engines and published weights state it."""


def export(root: Path, target: Path, options: ExportOptions) -> ExportedModel:
    """Write the model of a run's checkpoint into a new folder, which appears whole.

    Raises InputError if `root` is no run, the step has no checkpoint or `target` exists;
    TrainerError if the checkpoint is damaged; RunError on a full disk.
    """
    run = RunFolder(root)
    recipe = _recipe(root)
    if target.exists():
        raise InputError(
            f"{target} is already there", hint="pass another folder with -o, or remove this one"
        )
    if options.adapter and not recipe.trainer.lora.rank:
        raise InputError(
            f"{root} trained all weights, so it has no adapters",
            hint="leave --adapter out to write the whole model",
        )
    source = recipe.model.path or root / INITIAL_MODEL
    folder = folder_of(run.checkpoints, _step(run, options, source))
    meta = checkpoints.read_meta(folder)
    checkpoints.check_files(folder, meta)
    temporary = target.with_name(f".{target.name}.part")
    try:
        with disk_errors(target):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write = _Writer(recipe, source, CheckpointReader(folder), meta, options)
            num_params, num_bytes, checksum = write.into(temporary)
            exported = ExportedModel(target, meta.step, num_params, num_bytes, checksum)
            scores = _scores(root, meta.step)
            card = model_card(recipe, exported, source, scores, adapter=options.adapter)
            write_text(temporary / "README.md", card)
            # Write SHA256SUMS for `sha256sum -c`.
            files = sorted(path for path in temporary.iterdir())
            lines = [f"{checkpoints.mark(path).sha256}  {path.name}\n" for path in files]
            (temporary / "SHA256SUMS").write_text("".join(lines))
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return exported


def _recipe(root: Path) -> Recipe:
    path = root / "recipe.resolved.json"
    if not path.is_file():
        raise InputError(
            f"{root} is no run folder: it has no {path.name}",
            hint="pass a folder that `swerl train` made, such as runs/NAME",
        )
    return recorded(path)


def _step(run: RunFolder, options: ExportOptions, initial: Path) -> int:
    steps = checkpoints.steps(run.checkpoints)
    there = f"steps with a checkpoint: {', '.join(map(str, steps)) or 'none'}"
    if options.best:
        best = run.read_state().best
        if best is None:
            raise InputError(
                f"no step of {run.root} has been evaluated",
                hint=f"choose a step with --step; {there}",
            )
        if best.step == 0:
            raise InputError(
                f"no evaluated step of {run.root} did better than the initial model",
                hint=f"the initial model is {initial}; {there}",
            )
        step = best.step
    elif options.step is not None:
        step = options.step
    else:
        step = steps[-1] if steps else 0
    if step not in steps:
        raise InputError(f"{run.root} has no checkpoint of step {step}", hint=there)
    return step


@dataclass(frozen=True, slots=True)
class _Writer:
    """Write one checkpoint's model, or its adapters."""

    recipe: Recipe
    source: Path
    """Folder of the model before training."""
    checkpoint: CheckpointReader
    meta: CheckpointMeta
    options: ExportOptions

    def into(self, folder: Path) -> tuple[int, int, str]:
        """Fill a folder; return the numbers of parameters and bytes, and the checksum."""
        model = self.recipe.model
        mapping = plugins.family(model.family, self.source).megatron()
        hf_config = read_json(self.source / "config.json")
        lora = self.recipe.trainer.lora
        if self.options.adapter:
            pairs = self._adapters()
            tensors_of_peft = {
                n: t for pair in pairs for n, t in to_peft(pair, mapping, hf_config).items()
            }
            dtype = DTYPES.get(self.options.dtype, getattr(torch, self.meta.dtype))
            tensors = {name: tensor.to(dtype) for name, tensor in tensors_of_peft.items()}
            checksum = write_adapters(folder, tensors, lora, model=self.source)
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            return sum(tensor.numel() for tensor in tensors.values()), num_bytes, checksum
        self._check_space(folder)
        num_params = 0
        with (
            LazyTensors(self.source) as original,
            ShardWriter(folder, max_bytes=self.options.max_bytes) as writer,
        ):
            trained = (
                self._merged(original, mapping, hf_config)
                if lora.rank
                else (
                    piece
                    for name, tensor in self._trained()
                    for piece in mapping.to_hf({name: tensor}, hf_config).items()
                )
            )
            for name, tensor in trained:
                writer.add(name, tensor)
                num_params += tensor.numel()
            for name in mapping.untrained(original, hf_config):
                writer.add(name, original[name])
        _write_config(folder, self.source, hf_config, self.options.dtype)
        return num_params, writer.num_bytes, writer.checksum

    def _check_space(self, folder: Path) -> None:
        dtype = DTYPES.get(self.options.dtype) or getattr(torch, self.meta.dtype)
        needed, free = self.meta.num_params * dtype.itemsize, shutil.disk_usage(folder).free
        if self.recipe.trainer.lora.rank:  # the checkpoint has adapters only
            needed = sum(path.stat().st_size for path in shards(self.source))
        if free < needed:
            gib = 2**30
            raise RunError(
                f"the model needs {needed / gib:.2f} GiB, the disk has {free / gib:.2f} GiB left",
                hint="free some space, or pass a folder on another disk with -o",
            )

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's parameters by Megatron-Core's names."""
        for name in self.checkpoint.shapes:
            if name.startswith(_OPTIMIZER):
                continue
            dtype = getattr(torch, self.meta.other_dtypes.get(name, self.meta.dtype))
            yield name, self.checkpoint.tensor(name).to(self._type(name, dtype))

    def _adapters(self) -> Iterable[Factors]:
        names = [name for name in self.checkpoint.shapes if not name.startswith(_OPTIMIZER)]
        return in_pairs((name, self.checkpoint.tensor(name)) for name in sorted(names))

    def _merged(
        self, original: LazyTensors, mapping: MegatronMapping, hf_config: dict[str, Json]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the original weights by Hugging Face's names, with the adapters' changes added."""
        lora = self.recipe.trainer.lora
        adapters = {adapter.weight: adapter for adapter in self._adapters()}
        for name in mapping.names(hf_config):
            weight = mapping.to_megatron(name, original, hf_config)
            weight = weight.to(self._type(name, weight.dtype))
            if name in adapters:
                scale = lora.alpha / lora.rank
                yield from merge(adapters[name], weight, scale, mapping, hf_config).items()
            else:
                yield from mapping.to_hf({name: weight}, hf_config).items()

    def _type(self, name: str, trained: torch.dtype) -> torch.dtype:
        dtype = DTYPES.get(self.options.dtype, trained)
        return trained if name.endswith(_ALWAYS_FP32) and dtype is torch.bfloat16 else dtype


def _write_config(folder: Path, source: Path, hf_config: dict[str, Json], dtype: str) -> None:
    """Write config.json with the exported type, and the tokenizer."""
    if dtype in DTYPES:
        name = str(DTYPES[dtype]).removeprefix("torch.")
        for section in (hf_config, hf_config.get("text_config")):
            for key in ("torch_dtype", "dtype"):
                if isinstance(section, dict) and key in section:
                    section[key] = name
    write_json(folder / "config.json", hf_config)
    copy_tokenizer(source, folder)


def _scores(root: Path, step: int) -> str:
    """Return a line for each evaluation at this step, with its 95 % interval."""
    lines = []
    for path in sorted(root.glob(f"evals/eval-*-{step:05d}.json")):
        rate = read_json(path)["pass_at_1"]
        split = path.stem.removeprefix("eval-").rpartition("-")[0]
        interval = f"95 % interval {rate['low']:.3f} to {rate['high']:.3f}"
        lines.append(
            f"- {split}: {rate['mean']:.3f} of {rate['num_tasks']} tasks solved, {interval}\n"
        )
    return "".join(lines)


def model_card(
    recipe: Recipe, exported: ExportedModel, source: Path, scores: str, *, adapter: bool
) -> str:
    """Return the README.md with the model's origin. Its form is the Hugging Face hub's."""
    library, origin = "peft" if adapter else "transformers", model_name(source)
    base = f"base_model: {origin.partition('@')[0]}\n" if "/" in origin else ""
    return f"""---
library_name: {library}
pipeline_tag: text-generation
{base}tags:
- reinforcement-learning
- swerl
---
# {recipe.name}, step {exported.step}

`{origin}`, trained as a coding agent by reinforcement learning with swerl {__version__}:
algorithm {recipe.algorithm.type}, {exported.step} of {recipe.steps} steps on the tasks
`{Path(recipe.tasks.source).name}`, {exported.num_params:,} parameters. Checksum of the weights:
`{exported.checksum}`. `sha256sum -c SHA256SUMS` checks the files.

{scores}"""
