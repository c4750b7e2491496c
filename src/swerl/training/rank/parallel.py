"""Which ranks work together: Megatron-Core's groups of a layout."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel

from swerl.training.options import TrainerOptions


def form_groups(options: TrainerOptions) -> None:
    """Form the groups of all ranks, which have met before, and seed their random states."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=options.expert_tensor_parallel,
        create_gloo_process_groups=True,
    )
    torch.manual_seed(options.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
