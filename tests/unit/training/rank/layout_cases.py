"""Random small models under random parallel layouts, with random rows to train."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts
from tests.unit.engines.families.lines import LINES

VOCAB = 320
PLAIN = ("llama", "mistral", "qwen2", "smollm2")
"""Lines that have no part that qwen3 and glm4 lack; test_families.py splits them."""
POLICIES: dict[str, dict[str, list[Any]]] = {
    "sft": {"context_weight": [0.0, 0.1]},
    "gspo": {"kl_coef": [0.0, 0.05], "clip_low": [3e-4, 0.1], "clip_high": [4e-4, 0.2]},
    "grpo": {"kl_coef": [0.0, 0.05], "entropy_coef": [0.0, 0.01]},
    "dapo": {"mismatch": ["none", "token-tis", "icepop"]},
    "dr-grpo": {"mismatch": ["none", "sequence-mis"]},
    "cispo": {"entropy_coef": [0.0, 0.01]},
    "reinforce-pp": {"kl_coef": [0.01], "kl_place": ["loss", "reward"]},
}
"""Algorithm -> values of its options that are drawn."""


@dataclass(frozen=True)
class Case:
    """A line of models with changes of its config, under a layout, trained by an algorithm."""

    seed: int
    ranks: int
    line: str
    changes: dict[str, Any]
    layout: dict[str, Any]
    algorithm: str
    algorithm_options: dict[str, Any]
    temperature: float
    replay: bool
    poisoned: str
    """What spoils one step in between: a loss that is not a number, gradients alone that overflow,
    or nothing."""
    rows: list[list[Sample]] = field(repr=False)
    """Of each step; experts, where wanted, and log-probabilities are still to be filled in."""
    tokens_per_micro_batch: int

    @property
    def name(self) -> str:
        """What the case is called among others."""
        layout = "-".join(f"{key}{value}" for key, value in self.layout.items())
        return f"{self.seed}-{self.line}-{self.algorithm}-{layout}".replace("_parallel", "")


def draw(seed: int, ranks: int, *, num_steps: int) -> Case:
    """Draw a case; the same for the same seed."""
    rng = Random(f"layout {seed} {ranks}")
    line = rng.choice([line for line in LINES if line not in PLAIN])
    experts = "moe" in line or "glm" in line
    layout = _layout(rng, ranks, experts)
    algorithm = rng.choice(list(POLICIES))
    options = {key: rng.choice(values) for key, values in POLICIES[algorithm].items()}
    context = layout["context_parallel"]
    rows = [_rows(rng, context) for _ in range(num_steps)]
    longest = max(len(row.ids) for step in rows for row in step)
    spoilers = ["", "nan"] if "mismatch" in options else ["", "nan", "overflow"]
    return Case(
        seed=seed,
        ranks=ranks,
        line=line,
        changes=_changes(rng, line, layout),
        layout=layout,
        algorithm=algorithm,
        algorithm_options=options,
        temperature=rng.choice([1.0, 0.7]),
        replay=experts and rng.random() < 0.5,
        poisoned="" if algorithm == "sft" else rng.choice(spoilers),
        rows=rows,
        # Padding adds at most two pieces a context rank, and at most a position a tensor rank.
        tokens_per_micro_batch=(rng.choice([1, 2, 4]) * longest) // context + 8,
    )


def _layout(rng: Random, ranks: int, experts: bool) -> dict[str, Any]:
    sizes = [size for size in (1, 2, 3, 4) if ranks % size == 0]
    while True:
        tensor, pipeline, context = (rng.choice(sizes) for _ in range(3))
        if tensor == 3 or ranks % (tensor * pipeline * context):
            continue
        expert = rng.choice(sizes) if experts else 1
        if expert == 3 or ranks % (expert * pipeline):
            continue
        return {
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "context_parallel": context,
            "expert_parallel": expert,
            "recompute": rng.random() < 0.4,
            "offload_optimizer": rng.random() < 0.3,
        }


def _changes(rng: Random, line: str, layout: dict[str, Any]) -> dict[str, Any]:
    tensor, stages = layout["tensor_parallel"], layout["pipeline_parallel"]
    layers = 4 if line.startswith("qwen3_5") else rng.choice([2, 3, 4])
    changes: dict[str, Any] = {
        "num_hidden_layers": -(-layers // stages) * stages,
        "num_key_value_heads": rng.choice([size for size in (1, 2, 4) if size >= tensor]),
        "tie_word_embeddings": line in ("qwen3", "qwen3_tied") and rng.random() < 0.5,
    }
    if line.startswith("qwen3_5"):
        keys = rng.choice([size for size in (1, 2, 4) if size % tensor == 0])
        changes |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * 2}
    if "moe" in line or "glm" in line:
        number = rng.choice([4, 8])
        key = "n_routed_experts" if "glm" in line else "num_experts"
        changes |= {key: number, "num_experts_per_tok": rng.choice([1, 2, 3])}
    return changes


def _rows(rng: Random, context: int) -> list[Sample]:
    """Draw rows of one to six Episodes, each of one to three rows that share its vote."""
    rows: list[Sample] = []
    for episode in range(rng.choice([1, 2, 4, 6])):
        own = [_row(rng, f"episode-{episode}", context) for _ in range(rng.choice([1, 1, 2, 3]))]
        total = sum(row.num_trained_tokens for row in own)
        rows += [replace(row, share=row.num_trained_tokens / total) for row in own]
    return rows


def _row(rng: Random, episode: str, context: int) -> Sample:
    length = rng.choice([2, 3, 2 * context, 2 * context + 1, rng.randint(4, 50), 66, 131])
    trained = rng.choice([{length - 1}, {1}, set(range(length // 2, length)), set()])
    trained = trained or {place for place in range(1, length) if rng.random() < 0.6} or {1}
    return Sample(
        episode=episode,
        task="task",
        ids=[rng.randrange(VOCAB) for _ in range(length)],
        mask=[int(place in trained) for place in range(length)],
        logprobs=[0.0] * length,
        weight_versions=("000000",) if rng.random() < 0.8 else (),
        advantage=rng.choice([0.0, 1.0, -1.0, rng.uniform(-2, 2)]),
    )


def with_holes(rng: Random, record: RoutedExperts) -> tuple[RoutedExperts, ...]:
    """Break a record of a row into pieces, with positions between them that have none."""
    size = record.bytes_per_id * record.num_layers * record.top_k
    places = sorted(rng.randrange(record.num_positions + 1) for _ in range(4))
    found = []
    for start, end in ((places[0], places[1]), (places[2], places[3])):
        if end > start:
            data = record.data[start * size : end * size]
            found.append(replace(record, start=start, data=data))
    return tuple(found)
