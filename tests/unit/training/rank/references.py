"""Training written out on transformers' models: SFT, AdamW, and experts recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of a model's trained parameters; only matrices decay."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def logp(model: torch.nn.Module, row: Sample) -> torch.Tensor:
    """Return the log-probability of each token but the first, with recorded experts if any."""
    ids = torch.tensor(list(row.ids))
    with replaying(model, row):
        logits = model(ids[None, :-1]).logits[0]
    return torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]


def sft_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of SFT with a context weight of 0.1."""
    losses = []
    for row in batch.samples:
        mask = torch.tensor(row.mask[1:], dtype=torch.float32)
        weight = mask + 0.1 * (1 - mask)
        nll = -(logp(model, row) * weight).sum() / weight.sum()
        losses.append(nll * row.share / batch.num_episodes)
    return torch.stack(losses).sum()


def take_step(optimizer: torch.optim.AdamW, loss: torch.Tensor, number: int) -> tuple[float, float]:
    """Take a step at the rate of a run with two steps of warm-up; return loss and gradient norm."""
    optimizer.zero_grad()
    loss.backward()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, (number + 1) / 2)
    optimizer.step()
    return loss.item(), norm.item()


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
