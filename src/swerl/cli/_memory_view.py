"""How the plan of a GPU's memory is shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from swerl.plan.memory import MemoryPlan


def memory_table(planned: MemoryPlan) -> Table:
    """Return what one GPU holds in each phase, in GiB."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title="Memory of a GPU, GiB", title_justify="left", box=SIMPLE)
    table.add_column("part")
    for phase in planned.phases:
        table.add_column(phase.name, justify="right")
    longest_first = sorted(planned.phases, key=lambda phase: -len(phase.parts))
    for name in dict.fromkeys(name for phase in longest_first for name in phase.parts):
        parts = [phase.parts.get(name) for phase in planned.phases]
        if any(parts):
            table.add_row(name, *(f"{part:.1f}" if part else "" for part in parts))
    table.add_section()
    totals = [f"{phase.total:.1f}" for phase in planned.phases]
    table.add_row("together", *totals, style="bold")
    if planned.capacity is not None:
        table.add_row("of", *(f"{planned.capacity:.1f}" for _ in totals))
    return table


def host_and_cache(planned: MemoryPlan) -> Iterator[str]:
    """Yield what the engine's cache is good for, and what lies in the host's memory."""
    cache = planned.cache
    yield (
        f"an engine's cache: {cache.tokens:,} tokens = {cache.contexts:.1f} full contexts, for "
        f"{cache.sequences} episodes at once"
    )
    if planned.host:
        yield f"a node's host memory: {planned.host:.0f} GiB for what leaves the GPUs"
