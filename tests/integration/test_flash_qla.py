"""fla-core hands the trainer's call of the delta rule to FlashQLA, as its own verifier decides."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra twin")


def _verifier(folder: Path) -> Any:
    """Return FlashQLA's backend of the newest fla-core that the extra `gpu` allows, on Hopper."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run(
        [*command, "fla-core>=0.6,<0.7"], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr[-300:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        source = wheel.read("fla/ops/gated_delta_rule/backends/flash_qla.py").decode()
    backends, utils = ModuleType("fla.backends"), ModuleType("fla.utils")
    backends.__dict__.update(BaseBackend=object, register=lambda name: lambda kind: kind)
    utils.__dict__.update(IS_NVIDIA_HOPPER=True, IS_NVIDIA_SM100=False, IS_NVIDIA_SM120=False)
    names: dict[str, Any] = {"__name__": "flash_qla_backend"}
    with pytest.MonkeyPatch.context() as patch:
        modules = {"fla": ModuleType("fla"), "fla.backends": backends, "fla.utils": utils}
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        exec(compile(source, "flash_qla.py", "exec"), names)
    return names["FlashQLABackend"]()


@pytest.mark.parametrize(("width", "accepted"), [(128, True), (64, False)])
def test_the_trainers_call_reaches_flash_qla(
    width: int, accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key head and two value heads are a rank's part of Qwen3.6-35B-A3B."""
    pytest.importorskip("megatron.core", reason="needs the extra twin")
    from swerl.training.rank import gated_delta

    verify, verdicts = _verifier(tmp_path).chunk_gated_delta_rule_verifier, []

    def chunk_gated_delta_rule(q: Any, k: Any, v: Any, **named: Any) -> tuple[Any, None]:
        assert v.shape[2] % k.shape[2] == 0  # FlashQLA's own condition on heads
        verdicts.append(verify(q, k, v, **named))
        return v, None

    rule = ModuleType("fla.ops.gated_delta_rule")
    rule.__dict__["chunk_gated_delta_rule"] = chunk_gated_delta_rule
    for module in (ModuleType("fla"), ModuleType("fla.ops"), rule):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    heads = {"dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(96, number, width, **heads) for number in (1, 1, 2))
    decay, beta = torch.randn(96, 2), torch.rand(96, 2)
    gated_delta._by_kernels((q, k, v, decay, beta), (0, 40, 96))
    [(taken, reason)] = verdicts
    assert taken is accepted, reason
