"""What is kept of a command's output."""

from __future__ import annotations

from dataclasses import dataclass, field

from swerl.core.sandbox import Chunk


@dataclass(slots=True)
class Kept:
    """What is kept of a command's output: `cap` bytes of each stream."""

    cap: int
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    """Whether anything was dropped."""

    def add(self, chunk: Chunk) -> bool:
        """Keep what fits; return whether all of it did."""
        stream = self.stderr if chunk.is_stderr else self.stdout
        room = self.cap - len(stream)
        stream += chunk.data[:room]
        if fits := len(chunk.data) <= room:
            return fits
        self.truncated = True
        return False
