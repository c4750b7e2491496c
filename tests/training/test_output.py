"""Log-probabilities in chunks: the same values and gradients as all at once."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state

from swerl.training import output

VOCAB = 50


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process stand for a whole layout."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)


def _run(weight: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    weight, hidden = (tensor.clone().requires_grad_() for tensor in (weight, hidden))
    logp = output.log_probs(lambda h: h @ weight.T, hidden, labels, vocab=VOCAB)
    (logp * torch.arange(1.0, len(labels) + 1)).sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    return [logp.detach(), weight.grad, hidden.grad]


@pytest.mark.parametrize("num_positions", [0, 1, 7, 8, 23])
def test_chunks_change_neither_values_nor_gradients(
    num_positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCAB, 16), torch.randn(num_positions, 16)
    labels = torch.randint(0, VOCAB, (num_positions,))
    whole = _run(weight, hidden, labels)
    monkeypatch.setattr(output, "CHUNK_LOGITS", 8 * VOCAB)
    for chunked, wanted in zip(_run(weight, hidden, labels), whole, strict=True):
        torch.testing.assert_close(chunked, wanted)
    expected = torch.log_softmax(hidden @ weight.T, -1)[torch.arange(num_positions), labels]
    torch.testing.assert_close(whole[0], expected)


def test_no_more_logits_than_a_chunk_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "CHUNK_LOGITS", 8 * VOCAB)
    sizes = []

    def to_logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden @ torch.ones(16, VOCAB)

    hidden = torch.zeros(23, 16, requires_grad=True)
    output.log_probs(to_logits, hidden, torch.zeros(23, dtype=torch.long), vocab=VOCAB)
    assert sizes == [8, 8, 7]
