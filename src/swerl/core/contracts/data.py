"""The data side: dataset rows to Tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from swerl.core.chat import Json
from swerl.core.task import Task


class Converter(Protocol):
    """Reads one dataset."""

    source: str
    """Where the dataset lives: its hub id."""

    def tasks(self, rows: Iterable[Mapping[str, Json]]) -> Iterator[Task]:
        """Yield a Task per row. Raises TaskError on a row that cannot be used."""
