"""Log-probabilities in chunks: the same values and gradients as all at once."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swerl.plan import activations
from swerl.plan.layout import layout
from swerl.plan.shape import shape_of
from swerl.recipe.load import load
from swerl.training.rank import model as output

RECIPE = Path(__file__).parents[4] / "recipes" / "qwen06b_1gpu.toml"

VOCAB = 50


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process stand for a whole layout."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)


def _run(weight: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    weight, hidden = (tensor.clone().requires_grad_() for tensor in (weight, hidden))
    logp = output.chunked_log_probs(lambda h: h @ weight.T, hidden, labels, vocab=VOCAB)
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


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors that are made and still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name not in self._known:
            self._known.add(name)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, name, size)

    def _remove(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_positions", [200, 600])
def test_no_more_memory_is_alive_at_once_than_planned(
    dtype: torch.dtype, num_positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = 4096
    for module in (output, activations):
        monkeypatch.setattr(module, "CHUNK_LOGITS", 256 * vocab)
    recipe = load([RECIPE])
    shape = replace(shape_of(recipe.model), vocab_size=vocab)
    planned = activations.logit_bytes(
        shape, layout(recipe, shape_of(recipe.model)), positions=num_positions
    )
    weight = torch.randn(vocab, 4, dtype=dtype, requires_grad=True)
    hidden = torch.randn(num_positions, 4, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (num_positions,))
    with Alive() as alive:
        logp = output.chunked_log_probs(lambda h: h @ weight.T, hidden, labels, vocab=vocab)
        logp.sum().backward()
    assert alive.peak == pytest.approx(planned, rel=0.05)
