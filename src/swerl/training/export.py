"""Export a run's checkpoint as a model folder that transformers and SGLang load.

Tensors are converted one by one, so any model needs a few times the memory of its largest tensor.
It needs neither a GPU nor Megatron-Core. The parallel layout of the run does not matter: a
checkpoint names its tensors by the whole model.
"""

# heavy imports: this file only runs in exports

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from swerl.core import plugins
from swerl.core.chat import Json
from swerl.core.contracts import MegatronMapping
from swerl.core.errors import InputError, RunError
from swerl.core.files import disk_errors, read_json, write_json, write_text
from swerl.recipe.schema import Recipe
from swerl.runs import history
from swerl.runs.layout import RunFolder
from swerl.training.checkpoint import folder as checkpoints
from swerl.training.checkpoint.files import CheckpointReader
from swerl.training.checkpoint.folder import CheckpointMeta, folder_of
from swerl.training.model_folder import SHARD_BYTES, LazyTensors, ShardWriter, copy_tokenizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Export types besides `auto`, which keeps the types in training."""
_OPTIMIZER = "optimizer."


@dataclass(frozen=True, slots=True)
class ExportOptions:
    step: int | None = None
    """None for the newest checkpoint."""
    best: bool = False
    """Export the step that was best in evaluation."""
    dtype: str = "auto"
    max_bytes: int = SHARD_BYTES
    """Largest file."""


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
    source = recipe.model.path or root / "initial_model"
    folder = folder_of(run.checkpoints, _step(run, options, source))
    meta = checkpoints.read_meta(folder)
    checkpoints.check_files(folder, meta)
    mapping = plugins.family(recipe.model.family, source, None).megatron()
    temporary = target.with_name(f".{target.name}.part")
    try:
        with disk_errors(target):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _check_space(temporary, meta, options)
            hf_config = read_json(source / "config.json")
            with ShardWriter(temporary, max_bytes=options.max_bytes) as writer:
                for name, tensor in _tensors(
                    CheckpointReader(folder), meta, mapping, hf_config, options.dtype
                ):
                    writer.add(name, tensor)
                with LazyTensors(source) as original:
                    for name in mapping.untrained(original, hf_config):
                        writer.add(name, original[name])
            exported = ExportedModel(
                target, meta.step, meta.num_params, writer.num_bytes, writer.checksum
            )
            _write_config(temporary, source, hf_config, options.dtype)
            write_text(temporary / "README.md", model_card(run, recipe, exported, source))
            _write_sums(temporary)
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
    return Recipe.model_validate(read_json(path))


def _step(run: RunFolder, options: ExportOptions, initial: Path) -> int:
    found = checkpoints.steps(run.checkpoints)
    there = f"steps with a checkpoint: {', '.join(map(str, found)) or 'none'}"
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
        step = found[-1] if found else 0
    if step not in found:
        raise InputError(f"{run.root} has no checkpoint of step {step}", hint=there)
    return step


def _check_space(folder: Path, meta: CheckpointMeta, options: ExportOptions) -> None:
    dtype = DTYPES.get(options.dtype) or getattr(torch, meta.dtype)
    needed, free = meta.num_params * dtype.itemsize, shutil.disk_usage(folder).free
    if free < needed:
        gib = 2**30
        raise RunError(
            f"the model needs {needed / gib:.2f} GiB, the disk has {free / gib:.2f} GiB left",
            hint="free some space, or pass a folder on another disk with -o",
        )


def _tensors(
    source: CheckpointReader,
    meta: CheckpointMeta,
    mapping: MegatronMapping,
    hf_config: dict[str, Json],
    dtype: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in source.shapes:
        if name.startswith(_OPTIMIZER):
            continue
        own = getattr(torch, meta.other_dtypes.get(name, meta.dtype))
        wanted = DTYPES.get(dtype, own)
        if name in meta.other_dtypes and dtype != "fp32":
            wanted = own  # such as decay rates, for which bf16 is too coarse
        tensor = source.tensor(name).to(wanted)
        yield from mapping.to_hf({name: tensor}, hf_config).items()


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


def _write_sums(folder: Path) -> None:
    """Write SHA256SUMS for `sha256sum -c`."""
    files = sorted(path for path in folder.iterdir())
    lines = [f"{checkpoints.mark(path).sha256}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def model_card(run: RunFolder, recipe: Recipe, exported: ExportedModel, source: Path) -> str:
    """Return the README.md: origin, settings, evaluations. Its form is the Hugging Face hub's."""
    return "\n".join(_lines(run, recipe, exported, source)) + "\n"


def _lines(run: RunFolder, recipe: Recipe, exported: ExportedModel, source: Path) -> Iterator[str]:
    name = f"{recipe.name}, step {exported.step}"
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation")
    yield from ("tags:", "- reinforcement-learning", "- swerl", "---", f"# {name}", "")
    yield f"`{source.name}`, trained as a coding agent by reinforcement learning with swerl."
    yield from ("", "| fact | value |", "|---|---|")
    yield f"| run | {recipe.name} |"
    yield f"| optimizer steps | {exported.step} of {recipe.steps} |"
    yield f"| parameters | {exported.num_params:,} |"
    yield f"| model family | {recipe.model.family} |"
    yield f"| algorithm | {recipe.algorithm.type} |"
    yield f"| harness | {', '.join(each.type for each in recipe.agents)} |"
    yield f"| tasks | {Path(recipe.tasks.source).name} |"
    yield f"| peak learning rate | {recipe.trainer.lr:g} |"
    yield f"| weights' checksum | `{exported.checksum}` |"
    yield f"| swerl | {version('swerl')} |"
    evals = history.read(run.events).evals if run.events.exists() else {}
    found = [(split, step, rate) for split, points in evals.items() for step, rate in points]
    past = [row for row in found if row[1] <= exported.step]
    if past:
        yield from ("", "| evaluation | after step | solve rate |", "|---|---|---|")
        yield from (f"| {split} | {step} | {rate:.3f} |" for split, step, rate in past)
    yield from ("", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    yield from ('model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")',)
    yield from ('tokenizer = AutoTokenizer.from_pretrained(".")', "```")
    yield from ("", "`sha256sum -c SHA256SUMS` checks the files.")
