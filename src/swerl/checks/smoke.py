"""Check that the image of every Task boots and can be worked in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from swerl.checks._interpreter import Interpreter, interpreter_of
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError, SwerlError
from swerl.core.image_reference import is_local
from swerl.core.sandbox import Limits
from swerl.core.task import Task

_STEP_TIMEOUT_S = 60.0
_BOOT_TIMEOUT_S = 1800.0
"""Most seconds until the first command ends; pulling a large image takes most of it."""
_WORK_TREE = r"""
command -v git >/dev/null || { echo "the image has no git"; exit 2; }
g() { git -c safe.directory='*' "$@" 2>&1; }
top=$(g rev-parse --show-toplevel) || { echo no; exit; }
[ "$top" = "$(pwd -P)" ] || { echo no; exit; }
said=$(g status --porcelain --untracked-files=no) || { echo "$said"; exit 3; }
for commit
do g cat-file -e "$commit^{commit}" >/dev/null && continue
echo "the repository lacks the base commit $commit"; exit 4
done
echo yes
"""
_NO_TREE = "the workdir is not the top of a git work tree"
_NO_TREE_HINT = "give the folder of the repository as the Task's workdir"

Place: TypeAlias = tuple[str, str]
"""An image and the workdir in it."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What the place that keeps an image knows of it."""

    digest: str = ""
    size: int = 0
    """Bytes of its files; 0 for unknown."""


async def know_nothing(image: str) -> ImageFacts:
    """Return no facts: for images that nothing here keeps."""
    return ImageFacts()


@dataclass(frozen=True, slots=True)
class Smoke:
    """What a check of one image found."""

    image: str
    workdir: str
    num_tasks: int = 0
    """Tasks that use the image with this workdir."""
    failure: str = ""
    """What went wrong and what to do, or nothing."""
    interpreter: str = ""
    """Version of the Python that the Task's tests run with, else of the one that the image puts
    first; `none` where it has none and no Task needs one."""
    work_tree: str = ""
    """`yes` where the workdir is a git work tree; `no` where an Episode will make it one."""
    boot_s: float = 0.0
    """Seconds from the order to the first command's end."""
    exec_s: float = 0.0
    """Seconds for one empty command."""
    digest: str = ""
    size: int = 0
    """Bytes of the image's files; 0 for unknown."""

    @property
    def ok(self) -> bool:
        """Whether Episodes can run in the image."""
        return not self.failure

    @property
    def place(self) -> Place:
        """What was checked."""
        return self.image, self.workdir


@dataclass(frozen=True, slots=True)
class Settings:
    """How to check."""

    num_workers: int = 4
    """Sandboxes at once."""
    limits: Limits = field(default_factory=Limits)
    facts: Callable[[str], Awaitable[ImageFacts]] = know_nothing
    """Tells an image's digest and size."""
    done: Mapping[Place, Smoke] = field(default_factory=dict)
    """What is known; it stands as long as the image has the same digest."""


async def check(
    backend: SandboxBackend,
    tasks: Iterable[Task],
    settings: Settings | None = None,
    *,
    tell: Callable[[Smoke, bool], None] = lambda _, __: None,
) -> list[Smoke]:
    """Check every image with its workdir once, and return the results in the Tasks' order.

    `tell` hears each result, and whether it is new. Raises SandboxUnavailableError where the
    backend cannot run at all.
    """
    chosen = settings or Settings()
    users: dict[Place, list[Task]] = {}
    for task in tasks:
        users.setdefault((task.image, task.workdir), []).append(task)
    free = asyncio.Semaphore(chosen.num_workers)

    async def one(place: Place, own: list[Task]) -> Smoke:
        async with free:
            known = chosen.done.get(place)
            if known and (await chosen.facts(place[0])).digest not in ("", known.digest):
                known = None
            result = known or await _check(backend, chosen, own)
        result = replace(result, num_tasks=len(own))
        tell(result, known is None)
        return result

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(place, own)) for place, own in users.items()]
    return [task.result() for task in running]


async def _check(backend: SandboxBackend, settings: Settings, own: Sequence[Task]) -> Smoke:
    """Check one image for the Tasks that use it with one workdir."""
    found = Smoke(own[0].image, own[0].workdir)
    try:
        found = await _look(backend, settings, own)
    except SandboxUnavailableError:
        raise
    except SwerlError as error:
        found = replace(found, failure=_explain(error))
    except TimeoutError:
        found = replace(found, failure=f"no command ended within {_BOOT_TIMEOUT_S:g} s of the boot")
    except OSError as error:
        found = replace(found, failure=f"{error} (`swerl doctor` says what this machine lacks)")
    facts = await settings.facts(found.image)
    failure = " ".join(found.failure.split())
    return replace(found, failure=failure, digest=facts.digest, size=facts.size)


async def _look(backend: SandboxBackend, settings: Settings, own: Sequence[Task]) -> Smoke:
    """Open a sandbox and ask it everything. Raises SwerlError, OSError and TimeoutError."""
    task, started = own[0], time.monotonic()
    async with asyncio.timeout(_BOOT_TIMEOUT_S) as patience:
        async with backend.open(task.image, settings.limits, workdir=task.workdir) as sandbox:
            await sandbox.run(["true"], timeout_s=_STEP_TIMEOUT_S)
            boot_s = time.monotonic() - started
            patience.reschedule(None)
            timed = await sandbox.run(["true"], timeout_s=_STEP_TIMEOUT_S)
            problems: list[str] = []
            return Smoke(
                task.image,
                task.workdir,
                boot_s=boot_s,
                exec_s=timed.duration_s,
                interpreter=await _note(_ask_interpreter(sandbox, interpreter_of(task)), problems),
                work_tree=await _note(_ask_work_tree(sandbox, own), problems),
                failure="; ".join(problems),
            )


async def _note(question: Coroutine[None, None, str], problems: list[str]) -> str:
    """Return the answer, or nothing and the problem: one must not hide the other."""
    try:
        return await question
    except (SandboxLostError, SandboxUnavailableError):
        raise
    except SandboxError as error:
        problems.append(_explain(error))
        return ""


def _explain(error: SwerlError) -> str:
    return f"{error} ({error.hint})" if error.hint else str(error)


async def _ask_interpreter(sandbox: Sandbox, wanted: Interpreter) -> str:
    done = await sandbox.run(wanted.argv, env=wanted.env, timeout_s=_STEP_TIMEOUT_S)
    said = done.text.strip().splitlines()
    if done.exit_code == 0 and said:
        return said[-1].strip()
    if not wanted.is_declared:
        return "none"
    problem = f"the interpreter of the tests does not run: {wanted.name}"
    raise SandboxError(problem, hint=said[-1] if said else f"exit code {done.exit_code}")


async def _ask_work_tree(sandbox: Sandbox, own: Sequence[Task]) -> str:
    commits = dict.fromkeys(task.base_commit for task in own if task.base_commit)
    argv = ["sh", "-c", _WORK_TREE, "sh", *commits]
    done = await sandbox.run(argv, timeout_s=_STEP_TIMEOUT_S)
    said = " ".join(done.text.split())
    if done.exit_code != 0:
        problem = "the workdir cannot be worked in with git"
        raise SandboxError(problem, hint=said or f"exit code {done.exit_code}")
    if said != "yes" and (commits or not is_local(own[0].image)):
        raise SandboxError(_NO_TREE, hint=_NO_TREE_HINT)
    return said
