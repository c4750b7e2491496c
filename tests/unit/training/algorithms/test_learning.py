"""Each algorithm teaches a small policy which token is rewarded, from Groups to optimizer steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swerl.core import plugins
from swerl.core.learning import LossInputs, Totals

NUM_TASKS, NUM_ATTEMPTS, LENGTH, VOCABULARY = 4, 8, 3, 5
NAMES = ("gspo", "grpo", "dr-grpo", "dapo", "cispo", "reinforce-pp")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mismatch", ["none", "icepop"])
def test_rewarded_tokens_become_likely(group, name: str, mismatch: str) -> None:
    """Task k is solved where the first token is k; the engine's record is slightly off."""
    torch.manual_seed(0)
    module = plugins.load("algorithms", name)
    wide = {"clip_low": 0.2, "clip_high": 0.2} if name == "gspo" else {}
    options = module.Options.model_validate({"mismatch": mismatch, "kl_coef": 0, **wide})
    algorithm = module.build(options)
    logits = torch.zeros(NUM_TASKS, LENGTH, VOCABULARY, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    solve_rates = [_train_once(logits, optimizer, algorithm, group) for _ in range(60)]
    assert sum(solve_rates[:5]) / 5 < 0.5
    assert sum(solve_rates[-5:]) / 5 > 0.9


def _train_once(logits: torch.Tensor, optimizer, algorithm, group) -> float:
    """Roll out every Task, take one step, and return the share that was solved."""
    logp = torch.log_softmax(logits, -1)
    drawn = torch.distributions.Categorical(logits=logits).sample((NUM_ATTEMPTS,)).transpose(0, 1)
    solved = drawn[..., 0] == torch.arange(NUM_TASKS).unsqueeze(1)
    groups = [
        replace(
            group(*(("solved" if hit else "unsolved", float(hit)) for hit in row)), task_id=str(k)
        )
        for k, row in enumerate(solved.tolist())
    ]
    advantage_B = torch.tensor(algorithm.advantages(groups)).flatten()
    logp_BT = logp.unsqueeze(1).expand(-1, NUM_ATTEMPTS, -1, -1).gather(-1, drawn.unsqueeze(-1))
    logp_BT = logp_BT.reshape(-1, LENGTH)
    ones = torch.ones_like(logp_BT)
    count = NUM_TASKS * NUM_ATTEMPTS
    inputs = LossInputs(
        logp_BT=logp_BT,
        old_logp_BT=logp_BT.detach() + 0.01 * torch.randn_like(logp_BT),
        ref_logp_BT=None,
        mask_BT=ones,
        token_BT=ones,
        advantage_B=advantage_B,
        weight_B=torch.full((count,), 1 / count),
        totals=Totals(count, count * LENGTH),
    )
    optimizer.zero_grad()
    algorithm.loss(inputs).loss.backward()
    optimizer.step()
    return float(solved.float().mean())
