"""Continuous batching: requests join and leave the running batch at every step.

One step places waiting requests in rows, prefills one chunk of what their rows do not hold yet,
and decodes one token for every row whose prompt is complete. This file uses no HTTP and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swerl.core.errors import EngineError
from swerl.engines._sglang_wire import PauseMode
from swerl.engines._torch_model import DenseModel, DenseWeights, Draws, Floats, draw


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    rid: str
    ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_ids: tuple[int, ...] = ()
    """All ids that end the reply."""
    seed: int = 0


@dataclass(slots=True)
class ReplyJob:
    """A request, and the tokens sampled for it while it has no row."""

    request: ReplyRequest
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    cached_tokens: int = 0
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, sampled tokens before it), oldest first."""

    def serve_under(self, version: str) -> None:
        """Record the weight version that samples from here on."""
        num_sampled = len(self.logprobs)
        if self.versions and self.versions[-1][1] == num_sampled:
            self.versions.pop()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, num_sampled))

    def end(self, reason: str) -> FinishedReply:
        """Close the job with the tokens sampled so far."""
        return FinishedReply(
            request=self.request,
            output_ids=self.ids[len(self.request.ids) :].tolist(),
            logprobs=self.logprobs.tolist(),
            reason=reason,
            cached_tokens=self.cached_tokens,
            versions=tuple(self.versions),
        )


@dataclass(frozen=True, slots=True)
class FinishedReply:
    request: ReplyRequest
    output_ids: list[int]
    logprobs: list[float]
    reason: str
    """`stop`, `length` or `abort`."""
    cached_tokens: int
    versions: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Counters:
    """Work of the batch since its start."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0


MAX_STOP_IDS = 16
"""Most stop ids of one request: enough for every chat format, few enough to compare each step."""

RECORD = np.dtype([
    ("num_tokens", np.int64),  # tokens in the row, prompt and sampled
    ("num_cached", np.int64),  # of these, tokens whose keys and values are in the cache
    ("num_prompt", np.int64),
    ("limit", np.int64),  # number of tokens at which the row is full
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("top_k", np.int64),
    ("seed", np.uint64),
    ("stop_ids", np.int64, (MAX_STOP_IDS,)),  # padded with -1
    ("used", np.int64),  # clock of the last use: the smallest free one is evicted first
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prefix:
    """The row that shares most with a prompt, and the number of cached tokens it shares."""

    row: int
    length: int
    expected: int
    """The longest prefix that any row will share once its own prefill is done."""


class Rows:
    """Rows of tokens and cache; `table`, `tokens_SP` and `logprobs_SP` have one entry a row."""

    def __init__(self, cache: Floats) -> None:
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
        expected = int(np.minimum(same_S, self.table["num_tokens"]).max())
        row = int(shared_S.argmax())
        return Prefix(row, int(shared_S[row]), expected)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy keys and values of the first `length` tokens to another row."""
        self.cache[:, :, target, :, :length] = self.cache[:, :, source, :, :length]

    def swap(self, a: int, b: int) -> None:
        if a == b:
            return
        pair, crossed = [a, b], [b, a]
        num_used = int(self.table["num_tokens"][pair].max())
        for array in (self.tokens_SP[:, :num_used], self.logprobs_SP[:, :num_used], self.table):
            array[pair] = array[crossed]
        cached = self.cache[:, :, :, :, : int(self.table["num_cached"][pair].max())]
        cached[:, :, pair] = cached[:, :, crossed]

    def forget(self) -> None:
        """Mark every cached key and value as unusable."""
        self.table["num_cached"] = 0
        self.table["num_tokens"] = 0


PREFILL_TOKENS = 4096
"""Most padded prompt tokens of one step of a small model: enough to be efficient, without delaying
the rows that decode."""
PREFILL_WORK = 8 * 10**9
"""Most parameters times tokens of one step: about a quarter of a second of a core."""
MIN_SAVED_TOKENS = 32
"""A request waits for a running prefill if that saves it more prompt tokens than this."""


class RunningBatch:
    """All requests in flight. Call its methods one at a time."""

    def __init__(self, model: DenseModel, *, num_rows: int, max_running: int, context: int) -> None:
        self.model = model
        self.version = "default"
        self.context = context
        self.counters = Counters()
        self.paused = False
        self._rows = Rows(model.new_cache(num_rows))
        self._chunk = max(32, min(PREFILL_TOKENS, PREFILL_WORK // model.weights.num_params))
        """Most padded prompt tokens of a step."""
        self._max_running = min(max_running, num_rows)
        self._waiting: deque[ReplyJob] = deque()
        self._jobs: list[ReplyJob] = []
        """Jobs of the running rows, in row order."""
        self._num_decoding = 0
        self._clock = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """True if `step` has work to do."""
        return not self.paused and bool(self._jobs or self._waiting)

    def add(self, request: ReplyRequest) -> None:
        """Queue a request; it joins at a later step."""
        ids = np.array(request.ids, dtype=np.int64)
        self._waiting.append(ReplyJob(request, ids, np.zeros(0, dtype=np.float32)))
        self.counters.num_requests += 1
        self.counters.num_prompt_tokens += len(ids)

    def step(self) -> list[FinishedReply]:
        """Advance every request, and return those that ended."""
        self._clock += 1
        self.counters.num_steps += 1
        self._join()
        with np.errstate(over="ignore"):  # exp of activations
            return self._prefill() + self._decode()

    def abort(self, chosen: Callable[[ReplyRequest], bool]) -> list[FinishedReply]:
        """End the chosen requests with the tokens sampled so far."""
        gone = [job for job in self._waiting if chosen(job.request)]
        self._waiting = deque(job for job in self._waiting if not chosen(job.request))
        running = [row for row, job in enumerate(self._jobs) if chosen(job.request)]
        return [job.end("abort") for job in gone] + self._leave(dict.fromkeys(running, "abort"))

    def pause(self, mode: PauseMode) -> list[FinishedReply]:
        """Stop stepping until `resume`. Returns the requests that the mode ended.

        IN_PLACE keeps them in their rows, so the cache cannot be flushed meanwhile.
        """
        self.paused = True
        if mode is PauseMode.ABORT:
            return self.abort(lambda request: True)
        if mode is PauseMode.RETRACT:
            jobs = [self._collect(row) for row in range(self.num_running)]
            self._jobs.clear()
            self._num_decoding = 0
            self._waiting.extendleft(reversed(jobs))
        return []

    def resume(self) -> None:
        self.paused = False

    def flush(self) -> None:
        """Drop all cached prefixes. Raises EngineError while requests hold rows."""
        if self._jobs:
            raise EngineError(
                f"{self.num_running} requests are running: their cache cannot be flushed",
                hint="first pause generation with mode abort or retract",
            )
        self._rows.forget()

    def set_weights(self, weights: DenseWeights, version: str) -> None:
        """Serve other weights from the next step on. Raises EngineError like `flush`."""
        self.flush()
        self.model.weights = weights
        self.version = version

    def _join(self) -> None:
        held_back = []
        while self._waiting and self.num_running < self._max_running:
            job = self._waiting.popleft()
            if not self._place(job):
                held_back.append(job)
        self._waiting.extendleft(reversed(held_back))

    def _place(self, job: ReplyJob) -> bool:
        """Give the job a row with the longest cached prefix; False if a longer one is coming."""
        rows, row = self._rows, self.num_running
        prefix = rows.find_prefix(job.ids)
        if prefix.expected > prefix.length + MIN_SAVED_TOKENS:
            return False
        reusable = prefix.row >= row and prefix.length == rows.table["num_cached"][prefix.row]
        least_recent = row + int(rows.table["used"][row:].argmin())
        target = prefix.row if reusable else least_recent
        if target != prefix.row and prefix.length:
            rows.copy_prefix(prefix.row, target, prefix.length)
        rows.table["num_cached"][target] = prefix.length
        rows.swap(target, row)
        self._fill(row, job)
        self._jobs.append(job)
        if not job.versions:
            job.cached_tokens = prefix.length
            self.counters.num_cached_tokens += prefix.length
        job.serve_under(self.version)
        return True

    def _fill(self, row: int, job: ReplyJob) -> None:
        request, rows = job.request, self._rows
        num_tokens, num_prompt = len(job.ids), len(request.ids)
        rows.tokens_SP[row, :num_tokens] = job.ids
        rows.logprobs_SP[row, num_prompt:num_tokens] = job.logprobs
        record = rows.table[row]
        record["num_tokens"] = num_tokens
        record["num_prompt"] = num_prompt
        record["limit"] = num_prompt + request.max_new_tokens
        record["temperature"] = request.temperature
        record["top_p"] = request.top_p
        record["top_k"] = request.top_k
        record["seed"] = request.seed
        record["used"] = self._clock
        record["stop_ids"] = -1
        record["stop_ids"][: len(request.stop_ids)] = request.stop_ids

    def _prefill(self) -> list[FinishedReply]:
        """Prefill one chunk of the first rows that lack prompt tokens."""
        first, stop = self._num_decoding, self.num_running
        if first == stop:
            return []
        table = self._rows.table
        lacking = (table["num_tokens"] - table["num_cached"])[first:stop]
        lacking = np.minimum(lacking, self._chunk)
        padded = np.maximum.accumulate(lacking) * np.arange(1, len(lacking) + 1)
        chunk_B = lacking[: max(1, int((padded <= self._chunk).sum()))]
        stop = first + len(chunk_B)
        draws = self._forward(first, chunk_B)
        table["num_cached"][first:stop] += chunk_B
        self.counters.num_prefilled_tokens += int(chunk_B.sum())
        complete = np.flatnonzero((table["num_cached"] == table["num_tokens"])[first:stop])
        accepted = Draws(draws.ids_B[complete], draws.logprobs_B[complete])
        self._accept(first + complete, accepted)
        for row in first + complete:
            self._swap(int(row), self._num_decoding)
            self._num_decoding += 1
        return self._leave(self._finished(first))

    def _decode(self) -> list[FinishedReply]:
        num_rows = self._num_decoding
        if num_rows == 0:
            return []
        draws = self._forward(0, np.ones(num_rows, dtype=np.int64))
        self._rows.table["num_cached"][:num_rows] += 1
        self._accept(np.arange(num_rows), draws)
        return self._leave(self._finished(0))

    def _forward(self, first: int, chunk_B: NDArray[np.int64]) -> Draws:
        """Run `chunk_B[i]` new tokens of row first + i and draw a token after the last of each."""
        rows, num_rows = self._rows, len(chunk_B)
        table = rows.table[first : first + num_rows]
        start_B1 = table["num_cached"][:, None]
        # Padding continues after the chunk; it is overwritten before it is read.
        positions_BT = start_B1 + np.arange(chunk_B.max())
        scratch = rows.tokens_SP.shape[1] - 1
        np.minimum(positions_BT, scratch, out=positions_BT)
        ids_BT = rows.tokens_SP[first + np.arange(num_rows)[:, None], positions_BT]
        length = int(positions_BT.max()) + 1
        cache = rows.cache[:, :, first : first + num_rows]
        hidden = self.model.forward(ids_BT, positions_BT, cache, length)
        last = hidden[np.arange(num_rows), chunk_B - 1]
        return draw(self.model.logits(last), table)

    def _accept(self, rows_B: NDArray[np.int64], draws: Draws) -> None:
        rows = self._rows
        end_B = rows.table["num_tokens"][rows_B]
        rows.tokens_SP[rows_B, end_B] = draws.ids_B
        rows.logprobs_SP[rows_B, end_B] = draws.logprobs_B
        rows.table["num_tokens"][rows_B] += 1
        self.counters.num_generated_tokens += len(rows_B)

    def _finished(self, first: int) -> dict[int, str]:
        """Return the decoding rows from `first` on that are done, with the reason."""
        table = self._rows.table[first : self._num_decoding]
        rows_B = np.arange(first, self._num_decoding)
        last_B = self._rows.tokens_SP[rows_B, table["num_tokens"] - 1]
        stopped_B = (table["stop_ids"] == last_B[:, None]).any(axis=1)
        full_B = table["num_tokens"] >= table["limit"]
        rows = np.flatnonzero(stopped_B | full_B)
        return {first + int(i): "stop" if stopped_B[i] else "length" for i in rows}

    def _leave(self, reasons: dict[int, str]) -> list[FinishedReply]:
        """Free the rows, highest first, so that no row moves before it is freed."""
        ended = []
        for row in sorted(reasons, reverse=True):
            ended.append(self._collect(row).end(reasons[row]))
            if row < self._num_decoding:
                self._num_decoding -= 1
                self._swap(row, self._num_decoding)
                row = self._num_decoding
            self._swap(row, self.num_running - 1)
            self._jobs.pop()
        return ended

    def _collect(self, row: int) -> ReplyJob:
        """Move the sampled tokens from the row to its job; the row keeps its cached prefix."""
        job, record = self._jobs[row], self._rows.table[row]
        end = int(record["num_tokens"])
        job.ids = self._rows.tokens_SP[row, :end].copy()
        job.logprobs = self._rows.logprobs_SP[row, len(job.request.ids) : end].copy()
        record["num_tokens"] = record["num_cached"]
        record["used"] = self._clock
        return job

    def _swap(self, a: int, b: int) -> None:
        self._rows.swap(a, b)
        self._jobs[a], self._jobs[b] = self._jobs[b], self._jobs[a]
