"""What an agent wrote down of its own session, gathered from its sandbox when it has ended."""

from __future__ import annotations

from swerl.core.contracts import Sandbox

MAX_BYTES = 4 * 2**20
"""Most that is kept; the files of a session of a hundred turns are about one."""
_TIMEOUT_S = 30.0

# The agent may have put anything there: what is no plain file is left alone.
_GATHER = 'find "$HOME/$1" -type f -name "*.jsonl" -exec cat {} + 2>/dev/null | head -c "$2"'


async def gather(sandbox: Sandbox, folder: str) -> bytes:
    """Return the JSON lines of all files below a folder of the user's home, one after the other.

    Works for an agent that was killed, too. Empty where there is no such folder.
    """
    words = ["sh", "-c", _GATHER, "sh", folder, str(MAX_BYTES)]
    done = await sandbox.run(words, cwd="/", timeout_s=_TIMEOUT_S)
    return done.stdout
