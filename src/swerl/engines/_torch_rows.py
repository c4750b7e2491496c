"""The rows of the batch: token sequences, their sampling settings and their cached keys and values.

Rows are kept in three zones, so that every forward works on a slice and never gathers: first the
rows that decode, then those that prefill, then the free ones, which still hold a reusable prefix.
Axes: S rows, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MAX_STOP_IDS = 16
"""Most stop ids of one request: enough for every chat format, few enough to compare each step."""

RECORD = np.dtype([
    ("num_tokens", np.int64),  # tokens in the row, prompt and sampled
    ("num_cached", np.int64),  # of these, tokens whose keys and values are in the cache
    ("num_prompt", np.int64),
    ("limit", np.int64),  # the row is full at this many tokens
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("top_k", np.int64),
    ("seed", np.uint64),
    ("stop_ids", np.int64, (MAX_STOP_IDS,)),  # padded with -1
    ("used", np.int64),  # clock of the last use: the smallest free one is evicted first
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prefix:
    """The row that shares most with a prompt, and how many cached tokens it shares."""

    row: int
    length: int
    promised: int
    """The longest prefix any row will share once its own prefill is done."""


class Rows:
    """Row storage. `table` has one RECORD a row; `tokens_SP` and `logprobs_SP` go with it."""

    def __init__(self, cache: Tensor) -> None:
        num_rows, num_positions = cache.shape[2], cache.shape[4]
        self.cache = cache
        self.num_rows = num_rows
        self.table = np.zeros(num_rows, dtype=RECORD)
        self.tokens_SP: NDArray[np.int64] = np.zeros((num_rows, num_positions), dtype=np.int64)
        self.logprobs_SP: NDArray[np.float32] = np.zeros(
            (num_rows, num_positions), dtype=np.float32
        )

    def find_prefix(self, ids: NDArray[np.int64]) -> Prefix:
        """Find the row whose cached tokens begin most like `ids`; the last id is never matched."""
        length = min(len(ids) - 1, int(self.table["num_tokens"].max()))
        if length == 0:
            return Prefix(0, 0, 0)
        same_SL = self.tokens_SP[:, :length] == ids[:length]
        same_S = np.where(same_SL.all(axis=1), length, same_SL.argmin(axis=1))
        shared_S = np.minimum(same_S, self.table["num_cached"])
        promised = int(np.minimum(same_S, self.table["num_tokens"]).max())
        row = int(shared_S.argmax())
        return Prefix(row, int(shared_S[row]), promised)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy keys and values of the first `length` tokens to another row."""
        self.cache[:, :, target, :, :length] = self.cache[:, :, source, :, :length]

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        if a == b:
            return
        pair, crossed = [a, b], [b, a]
        num_used = int(self.table["num_tokens"][pair].max())
        for array in (self.tokens_SP[:, :num_used], self.logprobs_SP[:, :num_used], self.table):
            array[pair] = array[crossed]
        cached = self.cache[:, :, :, :, : int(self.table["num_cached"][pair].max())]
        cached[:, :, pair] = cached[:, :, crossed]

    def oldest(self, first: int) -> int:
        """Return the least recently used row from `first` on."""
        return first + int(self.table["used"][first:].argmin())

    def forget(self) -> None:
        """Make no cached key or value reusable."""
        self.table["num_cached"] = 0
        self.table["num_tokens"] = 0

    def set_stop_ids(self, row: int, stop_ids: Sequence[int]) -> None:
        """Store the ids that end a row."""
        stops = self.table["stop_ids"][row]
        stops[:] = -1
        stops[: len(stop_ids)] = stop_ids
