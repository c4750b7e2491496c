"""One rank's model, optimizer and schedule, and the optimizer step.

The loss of a micro-batch is a sum over its rows of weight times row loss, and the weights of a
whole batch sum to one. So gradients of micro-batches and of ranks are summed, never averaged.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from swerl.errors import NotFiniteError
from swerl.interfaces import Algorithm, Family
from swerl.learning import Batch, StepStats, Totals
from swerl.training import weights
from swerl.training.figures import compare, sum_over_ranks, to_stats
from swerl.training.flops import row_cost
from swerl.training.microbatch import MicroBatch, Row, rank_micro_batches, to_tensors
from swerl.training.model import TokenModel, build_model
from swerl.training.optimizer import build_optimizer, build_scheduler, wrap
from swerl.training.options import WorkerSettings
from swerl.training.shape import shape_from_config


class Learner:
    """What one rank trains. Every method must be called on all ranks together."""

    def __init__(self, settings: WorkerSettings, family: Family, algorithm: Algorithm) -> None:
        self.options = settings.options
        self.mapping = family.megatron()
        self.hf_config = weights.read_config(settings.model)
        self._cost = row_cost(shape_from_config(settings.model.name, self.hf_config))
        self._algorithm = algorithm
        self._device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self.model = self._build()
        weights.load(self.model, settings.model, self.mapping, self.hf_config)
        self._reference = self._frozen_copy() if algorithm.needs_reference else None
        self.parallel_model = wrap(self.model)
        self.optimizer = build_optimizer(self.parallel_model, self.options)
        self.scheduler = build_scheduler(self.optimizer, self.options)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken so far."""
        return int(self.scheduler.num_steps)

    def step(self, batch: Batch) -> StepStats:
        """Take one optimizer step.

        Raises NotFiniteError, the weights untouched, where loss or gradients are not finite.
        """
        clock = _Clock()
        micro_batches = self._micro_batches(batch)
        reference = [self._reference_logp(micro) for micro in micro_batches]
        clock.lap("reference_s")
        figures = self._gradients(micro_batches, reference, batch.totals)
        clock.lap("forward_backward_s")
        grad_norm = self._update(figures, batch.step)
        clock.lap("optimizer_s")
        return to_stats(figures, grad_norm, clock.laps, self.optimizer.param_groups[0]["lr"])

    def logprobs(self, batch: Batch) -> list[list[float]]:
        """Return the log-probability of every token of every row, 0 for the first, rank 0 only."""
        found: list[list[float]] = [[] for _ in batch.samples]
        with torch.no_grad():
            for rows in self._rows(batch, rank=0, num_ranks=1):
                micro = to_tensors(rows, all_tokens=True, device=self._device)
                grid_BT = micro.grid(self.model(micro.rows)).tolist()
                for row, logp_T, length in zip(rows, grid_BT, micro.rows.lengths, strict=True):
                    found[row.place] = [0.0, *logp_T[:length]]
        return found

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights as Hugging Face tensors."""
        return self.mapping.to_hf(weights.gather(self.model), self.hf_config)

    def _build(self) -> TokenModel:
        model = build_model(self.mapping, self.hf_config, self.options.temperature)
        model.to(self._device)
        return model

    def _frozen_copy(self) -> TokenModel:
        copy = self._build()
        copy.load_state_dict(self.model.state_dict())
        copy.requires_grad_(False)
        return copy

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        rank = parallel_state.get_data_parallel_rank()
        num_ranks = parallel_state.get_data_parallel_world_size()
        return [
            to_tensors(rows, all_tokens=self._algorithm.needs_context, device=self._device)
            for rows in self._rows(batch, rank=rank, num_ranks=num_ranks)
        ]

    def _rows(self, batch: Batch, *, rank: int, num_ranks: int) -> list[list[Row]]:
        context_ranks = parallel_state.get_context_parallel_world_size()
        budget = self.options.tokens_per_micro_batch * context_ranks
        return rank_micro_batches(
            batch, rank=rank, num_ranks=num_ranks, budget=budget, cost=self._cost
        )

    def _reference_logp(self, micro: MicroBatch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            logp_S: torch.Tensor = self._reference(micro.rows)
        return logp_S

    def _gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        reference: Sequence[torch.Tensor | None],
        totals: Totals,
    ) -> dict[str, float]:
        """Fill the gradient buffers; return figures of the whole batch, the same on all ranks."""
        self.parallel_model.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=partial(self._forward, totals),
            data_iterator=iter(zip(micro_batches, reference, strict=True)),
            model=[self.parallel_model],
            num_microbatches=len(micro_batches),
            seq_length=0,
            micro_batch_size=0,
            forward_only=False,
        )
        return sum_over_ranks(results)

    def _forward(
        self,
        totals: Totals,
        data: Iterator[tuple[MicroBatch, torch.Tensor | None]],
        model: torch.nn.Module,
    ) -> tuple[torch.Tensor, object]:
        """Run one micro-batch, in the form that Megatron's schedules call."""
        micro, ref_logp_S = next(data)

        def loss(logp_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
            inputs = micro.loss_inputs(logp_S, ref_logp_S, totals)
            result = self._algorithm.loss(inputs)
            figures = {"loss": float(result.loss.detach()), **result.stats}
            figures |= compare(inputs.logp_BT.detach(), micro)
            return result.loss, _NO_TOKENS, figures

        return model(micro.rows), loss

    def _update(self, figures: Mapping[str, float], step: int) -> float:
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not (math.isfinite(figures["loss"]) and math.isfinite(grad_norm)):
            message = f"step {step} has loss {figures['loss']} and gradient norm {grad_norm}"
            hint = "the weights are unchanged; lower trainer.lr or look at the step's samples"
            raise NotFiniteError(message, hint=hint)
        # Before the update, so that the first step already has a learning rate above zero.
        self.scheduler.step(1)
        self.optimizer.step()
        return grad_norm


_NO_TOKENS = torch.tensor(0, dtype=torch.int)
"""What Megatron would divide gradients by; ours need no divisor."""


class _Clock:
    """Wall time of the phases of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now
