"""Every error that swerl raises on purpose, as one tree.

SwerlError
├── InputError            your input: recipe, command line, dataset row, file (exit code 2)
│   ├── RecipeError       a recipe that cannot be run as written
│   │   └── AbsentError   a file, folder or program of the recipe is not on this machine
│   ├── TaskError         a task or dataset row that cannot be used
│   ├── PluginError       the user's own reward, agent, grader or algorithm failed
│   └── UnknownNameError  an unknown name; the hint lists the nearest ones
├── SandboxError          a sandbox could not be created or used
│   ├── SandboxUnavailableError  this machine cannot run the backend at all
│   ├── SandboxFileError         a path inside cannot be read or written
│   │   └── SandboxFolderError   it is a folder
│   └── SandboxLostError         the sandbox died during use
├── ImageError            an image or source tree is not available
│   └── BrokenImageError  it exists, but no Task can run in it
├── GatewayError          the gateway refused or could not answer a request
├── EngineError           the engine answered wrongly
│   ├── EngineTimeoutError  it gave no reply in time
│   └── EngineLostError   the engine is gone
├── TrainerError          the trainer failed
│   └── NotFiniteError    a step has no finite loss or gradient; the weights are unchanged
├── BudgetError           a declared time budget ran out
└── RunError              the run folder cannot be used as asked
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from swerl.core.secrets import without_logins


class SwerlError(Exception):
    """Base of all errors raised on purpose.

    `hint` is a remedy; `retryable` means that the same call may succeed later. Logins in URLs are
    removed from both texts.
    """

    retryable = False

    def __init__(self, message: str, *, hint: str = "", retryable: bool | None = None) -> None:
        super().__init__(without_logins(message))
        self.hint = without_logins(hint)
        if retryable is not None:
            self.retryable = retryable

    def explained(self) -> str:
        """Return the message, followed by the hint in parentheses if there is one."""
        return f"{self} ({self.hint})" if self.hint else str(self)


class InputError(SwerlError, ValueError):
    """The input is wrong; nothing was started."""


class RecipeError(InputError):
    """A recipe cannot be run as written."""


class AbsentError(RecipeError):
    """A file, folder or program that the recipe names is not on this machine."""


class TaskError(InputError):
    """A task or dataset row cannot be used."""


class PluginError(InputError):
    """A reward, agent, grader or algorithm from outside of swerl failed."""


class UnknownNameError(InputError, LookupError):
    """Nothing has this name."""


class SandboxError(SwerlError, RuntimeError):
    """A sandbox could not be created or used.

    `from_inside` means that code in the sandbox caused it, by exhausting a limit or by replacing a
    file. The Episode then counts as unsolved, not as an infrastructure failure.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        retryable: bool | None = None,
        from_inside: bool = False,
    ) -> None:
        super().__init__(message, hint=hint, retryable=retryable)
        self.from_inside = from_inside


class SandboxUnavailableError(SandboxError):
    """This machine cannot run the sandbox backend."""


class SandboxFileError(SandboxError):
    """A path in a sandbox cannot be read or written: a folder, a device, a loop of links, ….

    Code inside can make any path so, hence `from_inside`. `reason` is the message without the path.
    """

    def __init__(self, message: str, *, reason: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint, from_inside=True)
        self.reason = reason or message


class SandboxFolderError(SandboxFileError, IsADirectoryError):
    """A path in a sandbox is a folder."""


class SandboxLostError(SandboxError, ConnectionError):
    """A sandbox died during use; its state is lost."""


class ImageError(SwerlError, RuntimeError):
    """An image or source tree is not available."""


class BrokenImageError(ImageError):
    """An image exists, but no Task can run in it; a retry does not help."""


class Refusal(StrEnum):
    """Reason why the gateway refuses a request; each dialect has its own status and body."""

    INVALID = "invalid"
    """The request is malformed."""
    AUTHENTICATION = "authentication"
    """No open session has this key."""
    NOT_FOUND = "not_found"
    """Nothing is served at this path."""
    TOO_LARGE = "too_large"
    """The body is over the session's cap."""
    CONTEXT = "context"
    """The prompt is over the session's context limit."""
    LIMIT = "limit"
    """The session has no turns left; a retry does not help."""
    OVERLOADED = "overloaded"
    """No capacity at the moment; a retry may help."""


class GatewayError(SwerlError, RuntimeError):
    """The gateway refused or could not answer a request."""

    def __init__(self, message: str, *, hint: str = "", refusal: Refusal = Refusal.INVALID) -> None:
        super().__init__(message, hint=hint, retryable=refusal is Refusal.OVERLOADED)
        self.refusal = refusal


class EngineError(SwerlError, RuntimeError):
    """The engine answered wrongly."""


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine gave no reply in time."""


class EngineLostError(EngineError, ConnectionError):
    """The engine is no longer reachable."""

    retryable = True


class TrainerError(SwerlError, RuntimeError):
    """The trainer failed; the run stops."""


class RankLostError(TrainerError):
    """A rank died or hangs; the last checkpoint is whole, so the run can restart."""


class ClusterError(SwerlError, RuntimeError):
    """A machine of the run is lost or unfit."""


class NotFiniteError(TrainerError):
    """A step's loss or gradients are not finite; weights, optimizer and schedule are unchanged."""


class BudgetError(SwerlError, TimeoutError):
    """A declared time budget ran out."""


class RunError(SwerlError, RuntimeError):
    """The run folder cannot be used as asked."""


class RunStoppedError(SwerlError, RuntimeError):
    """The run stopped because a user requested it."""


DISTRIBUTION = "swerl-rl"
"""The name of swerl's distribution: `swerl` is another project on the package index."""
EXTRAS = {
    "twin": ("megatron", "numpy", "psutil", "pyarrow", "safetensors", "torch"),
    "gpu": ("fla",),
    "cluster": ("ray",),
    "docker": ("docker",),
    "e2b": ("e2b",),
    "kubernetes": ("kubernetes_asyncio",),
    "datasets": ("datasets", "huggingface_hub"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "renderers": ("renderers",),
    "zstd": ("zstandard",),
}
"""Extra of swerl -> the modules that it installs."""


def install_command(extra: str = "") -> str:
    """Return the command that adds an extra to this installation, from the place it came from."""
    import json
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url, suffix = origin.get("url", ""), f"[{extra}]" if extra else ""
    if url.startswith("file:"):
        option = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"pip install {option}{shlex.quote(unquote(urlsplit(url).path) + suffix)}"
    if vcs := origin.get("vcs_info", {}).get("vcs"):
        url = f"{vcs}+{url}"
    return f"pip install {shlex.quote(DISTRIBUTION + suffix + (f' @ {url}' if url else ''))}"


def missing_package(name: str) -> InputError | None:
    """Return the error for a module that is not installed; None if no extra of swerl has it."""
    top = name.partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if top in modules), None)
    if extra is None:
        return None
    return InputError(f"the package {top} is not installed", hint=install_command(extra))


_NUM_KNOWN = 8
"""Names that a hint lists if none is near."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UnknownNameError:
    """Build the error for an unknown name, with the nearest known ones as its hint."""
    import difflib

    names = sorted(choices)
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
    if near:
        hint = f"did you mean {', '.join(near)}?"
    elif names:
        more = f" and {len(names) - _NUM_KNOWN:,} more" if len(names) > _NUM_KNOWN else ""
        hint = f"known here: {', '.join(names[:_NUM_KNOWN])}{more}"
    else:
        hint = f"no {kind} is known here"
    return UnknownNameError(f"unknown {kind} {name!r}", hint=hint)


def shortened(text: str, width: int) -> str:
    """Return a text of at most `width` characters; a mark replaces the end of a longer one."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type and arguments if it has none."""
    return (str(error).strip() or repr(error)).splitlines()[0]
