"""A run's checkpoint as a model folder that transformers and SGLang load.

Tensors pass through one by one, so a model of any size needs the memory of its largest tensor a
few times over. Neither a GPU nor Megatron-Core is needed, and the layout of the run does not
matter: a checkpoint names its tensors by the whole model.
"""

# heavy imports: this file only runs in exports

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch

from swerl.core import plugins
from swerl.core.chat import Json
from swerl.core.contracts import MegatronMapping
from swerl.core.errors import InputError, RunError
from swerl.core.files import disk_errors, read_json, write_json, write_text
from swerl.recipe.schema import Recipe
from swerl.runs import history
from swerl.runs.layout import RunFolder
from swerl.training.checkpoint import folder as checkpoint_meta
from swerl.training.checkpoint.files import Source
from swerl.training.checkpoint.folder import CheckpointMeta, folder_of
from swerl.training.model_folder import SHARD_BYTES, LazyTensors, ShardWriter, copy_tokenizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Types to export in, besides `auto`: those that the weights had in training."""
_OPTIMIZER = "optimizer."


@dataclass(frozen=True, slots=True)
class Wish:
    """What to export, and how."""

    step: int | None = None
    """None for the newest checkpoint."""
    best: bool = False
    """Whether to take the step that did best in evaluation."""
    dtype: str = "auto"
    max_bytes: int = SHARD_BYTES
    """Largest file."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A model folder that was written."""

    folder: Path
    step: int
    num_params: int
    num_bytes: int
    checksum: str
    """What engines and published weights of the same content are named by."""


def export(root: Path, target: Path, wish: Wish) -> Exported:
    """Write the model of a run's checkpoint into a new folder, which appears at once.

    Raises InputError where `root` is no run, the step has no checkpoint or `target` is there;
    TrainerError where the checkpoint is damaged; RunError on a full disk.
    """
    run = RunFolder(root)
    recipe = _recipe(root)
    if target.exists():
        raise InputError(
            f"{target} is already there", hint="name another folder with -o, or remove this one"
        )
    source = recipe.model.path or root / "initial_model"
    folder = folder_of(run.checkpoints, _step(run, wish, source))
    meta = checkpoint_meta.read_meta(folder)
    checkpoint_meta.check_files(folder, meta)
    mapping = plugins.family(recipe.model.family, source, None).megatron()
    temporary = target.with_name(f".{target.name}.part")
    try:
        with disk_errors(target):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _check_space(temporary, meta, wish)
            hf_config = read_json(source / "config.json")
            with ShardWriter(temporary, max_bytes=wish.max_bytes) as writer:
                for name, tensor in _tensors(Source(folder), meta, mapping, hf_config, wish.dtype):
                    writer.add(name, tensor)
                with LazyTensors(source) as original:
                    for name in mapping.untrained(original, hf_config):
                        writer.add(name, original[name])
            exported = Exported(
                target, meta.step, meta.num_params, writer.num_bytes, writer.checksum
            )
            _write_beside(temporary, source, hf_config, wish.dtype)
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
            hint="name a folder that `swerl train` made, such as runs/NAME",
        )
    return Recipe.model_validate(read_json(path))


def _step(run: RunFolder, wish: Wish, initial: Path) -> int:
    found = checkpoint_meta.steps(run.checkpoints)
    there = f"steps with a checkpoint: {', '.join(map(str, found)) or 'none'}"
    if wish.best:
        best = run.read_state().best
        if best is None:
            raise InputError(
                f"no step of {run.root} has been evaluated",
                hint=f"name a step with --step; {there}",
            )
        if best.step == 0:
            raise InputError(
                f"no evaluated step of {run.root} did better than the model it began with",
                hint=f"that one is in {initial}; {there}",
            )
        step = best.step
    elif wish.step is not None:
        step = wish.step
    else:
        step = found[-1] if found else 0
    if step not in found:
        raise InputError(f"{run.root} has no checkpoint of step {step}", hint=there)
    return step


def _check_space(folder: Path, meta: CheckpointMeta, wish: Wish) -> None:
    dtype = DTYPES.get(wish.dtype) or getattr(torch, meta.dtype)
    needed, free = meta.num_params * dtype.itemsize, shutil.disk_usage(folder).free
    if free < needed:
        gib = 2**30
        raise RunError(
            f"the model needs {needed / gib:.2f} GiB, the disk has {free / gib:.2f} GiB left",
            hint="free some space, or name a folder on another disk with -o",
        )


def _tensors(
    source: Source,
    meta: CheckpointMeta,
    mapping: MegatronMapping,
    hf_config: dict[str, Json],
    dtype: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the Hugging Face tensors of a checkpoint."""
    for name in source.shapes:
        if name.startswith(_OPTIMIZER):
            continue
        own = getattr(torch, meta.other_dtypes.get(name, meta.dtype))
        wanted = DTYPES.get(dtype, own)
        if name in meta.other_dtypes and dtype != "fp32":
            wanted = own  # such as decay rates, which lose their meaning in bf16
        tensor = source.tensor(name).to(wanted)
        yield from mapping.to_hf({name: tensor}, hf_config).items()


def _write_beside(folder: Path, source: Path, hf_config: dict[str, Json], dtype: str) -> None:
    """Write what belongs to a model besides its weights."""
    if dtype in DTYPES:
        name = str(DTYPES[dtype]).removeprefix("torch.")
        for section in (hf_config, hf_config.get("text_config")):
            for key in ("torch_dtype", "dtype"):
                if isinstance(section, dict) and key in section:
                    section[key] = name
    write_json(folder / "config.json", hf_config)
    copy_tokenizer(source, folder)


def _write_sums(folder: Path) -> None:
    """Write SHA256SUMS, which `sha256sum -c` reads."""
    files = sorted(path for path in folder.iterdir())
    lines = [f"{checkpoint_meta.mark(path).sha256}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


class Facts(Protocol):
    """What a card says of the weights."""

    @property
    def step(self) -> int:
        """Optimizer steps taken."""

    @property
    def num_params(self) -> int:
        """Parameters."""

    @property
    def checksum(self) -> str:
        """Name of the weights' content."""


def model_card(run: RunFolder, recipe: Recipe, facts: Facts, source: Path) -> str:
    """Return a README.md in the Hugging Face hub's form."""
    return "\n".join(_lines(run, recipe, facts, source)) + "\n"


def _lines(run: RunFolder, recipe: Recipe, facts: Facts, source: Path) -> Iterator[str]:
    name = f"{recipe.name}, step {facts.step}"
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation")
    yield from ("tags:", "- reinforcement-learning", "- swerl", "---", f"# {name}", "")
    yield f"`{source.name}`, trained as a coding agent by reinforcement learning with swerl."
    yield from ("", "| fact | value |", "|---|---|")
    yield f"| run | {recipe.name} |"
    yield f"| optimizer steps | {facts.step} of {recipe.steps} |"
    yield f"| parameters | {facts.num_params:,} |"
    yield f"| model family | {recipe.model.family} |"
    yield f"| algorithm | {recipe.algorithm.type} |"
    yield f"| harness | {recipe.harness.type} |"
    yield f"| tasks | {Path(recipe.tasks.source).name} |"
    yield f"| peak learning rate | {recipe.trainer.lr:g} |"
    yield f"| weights' checksum | `{facts.checksum}` |"
    yield f"| swerl | {version('swerl')} |"
    evals = history.read(run.events).evals if run.events.exists() else {}
    found = [(split, step, rate) for split, points in evals.items() for step, rate in points]
    past = [row for row in found if row[1] <= facts.step]
    if past:
        yield from ("", "| evaluation | after step | solve rate |", "|---|---|---|")
        yield from (f"| {split} | {step} | {rate:.3f} |" for split, step, rate in past)
    yield from ("", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    yield from ('model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")',)
    yield from ('tokenizer = AutoTokenizer.from_pretrained(".")', "```")
    yield from ("", "`sha256sum -c SHA256SUMS` checks the files.")
