"""200 mutated rows a converter: each is a Task or a reject with its reason, in bounded time."""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from swerl.core.errors import TaskError
from swerl.tasks.convert import convert, rejects_path
from swerl.tasks.datasets import converter_names, find_converter

from .examples import EXAMPLES

NUM_ROWS = 200
MOST_S = 20.0
"""CPU seconds of one row: a hundred times what the slowest takes, and far below a blow-up."""
MOST_MIB = 400
HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, float("nan"), 10**400, "", "\x00", "\ud800", "../../etc/passwd",
    "/etc/passwd", "a\nb", "-rf", "$(reboot)", "{", "[", "[[", '"', "null", "NaN", '{"a":', [], {},
    [None], [[]], {"": None}, {"../x": "y"}, ["\ud800"], ["a"] * 5000,
    "[" * 50_000, '{"a":' * 20_000, "(" * 50_000, "a" * 500_000, "\n" * 200_000, " " * 200_000,
    "diff --git a/x b/x\n" * 5_000, "@@ -1 +1 @@\n" * 20_000, "+" * 100_000, "--- a/x\n" * 20_000,
    "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,999999999999 +1,999999999999 @@\n-x\n+y\n",
    "diff --git a/../../x b/../../x\n--- a/../../x\n+++ b/../../x\n@@ -1 +1 @@\n-x\n+y\n",
    'diff --git "a/\\377" "b/\\377"\nnew file mode 120000\n--- /dev/null\n+++ "b/\\377"\n',
)  # fmt: skip


def mutated(value: Any, random: Random, rate: float) -> Any:
    """Return a copy with parts changed, those of JSON inside texts too."""
    if random.random() < rate:
        return copy.deepcopy(random.choice(HOSTILE))
    if isinstance(value, dict):
        return {
            (random.choice(["", "\x00", "../x"]) if random.random() < rate / 4 else key): mutated(
                part, random, rate
            )
            for key, part in value.items()
            if random.random() > rate / 4
        }
    if isinstance(value, list):
        parts = [mutated(part, random, rate) for part in value]
        return parts * random.choice([1, 1, 1, 0, 300]) if random.random() < rate else parts
    if isinstance(value, str) and value[:1] in "[{" and value:
        try:
            return json.dumps(mutated(json.loads(value), random, rate))
        except (ValueError, RecursionError):
            return value
    if isinstance(value, str) and random.random() < rate:
        at = random.randrange(len(value) + 1)
        return value[:at] + str(random.choice(HOSTILE))[:1000] + value[at:]
    return value


class Rows:
    """Rows that measure how long each takes."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.slowest: tuple[float, int] = (0.0, -1)

    def __iter__(self) -> Iterator[dict[str, Any] | TaskError]:
        for number, row in enumerate(self._rows):
            began_s = time.thread_time()
            yield row
            self.slowest = max(self.slowest, (time.thread_time() - began_s, number))


@pytest.mark.parametrize("name", converter_names())
def test_a_mutated_row_is_a_task_or_a_reject_with_its_reason(name: str, tmp_path: Path) -> None:
    random = Random(name)
    rates = [0.02, 0.1, 0.3]
    made = [mutated(dict(EXAMPLES[name]), random, random.choice(rates)) for _ in range(NUM_ROWS)]
    rows, out = Rows([row if isinstance(row, dict) else {} for row in made]), tmp_path / "t.jsonl"
    tracemalloc.start()
    try:
        summary = convert(find_converter(name), rows, out)
        peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()

    rejects = [json.loads(line) for line in rejects_path(out).read_bytes().splitlines()]
    tasks = out.read_bytes().splitlines() if out.exists() else []
    assert len(tasks) + len(rejects) == NUM_ROWS == summary.num_tasks + summary.num_rejects
    assert all(one["reason"] and len(one["reason"]) < 500 for one in rejects)
    assert len(rejects) > NUM_ROWS // 10
    assert rows.slowest[0] < MOST_S, rows.slowest
    assert peak_mib < MOST_MIB
