"""Every error that swerl raises on purpose, in one tree.

SwerlError
├── InputError            your input: recipe, command line, dataset row, file (exit code 2)
│   ├── RecipeError       a recipe that cannot be run as written
│   ├── TaskError         a task or dataset row that cannot be used
│   └── UnknownNameError  a name that nothing answers to; the hint lists the nearest ones
├── SandboxError          a sandbox could not be created or used
│   ├── SandboxUnavailableError  this machine cannot run the backend at all
│   └── SandboxLostError         the sandbox died under us
├── ImageError            an image or source tree could not be had
│   └── BrokenImageError  it is there, and no Task can be worked on in it
├── GatewayError          the gateway refused or could not answer a request
├── EngineError           the engine answered wrongly
│   └── EngineLostError   the engine is gone
├── TrainerError          the trainer failed
│   └── NotFiniteError    a step has no finite loss or gradient; the weights are unchanged
├── GradingError          grading could not reach a verdict
├── BudgetError           a declared time budget ran out
└── RunError              the run folder cannot be used as asked
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum


class SwerlError(Exception):
    """Base of all errors raised on purpose.

    `hint` says what to do about it; `retryable` says that the same call may work a moment later.
    """

    retryable = False

    def __init__(self, message: str, *, hint: str = "", retryable: bool | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if retryable is not None:
            self.retryable = retryable


class InputError(SwerlError, ValueError):
    """The input is wrong; nothing was started."""


class RecipeError(InputError):
    """A recipe cannot be run as written."""


class TaskError(InputError):
    """A task or dataset row cannot be used."""


class UnknownNameError(InputError, LookupError):
    """Nothing answers to this name."""


class SandboxError(SwerlError, RuntimeError):
    """A sandbox could not be created or used.

    `from_inside` says that what ran in the sandbox brought it about: by using up a limit, or by
    putting something else where a file must be. An Episode is then unsolved and not lost.
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


class SandboxLostError(SandboxError, ConnectionError):
    """A sandbox died while in use; its state is gone."""


class ImageError(SwerlError, RuntimeError):
    """An image or source tree could not be had."""


class BrokenImageError(ImageError):
    """An image is there, and no Task can be worked on in it; trying again does not help."""


class Refusal(StrEnum):
    """Why the gateway refuses a request; each dialect has its own status and shape for it."""

    INVALID = "invalid"
    """The request is malformed."""
    AUTHENTICATION = "authentication"
    """No open session answers to the key."""
    NOT_FOUND = "not_found"
    """Nothing is served at this path."""
    TOO_LARGE = "too_large"
    """The body is over the session's cap."""
    CONTEXT = "context"
    """The prompt is over the session's context limit."""
    LIMIT = "limit"
    """The session used up its turns; asking again does not help."""
    OVERLOADED = "overloaded"
    """No answer for the moment; asking again may help."""


class GatewayError(SwerlError, RuntimeError):
    """The gateway refused or could not answer a request."""

    def __init__(self, message: str, *, hint: str = "", refusal: Refusal = Refusal.INVALID) -> None:
        super().__init__(message, hint=hint, retryable=refusal is Refusal.OVERLOADED)
        self.refusal = refusal


class EngineError(SwerlError, RuntimeError):
    """The engine answered wrongly."""


class EngineLostError(EngineError, ConnectionError):
    """The engine cannot be reached any more."""

    retryable = True


class TrainerError(SwerlError, RuntimeError):
    """The trainer failed; the run stops."""


class RankLostError(TrainerError):
    """A rank died or hangs; its last checkpoint is whole, so the run can be started again."""


class ClusterError(SwerlError, RuntimeError):
    """A machine of the run is gone or not as it should be."""


class NotFiniteError(TrainerError):
    """A step's loss or gradients are not finite; weights, optimizer and schedule are unchanged."""


class GradingError(SwerlError, RuntimeError):
    """Grading could not reach a verdict."""


class BudgetError(SwerlError, TimeoutError):
    """A declared time budget ran out."""


class RunError(SwerlError, RuntimeError):
    """The run folder cannot be used as asked."""


class RunStoppedError(SwerlError, RuntimeError):
    """Somebody asked the run to end, and it did."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Build the error for a name that nothing answers to, naming the nearest known ones."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.4) or names[:8]
    hint = f"did you mean {', '.join(near)}?" if near else f"no {kind} is known here"
    return UnknownNameError(f"unknown {kind} {name!r}", hint=hint)
