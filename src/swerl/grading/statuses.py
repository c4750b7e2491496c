"""What log parsers share: lines about tests, and the one status that each test has in the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from swerl.core.grade import TestStatus

Statuses: TypeAlias = dict[str, TestStatus]
Parser: TypeAlias = Callable[[str], Statuses]
Line: TypeAlias = tuple[str, TestStatus]

_WEIGHT = {TestStatus.FAILED: 2, TestStatus.ERROR: 2, TestStatus.SKIPPED: 1}
"""How much a line about a test counts against others; whatever is a pass has none."""
_MAX_LINE = 4000
"""Characters of a line that may be a runner's; patterns take the square of it in time."""


def lines(log: str) -> Iterator[str]:
    """Yield the lines without the white space around them, and without those that are too long."""
    return (line for line in map(str.strip, log.split("\n")) if len(line) <= _MAX_LINE)


def worst(lines: Iterable[Line]) -> Statuses:
    """Return the status of each test: the last of its worst ones."""
    found: Statuses = {}
    for name, status in lines:
        if name not in found or _WEIGHT.get(status, 0) >= _WEIGHT.get(found[name], 0):
            found[name] = status
    return found


def by_line(pattern: str, words: Mapping[str, TestStatus]) -> Parser:
    """Return a parser of lines that the pattern begins to match, white space around them aside.

    The pattern has the groups `status`, which is looked up in `words`, and `name`.
    """
    compiled = re.compile(pattern)

    def parse(log: str) -> Statuses:
        matches = map(compiled.match, lines(log))
        return worst((match["name"], words[match["status"]]) for match in matches if match)

    return parse
