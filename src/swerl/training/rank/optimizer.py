"""Megatron-Core's data-parallel wrapper, its distributed Adam, and the learning rate's schedule."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from swerl.training.options import TrainerOptions
from swerl.training.rank.host_adam import move_to_host
from swerl.training.rank.model import TokenModel


def wrap(model: TokenModel) -> DistributedDataParallel:
    """Wrap a model so that gradients gather in one fp32 buffer, shared out over the ranks."""
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
    """Build Adam with its state shared out over the ranks; norms are not decayed.

    In bf16 it holds an fp32 copy of the weights. An offloaded state lives in the host's memory.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.lr * options.lr_end,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        clip_grad=options.clip_grad,
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
    """Build the schedule. Its `step` also keeps weight decay off the norms."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.lr * options.lr_end,
        lr_warmup_steps=options.warmup_steps,
        lr_decay_steps=max(options.steps, options.warmup_steps + 1),
        lr_decay_style="linear",
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
