"""Count the Tasks that need a grader or log parser that is not installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swerl.core import plugins
from swerl.core.errors import UnknownNameError
from swerl.grading.log_parsers import find_parser


def unsupported(kinds: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Return the graders and log parsers that are not installed -> number of Tasks that need them.

    `kinds` maps (grader, log parser) to a number of Tasks. The most frequent reason comes first.
    """
    graders = {name.replace("-", "_") for name in plugins.names("graders")}
    found: Counter[str] = Counter()
    for (grader, parser), count in kinds.items():
        if grader not in graders:
            found[f"no grader {grader} is installed"] += count
        elif parser and not _has_parser(parser):
            found[f"no log parser {parser} is installed"] += count
    return dict(found.most_common())


def _has_parser(name: str) -> bool:
    try:
        find_parser(name)
    except UnknownNameError:
        return False
    return True
