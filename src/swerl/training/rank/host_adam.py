"""Adam with its two moments in the host's memory, where it also takes the step.

Megatron-Core's own hybrid optimizer keeps second copies of the parameters under other names, which
checkpoints would have to know, and does not run where there is no GPU. This one only replaces the
optimizer inside Megatron's distributed optimizer: parameters, groups and state keep their names.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch.optim.adamw import adamw

_HOST = torch.device("cpu")


def move_to_host(optimizer: MegatronOptimizer) -> None:
    """Let every Adam inside Megatron's optimizer keep its state in the host's memory."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            part.optimizer = HostAdam(part.optimizer.param_groups)


class HostAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) that steps on the host.

    A parameter's value and gradient travel to the host and its new value back; the fp32 parameters
    themselves stay where they are, as Megatron copies them into the model from there.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        super().__init__([torch.zeros(0)], {})
        # Megatron's fp32 parameters are views, which torch's constructor refuses.
        self.param_groups = param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step; parameters without a gradient are left alone."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(param)
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
        param.detach().copy_(value)

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter's state on the host; a restored one may have come on the GPU."""
        state: dict[str, torch.Tensor] = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(param.shape, dtype=torch.float32)
        for name, value in state.items():
            state[name] = value.to(_HOST)
        return state
