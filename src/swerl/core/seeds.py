"""Seeds derived from a run's seed.

Each function hashes in its own way, and neither may change: published learning curves depend on the
draws that these bytes give.
"""

from __future__ import annotations

import hashlib


def seed_of(seed: int, name: str) -> int:
    """Return the 31-bit seed of this name, such as an Episode's id, in a run of this seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4]) >> 1


def reply_seed(seed: int, number: int) -> int:
    """Return the 31-bit seed of the reply with this number in a Session of this seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()) >> 1
