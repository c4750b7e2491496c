"""The built-in agent's shell: one bash a call, its folder and variables kept from call to call.

A command comes in by standard input, so that its length does not matter. What it exports and where
it ends up lies in a file outside of the repository; a command that is killed leaves them as they
were.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

from swerl.core.contracts import Sandbox

_FRESH = """
__command=$(cat)
eval "$__command" </dev/null
"""
_LASTING = """
__state=$1 __command=$(cat)
set --
if [ -r "$__state" ]; then . "$__state" 2>/dev/null; fi
trap '{ export -p; printf "cd -- %q\\n" "$PWD"; } >"$__state.new" 2>/dev/null &&
  mv -f -- "$__state.new" "$__state"' EXIT
eval "$__command" </dev/null
"""


@dataclass(frozen=True, slots=True)
class Shell:
    """The shell of one run."""

    sandbox: Sandbox
    workdir: str
    timeout_s: float
    lasting: bool
    """Whether folder and exported variables last from one call to the next."""
    _state: str = field(default_factory=lambda: f"/tmp/.swerl-shell-{uuid4().hex}")

    async def run(self, command: str) -> str:
        """Run a command and return what the model reads. Raises only what the Sandbox raises."""
        script = ["bash", "-c", _LASTING if self.lasting else _FRESH, "bash", self._state]
        done = await self.sandbox.run(
            script, cwd=self.workdir, timeout_s=self.timeout_s, stdin=command.encode()
        )
        lines = [done.text.rstrip("\n")] if done.text.strip("\n") else []
        if done.truncated:
            lines.append("(more output was dropped)")
        if done.timed_out:
            lines.append(f"timed out after {self.timeout_s:g} s")
        elif done.exit_code:
            lines.append(f"exit code {done.exit_code}")
        return "\n".join(lines) or "ok"
