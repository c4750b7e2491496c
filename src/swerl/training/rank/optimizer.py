"""Megatron-Core's data-parallel wrapper, its distributed Adam, and the learning rate schedule."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim.adamw import adamw

from swerl.training.options import TrainerOptions
from swerl.training.rank.model import TokenModel

_MAX_GRAD_NORM = 1.0
"""A larger gradient is scaled down to this norm."""
_HOST = torch.device("cpu")
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running means of the gradient and of its square."""


def wrap(model: TokenModel) -> DistributedDataParallel:
    """Wrap a model: gradients are summed in one fp32 buffer that the ranks share."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    model.config.finalize_model_grads_func = _finalize
    return wrapped


def _finalize(model: list[torch.nn.Module], num_tokens: object, **groups: object) -> None:
    """Reduce gradients over ranks without dividing them by a number of tokens."""
    finalize_model_grads(model, None, **groups)


def build_optimizer(model: DistributedDataParallel, options: TrainerOptions) -> MegatronOptimizer:
    """Build Adam with its state distributed over the ranks; norms are not decayed.

    In bf16 it holds an fp32 copy of the weights. An offloaded state is kept in host memory.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.lr * options.lr_end,
        weight_decay=options.weight_decay,
        adam_beta1=0.9,
        adam_beta2=options.adam_beta2,
        clip_grad=_MAX_GRAD_NORM,
        use_distributed_optimizer=True,
        bf16=options.dtype == "bf16",
        params_dtype=model.config.params_dtype,
    )
    optimizer = get_megatron_optimizer(config, [model])
    if options.offload_optimizer:
        move_to_host(optimizer)
    return optimizer


def build_scheduler(
    optimizer: MegatronOptimizer, options: TrainerOptions
) -> OptimizerParamScheduler:
    """Build the schedule. Its `step` also exempts the norms from weight decay."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.lr * options.lr_end,
        lr_warmup_steps=options.warmup_steps,
        # Megatron requires that the decay ends after the warm-up.
        lr_decay_steps=max(options.steps, options.warmup_steps + 1),
        lr_decay_style="linear",
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def move_to_host(optimizer: MegatronOptimizer) -> None:
    """Make every Adam inside Megatron's optimizer keep its state in host memory.

    Megatron-Core's hybrid optimizer is not used: it keeps second copies of the parameters under
    other names, which checkpoints would have to know, and it needs a GPU. This replaces only the
    optimizer inside Megatron's distributed one; parameters, groups and state keep their names.
    """
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            part.optimizer = HostAdam(part.optimizer.param_groups)


class HostAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) that steps on the host.

    A parameter's value and gradient are copied to the host and its new value back. The fp32
    parameters stay on the GPU, where Megatron copies them into the model.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        super().__init__([torch.zeros(0)], {})
        # torch's constructor refuses views, and Megatron's fp32 parameters are views.
        self.param_groups = param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step; parameters without a gradient stay unchanged."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = adam_state(self, param)
        value = param.detach().to(_HOST)
        adamw(
            [value],
            [param.grad.to(_HOST, torch.float32)],  # type: ignore[union-attr]
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        # The step changed a copy on the host; the parameter may be on the GPU.
        param.detach().copy_(value)


def adam_state(adam: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return Adam's state of a parameter where Adam keeps it; before the first step, zeros."""
    device, dtype = (_HOST, torch.float32) if isinstance(adam, HostAdam) else (None, None)
    state: dict[str, torch.Tensor] = adam.state[param]
    if not state:
        state["step"] = torch.tensor(0.0)
        state.update(
            {name: torch.zeros_like(param, device=device, dtype=dtype) for name in MOMENTS}
        )
    return state
