"""Resolve command lines as SGLang does at its start, on a machine that seems to have eight H100.

The interpreter with SGLang runs this file, so it imports nothing of swerl. A line in is the JSON
list of a server's arguments; a line out holds the resolved settings, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import sitecustomize
import torch

H100_BYTES = 81_559 << 20
sitecustomize.ABSENT |= {"flashinfer", "tvm_ffi"}
"""Packages with kernels, which SGLang imports as soon as it finds a GPU."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # lines that SGLang prints must not look like answers
    show_gpus()
    for line in sys.stdin:
        answers.write(json.dumps(resolve(json.loads(line)), default=str) + "\n")
        answers.flush()


def show_gpus() -> None:
    """Answer SGLang's questions about the GPUs."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=H100_BYTES, uuid="0")
    torch.version.cuda = "13.0"
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: properties.name
    cuda.get_device_properties = lambda device=None: properties
    cuda.mem_get_info = lambda device=None: (H100_BYTES, H100_BYTES)


def resolve(arguments: list[str]) -> dict[str, object]:
    """Return the resolved settings, or SGLang's error."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.server_args import prepare_server_args

    try:
        settings = prepare_server_args(arguments)
        settings.resolve_once()
        model = model_config_of(settings)
    except (Exception, SystemExit) as error:  # noqa: BLE001  any refusal is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    reads_images = bool(model.is_multimodal)
    return {"resolved": settings.resolved_dict(), "reads_images": reads_images}


if __name__ == "__main__":
    main()
