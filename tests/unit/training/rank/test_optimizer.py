"""Adam's state is built where Adam keeps it."""

from __future__ import annotations

import pytest
import torch

from swerl.training.rank import megatron_cpu

megatron_cpu.install()

from swerl.training.rank.optimizer import MOMENTS, HostAdam, adam_state  # noqa: E402


@pytest.mark.parametrize("offloaded", [True, False])
def test_a_restore_builds_offloaded_moments_in_host_memory(offloaded: bool) -> None:
    """`meta` stands for the GPU: the master copy is there, and a restore asks for its state."""
    master = torch.zeros(3, 2, device="meta")
    groups = [{"params": [master]}]
    adam = HostAdam(groups) if offloaded else torch.optim.AdamW(groups)
    state = adam_state(adam, master)
    devices = {state[name].device.type for name in MOMENTS}
    assert devices == ({"cpu"} if offloaded else {"meta"})
    assert all(state[name].shape == master.shape for name in MOMENTS)
    assert adam_state(adam, master) is state
