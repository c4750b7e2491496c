"""Which Tasks cannot be graded here, as no grader or log parser answers to their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swerl import plugins
from swerl.errors import UnknownNameError
from swerl.graders._log_parsers import find_parser


class Support:
    """What this installation can grade."""

    def __init__(self) -> None:
        self._graders = {name.replace("-", "_") for name in plugins.names("graders")}

    def missing(self, kinds: Mapping[tuple[str, str], int]) -> Counter[str]:
        """Return what is missing and how many Tasks it concerns, by grader and log parser."""
        found: Counter[str] = Counter()
        for (grader, parser), count in kinds.items():
            if grader not in self._graders:
                found[f"no grader {grader} is installed"] += count
            elif parser and not _has_parser(parser):
                found[f"no log parser {parser} is installed"] += count
        return found


def _has_parser(name: str) -> bool:
    try:
        find_parser(name)
    except UnknownNameError:
        return False
    return True
