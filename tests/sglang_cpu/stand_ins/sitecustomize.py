"""Let unmodified SGLang start where its GPU-only dependencies cannot be installed.

With this folder on PYTHONPATH, in SGLang's processes:

- `torchvision` and `sgl_kernel`, which SGLang imports at the top of modules that a text model on a
  CPU never calls into, resolve to empty stand-ins. What Qwen3.5 does call is written in torch
  (`sgl_kernel_in_torch.py`), also two kernels that SGLang has for CPUs with AMX and for GPUs only.
- A delta net's state is kept in fp32, as the trainer's is, and nothing is compiled: that takes
  longer than small models run.
- SGLang's checksum of weights waits for the GPU, and its record of experts is pinned for copies
  from there. Without CUDA, `torch.cuda.synchronize` waits for nothing, and `torch.cuda.cudart` pins
  nothing. LoRA's numbers are pinned by torch itself: `pin_memory` does nothing either.

Everything else is what pip installed.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence

ABSENT = frozenset({"torchvision", "sgl_kernel"})
SETTINGS = {
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "SGLANG_MAMBA_SSM_DTYPE": "float32",
    "TORCH_COMPILE_DISABLE": "1",
}
"""Where the environment says nothing else."""
_KERNELS = "sgl_kernel_in_torch"
_KERNELS_OF = ("sgl_kernel", "sgl_kernel.mamba")
_SGLANG_KERNELS = "sglang.kernels.ops"


class _NothingType(type):
    def __call__(cls, *args: object, **kwargs: object) -> object:
        """Return a decorated function as it was; else an instance."""
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return args[0]
        return super().__call__()

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=_NothingType):
    """A class, a function, a decorator or a value, whichever the import site expects."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Act as `Nothing(...)`."""
        return type(self)(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        """Return Nothing for every attribute that Python itself does not look for."""
        return getattr(type(self), name)


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is absent; asked last, so that real packages come first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in _KERNELS_OF:
            _add_kernels(module)


def _add_kernels(module: types.ModuleType) -> None:
    """Offer the kernels in both ways in which SGLang asks for them."""
    import torch

    for name, value in vars(importlib.import_module(_KERNELS)).items():
        if name.endswith("_cpu"):
            setattr(module, name, value)
            setattr(torch.ops.sgl_kernel, name, value)


class _NoCudart:
    """Answers as CUDA's runtime does when all went well, where there is no GPU to copy from."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0


def _without_cuda(module: types.ModuleType) -> None:
    """Give `torch.cuda` what needs no CUDA where there is none."""
    wait, runtime = module.synchronize, module.cudart

    def synchronize(device: object = None) -> None:
        if module.is_available():
            wait(device)

    def cudart() -> object:
        return runtime() if module.is_available() else _NoCudart()

    module.synchronize = synchronize  # type: ignore[attr-defined]
    module.cudart = cudart  # type: ignore[attr-defined]


def _without_pins(module: types.ModuleType) -> None:
    """Let torch pin no memory where there is no GPU to copy to."""
    pin = module.Tensor.pin_memory

    def pin_memory(tensor: object, *arguments: object) -> object:
        return pin(tensor, *arguments) if module.cuda.is_available() else tensor

    def without(make: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(make)
        def made(*arguments: object, **named: object) -> object:
            if named.get("pin_memory") and not module.cuda.is_available():
                named["pin_memory"] = False
            return make(*arguments, **named)

        return made

    module.Tensor.pin_memory = pin_memory
    for name in ("tensor", "empty", "zeros"):
        setattr(module, name, without(getattr(module, name)))


def _norm_for_cpus(module: types.ModuleType) -> None:
    """Let a delta net's gated norm take the kernel for CPUs where there is no AMX, too."""
    module._use_cpu = True  # type: ignore[attr-defined]


def _gate_for_cpus(module: types.ModuleType) -> None:
    """Let a shared expert's gate do without Triton."""
    name = "fused_gate_sigmoid_mul_add"
    setattr(module, name, getattr(importlib.import_module(_KERNELS), name))


_COMPLETED: dict[str, Callable[[types.ModuleType], None]] = {
    "torch": _without_pins,
    "torch.cuda": _without_cuda,
    f"{_SGLANG_KERNELS}.attention.fla.layernorm_gated": _norm_for_cpus,
    f"{_SGLANG_KERNELS}.elementwise.elementwise": _gate_for_cpus,
}


class _Completing(importlib.abc.MetaPathFinder):
    """Lets some modules load as they are, then completes them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _COMPLETED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            _COMPLETED[fullname](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
sys.meta_path.append(_StandIns())
sys.meta_path.insert(0, _Completing())
