"""One rank's model, optimizer and schedule, and the optimizer step.

The loss of a micro-batch is a sum over its rows of weight times row loss, and the weights of a
whole batch sum to one. So gradients of micro-batches and of ranks are summed, never averaged.

Megatron-Core's schedule runs the micro-batches, with or without pipeline stages. Only the last
stage has log-probabilities and the loss; one of the ranks with the same rows reports the figures.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from swerl.core import plugins
from swerl.core.contracts import Algorithm, Family
from swerl.core.errors import NotFiniteError, SwerlError, TrainerError
from swerl.core.learning import Batch, StepStats, Totals
from swerl.plan.parameters import row_cost
from swerl.plan.shape import shape_from_config
from swerl.training.adapter_folder import LORA
from swerl.training.model_folder import read_config
from swerl.training.options import WorkerSettings
from swerl.training.rank import lora, weights
from swerl.training.rank.context import RowShare
from swerl.training.rank.microbatch import (
    MicroBatch,
    WeightedSample,
    rank_micro_batches,
    to_tensors,
)
from swerl.training.rank.model import TokenModel, build_model
from swerl.training.rank.optimizer import build_optimizer, build_scheduler, wrap
from swerl.training.rank.sleep import RankMemory
from swerl.training.rank.step_stats import (
    PhaseTimer,
    compare,
    gather_lists,
    gather_logprobs,
    peak_memory,
    sum_over_ranks,
    to_stats,
)

Figures = Mapping[str, float]
MicroLoss = Callable[[MicroBatch, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, Figures]]
"""(micro-batch, its log-probabilities, the reference's) -> loss, figures."""
_NO_TOKENS = torch.tensor(0, dtype=torch.int)
"""Megatron's divisor of gradients; the rows' weights already hold it."""


class Learner:
    """One rank's trainer. Call every method on all ranks together."""

    def __init__(self, settings: WorkerSettings, family: Family, algorithm: Algorithm) -> None:
        self.options = settings.options
        self.mapping = family.megatron()
        self.hf_config = read_config(settings.model)
        shape = shape_from_config(settings.model.name, self.hf_config)
        self._cost = row_cost(shape, self.options.lora)
        self._algorithm = algorithm
        self._device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self._share = own_share()
        # Figures and errors travel over the host, apart from the GPUs' own collectives.
        self._everyone = torch.distributed.new_group(backend="gloo")
        self.model = self._build()
        weights.load(self.model, settings.model, self.mapping, self.hf_config)
        self.adapters: lora.Adapters = {}
        if self.options.lora.rank:
            self.adapters = lora.attach(self.model, self.options, self.mapping, self.hf_config)
        # The reference keeps the initial weights, also if a checkpoint is restored later. With
        # adapters it is the model without them.
        copies = algorithm.needs_reference and not self.adapters
        self._reference = self._frozen_copy() if copies else None
        self.parallel_model = wrap(self.model)
        self.optimizer = build_optimizer(self.parallel_model, self.options)
        self.scheduler = build_scheduler(self.optimizer, self.options)
        self.memory = RankMemory(self._device, self._kept, self._gradient_buffers)

    @property
    def num_steps(self) -> int:
        return int(self.scheduler.num_steps)

    def step(self, batch: Batch) -> StepStats:
        """Take one optimizer step; only rank 0 returns log-probabilities of tokens.

        Raises NotFiniteError, with the weights unchanged, if loss or gradients are not finite.
        """
        timer = PhaseTimer()
        packed = self._rows(batch)
        micro_batches = self._tensors(packed, all_tokens=self._algorithm.needs_context)
        reference = self._reference_logp(micro_batches)
        timer.lap("reference")
        figures, trained = self._gradients(micro_batches, reference, batch.totals)
        timer.lap("forward_backward")
        grad_norm = self._update(figures, batch.step)
        timer.lap("optimizer")
        logprobs = gather_logprobs(packed, trained, self._everyone)
        peaks = peak_memory(timer.peak_bytes, self._everyone)
        lr = self.optimizer.param_groups[0]["lr"]
        return to_stats({**figures, **peaks}, grad_norm, timer.laps, lr, logprobs=logprobs)

    def logprobs(self, batch: Batch) -> Sequence[Sequence[float]]:
        """Return the log-probabilities of each Sample's trained tokens, on rank 0."""
        packed = self._rows(batch)
        micro_batches = self._tensors(packed, all_tokens=False)
        outputs = zip(micro_batches, log_probs(self.model, micro_batches), strict=True)
        trained = [
            micro.trained(micro.grid(logp_S))
            for micro, logp_S in outputs
            if logp_S is not None and reports_figures()
        ]
        return gather_logprobs(packed, trained, self._everyone)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights as Hugging Face tensors on all ranks; all must exhaust it.

        Adapters are merged into them.
        """
        params = self.params(adapters=False)
        read = lora.merged(self.adapters, self.memory.on_device)
        for name, tensor in weights.tensors(params, read):
            yield from self.mapping.to_hf({name: tensor}, self.hf_config).items()

    def params(self, *, adapters: bool) -> dict[str, torch.nn.Parameter]:
        """Return this rank's adapters, or its other parameters, by name in the whole model."""
        parameters = self.model.named_parameters()
        by_name = {weights.global_name(self.model, name): param for name, param in parameters}
        return {name: each for name, each in by_name.items() if (LORA in name) == adapters}

    def sleep(self) -> None:
        """Give the GPU's memory to the engine until `wake`; gradients are dropped."""
        self.optimizer.zero_grad()
        self.memory.sleep()

    def wake(self) -> None:
        """Take the GPU's memory back."""
        self.memory.wake()

    def _kept(self) -> Iterator[torch.Tensor]:
        """Yield weights, master copy, Adam's state, and the reference; views come several times."""
        for model in filter(None, (self.model, self._reference)):
            yield from model.parameters()
            yield from model.buffers()
        for part in self.optimizer.chained_optimizers:
            if part.optimizer is None:
                continue
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (tensor for tensor in state.values() if isinstance(tensor, torch.Tensor))

    def _gradient_buffers(self) -> Iterator[torch.Tensor]:
        wrapped = self.parallel_model
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            yield buffer.grad_data

    def _build(self) -> TokenModel:
        model = build_model(self.mapping, self.hf_config, self.options)
        model.to(self._device)
        return model

    def _frozen_copy(self) -> TokenModel:
        copy = self._build()
        copy.load_state_dict(self.model.state_dict())
        copy.requires_grad_(False)
        copy.eval()
        return copy

    def _rows(self, batch: Batch) -> list[list[WeightedSample]]:
        return rank_micro_batches(
            batch,
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
            budget=self.options.tokens_per_micro_batch * self._share.context_ranks,
            cost=self._cost,
            share=self._share,
            forest=self.options.shared_prefixes,
            replay=self.options.routing_replay,
        )

    def _tensors(
        self, packed: Sequence[Sequence[WeightedSample]], *, all_tokens: bool
    ) -> list[MicroBatch]:
        """Make tensors of a rank's rows. Raises one rank's error on all ranks."""
        make = partial(
            to_tensors,
            all_tokens=all_tokens,
            device=self._device,
            share=self._share,
            replay=self.options.routing_replay,
        )
        micro_batches: list[MicroBatch] = []
        errors: list[tuple[str, str]] = []
        try:
            micro_batches += [make(rows) for rows in packed]
        except SwerlError as error:
            errors.append((str(error), error.hint))
        # A rank that raised alone would leave the others in the next collective.
        for message, hint in gather_lists(errors, self._everyone):
            raise TrainerError(message, hint=hint)
        return micro_batches

    def _reference_logp(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        if self.adapters and self._algorithm.needs_reference:
            with lora.off(self.adapters):
                return log_probs(self.model, micro_batches)
        if self._reference is None:
            return [None] * len(micro_batches)
        return log_probs(self._reference, micro_batches)

    def _gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        reference: Sequence[torch.Tensor | None],
        totals: Totals,
    ) -> tuple[dict[str, float], list[list[torch.Tensor]]]:
        """Fill the gradient buffers; return sums over the whole batch, the same on all ranks.

        On a reporting rank, also returns the log-probabilities of each row's trained tokens before
        the first update.
        """
        trained: list[list[torch.Tensor]] = []

        def loss(
            micro: MicroBatch, logp_S: torch.Tensor, ref_logp_S: torch.Tensor | None
        ) -> tuple[torch.Tensor, Figures]:
            inputs = micro.loss_inputs(logp_S, ref_logp_S, totals)
            with plugins.blaming("algorithms", self._algorithm):
                result = self._algorithm.loss(inputs)
            figures = {"loss": float(result.loss.detach()), **result.stats}
            figures |= micro.rows.executed()
            base_logp_BT = inputs.logp_BT.detach()
            if inputs.base_logp_BT is not None:
                base_logp_BT = inputs.base_logp_BT
            if reports_figures():
                trained.append(micro.trained(base_logp_BT))
            return result.loss, figures | compare(base_logp_BT, micro)

        self.parallel_model.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = gradients(self.parallel_model, micro_batches, reference, loss)
        return sum_over_ranks(results, self._everyone), trained

    def _update(self, figures: Mapping[str, float], step: int) -> float:
        # The norm is computed before the step, so that a bad step changes no weight.
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not (math.isfinite(figures["loss"]) and math.isfinite(grad_norm)):
            message = f"step {step} has loss {figures['loss']} and gradient norm {grad_norm}"
            hint = "the weights are unchanged; lower trainer.lr or look at the step's samples"
            raise NotFiniteError(message, hint=hint)
        # The scheduler goes first, so that the first step has a learning rate above zero.
        self.scheduler.step(1)
        self.optimizer.step()
        return grad_norm


def own_share() -> RowShare:
    return RowShare(
        context_ranks=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        tensor_ranks=parallel_state.get_tensor_model_parallel_world_size(),
    )


def reports_figures() -> bool:
    """Return whether this rank reports: one of the ranks with the same rows, on the last stage."""
    shares = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    return shares == (0, 0) and bool(parallel_state.is_pipeline_last_stage())


def log_probs(
    model: torch.nn.Module, micro_batches: Sequence[MicroBatch]
) -> list[torch.Tensor | None]:
    """Return `logp_S` of each micro-batch without a gradient; None on earlier stages."""
    with torch.no_grad():
        outputs: list[torch.Tensor] = _run(model, micro_batches, _without_loss, forward_only=True)
    # Earlier pipeline stages have no output.
    return list(outputs) or [None] * len(micro_batches)


def gradients(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    reference: Sequence[torch.Tensor | None],
    loss: MicroLoss,
) -> list[Figures]:
    """Sum gradients over micro-batches and ranks; return the figures, on the reporting rank."""
    inputs = list(zip(micro_batches, reference, strict=True))
    figures: list[Figures] = _run(model, inputs, partial(_with_loss, loss), forward_only=False)
    return figures if reports_figures() else []


def _run(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    forward_step: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(inputs),
        model=[model],
        num_microbatches=len(inputs),
        seq_length=0,  # stages send shapes along: micro-batches differ in length
        micro_batch_size=0,
        forward_only=forward_only,
    )
    return results


def _without_loss(
    inputs: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[torch.Tensor, None]:
    return model(next(inputs).rows), None


def _with_loss(
    loss: MicroLoss,
    inputs: Iterator[tuple[MicroBatch, torch.Tensor | None]],
    model: torch.nn.Module,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Figures]]]:
    micro, ref_logp_S = next(inputs)

    def of_output(logp_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Figures]:
        value, figures = loss(micro, logp_S, ref_logp_S)
        return value, _NO_TOKENS, figures

    return model(micro.rows), of_output
