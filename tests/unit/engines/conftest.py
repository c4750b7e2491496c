"""Models for the engine tests: two tiny random Qwen3 with the same shape."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.unit.engines._fake_sglang import FakeServer, fakes


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3 of the same shape with other weights."""
    return save_tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3 whose head is not its embedding."""
    return save_tiny(tmp_path_factory.mktemp("untied"), seed=2, tied=False)


def save_tiny(folder: Path, *, seed: int, tied: bool = True) -> Path:
    """Save a random Qwen3, spread wide enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=2,
    )
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[list[FakeServer]]:
    async with fakes(tmp_path, 3) as found:
        yield found


@pytest.fixture(scope="session")
def reference() -> Reference:
    """transformers' log-probabilities."""
    return Reference()


class Reference:
    """What transformers says about a model folder; models are loaded once."""

    def __init__(self) -> None:
        self._models: dict[Path, Qwen3ForCausalLM] = {}

    def logits(self, folder: Path, ids: list[int]) -> torch.Tensor:
        """Return logits [T, V] of one sequence."""
        if folder not in self._models:
            model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self._models[folder] = model.eval()
        with torch.inference_mode():
            return self._models[folder](torch.tensor([ids])).logits[0]

    def logprobs(
        self, folder: Path, prompt: list[int], output: list[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Return the log-probability of each output token."""
        logits = self.logits(folder, prompt + output)[len(prompt) - 1 : -1] / temperature
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(output)[:, None])[:, 0]
