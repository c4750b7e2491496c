"""Let unmodified SGLang start where its GPU-only dependencies cannot be installed.

SGLang imports torchvision and sgl_kernel at the top of modules that a text model on a CPU never
calls into. With this folder on PYTHONPATH those two names resolve to empty stand-ins. SGLang's
checksum of weights waits for the GPU first, and its record of experts is pinned for copies from the
GPU: without CUDA, `torch.cuda.synchronize` waits for nothing, and `torch.cuda.cudart` pins nothing.
Everything else, SGLang included, is what pip installed.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

ABSENT = frozenset({"torchvision", "sgl_kernel"})


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


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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
        pass


class _NoCudart:
    """Answers as CUDA's runtime does when all went well, where there is no GPU to copy from."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0


class _CudaFinder(importlib.abc.MetaPathFinder):
    """Lets `torch.cuda` load as it is, then gives it what needs no CUDA where there is none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch.cuda":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            wait, runtime = module.synchronize, module.cudart

            def synchronize(device: object = None) -> None:
                if module.is_available():
                    wait(device)

            def cudart() -> object:
                return runtime() if module.is_available() else _NoCudart()

            module.synchronize = synchronize  # type: ignore[attr-defined]
            module.cudart = cudart  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.append(_Finder())
sys.meta_path.insert(0, _CudaFinder())
