"""The model card of an exported model: what it is, what it was made of, how it did."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from swerl.recipe.schema import Recipe
from swerl.runs import history
from swerl.runs.layout import RunFolder


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
