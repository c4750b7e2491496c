"""Routing replay written out on transformers' models: experts recorded, and taken again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts


@contextmanager
def replaying(model: torch.nn.Module, row: Sample) -> Iterator[None]:
    """Let a model's experts be the recorded ones where the row has a record."""
    handles = []
    for place, block in enumerate(blocks(model) if row.routed else ()):
        chosen_NK = records(row)[:, place]

        def replace_choice(
            module: torch.nn.Module,
            arguments: tuple[torch.Tensor, ...],
            block: Any = block,
            chosen_NK: torch.Tensor = chosen_NK,
        ) -> tuple[torch.Tensor, ...]:
            hidden, own_NK, own_weights_NK = arguments
            logits_NE = hidden @ block.gate.weight.T
            taken_NK = chosen_NK.clamp(min=0)
            if hasattr(block.gate, "e_score_correction_bias"):
                weights_NK = logits_NE.sigmoid().gather(1, taken_NK)
                scale = block.routed_scaling_factor
            else:
                weights_NK, scale = logits_NE.softmax(-1).gather(1, taken_NK), 1.0
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True) * scale
            is_record = chosen_NK >= 0
            return (
                hidden,
                torch.where(is_record, chosen_NK, own_NK),
                torch.where(is_record, weights_NK, own_weights_NK),
            )

        handles.append(block.experts.register_forward_pre_hook(replace_choice))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def records(row: Sample) -> torch.Tensor:
    """Return a row's recorded experts, (positions, layers, K), -1 where there is no record."""
    first = row.routed[0]
    found = torch.full((len(row.ids) - 1, first.num_layers, first.top_k), -1)
    for piece in row.routed:
        ids = torch.frombuffer(bytearray(piece.data), dtype=torch.uint8).long()
        found[piece.start : piece.start + piece.num_positions] = ids.view(-1, *found.shape[1:])
    return found


def record_experts(model: torch.nn.Module, row: Sample, *, noise: float) -> RoutedExperts:
    """Return the experts that an engine chooses whose scores are off by some noise."""
    chosen: list[torch.Tensor] = []

    def choose(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        hidden, own_NK, _ = arguments
        gate = next(block.gate for block in blocks(model) if block.experts is module)
        scores_NE = hidden @ gate.weight.T
        own = torch.zeros_like(scores_NE).scatter(1, own_NK, 1e3 if not noise else 0.0)
        noisy = scores_NE + own + noise * torch.randn_like(scores_NE)
        chosen.append(noisy.topk(own_NK.shape[1], dim=-1).indices)

    handles = [block.experts.register_forward_pre_hook(choose) for block in blocks(model)]
    with torch.no_grad():
        model(torch.tensor(list(row.ids))[None, :-1])
    for handle in handles:
        handle.remove()
    ids_NLK = torch.stack(chosen, dim=1).to(torch.uint8)
    _, num_layers, top_k = ids_NLK.shape
    return RoutedExperts(0, num_layers, top_k, 1, ids_NLK.numpy().tobytes())


def blocks(model: torch.nn.Module) -> list[Any]:
    """Return the blocks of experts, by layer."""
    return [module for module in model.modules() if hasattr(module, "experts")]
