"""Print the results of `swerl tasks vet`: a line per Task, the reasons, the flaky tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from swerl.checks.vet import Vetted

_NUM_LISTED = 100
"""Most Tasks that get a line each."""
_DETAIL_CHARS = 100


def show(found: Sequence[Vetted]) -> None:
    """Print the tables, and a line for each Task that failed or has flaky tests."""
    from swerl.cli._output import console
    from swerl.cli._text import counted

    if len(found) <= _NUM_LISTED:
        console().print(_task_table(found))
    if reasons := _reasons(found):
        console().print(_reason_table(reasons))
    for each in found:
        if each.failure:
            console().print(f"{each.task}: {each.failure}", markup=False, soft_wrap=True)
    for each in found:
        if each.certificate and each.certificate.flaky:
            flaky, dropped = each.certificate.flaky, len(each.certificate.dropped)
            number = counted(len(flaky), "flaky test")
            told = f"{each.task}: {number} ({dropped} dropped): {', '.join(flaky)}"
            console().print(told, markup=False, soft_wrap=True)


def _task_table(found: Sequence[Vetted]) -> Table:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for title in ("task", "", "test s", "limit s", "MiB", "disk", "canary", "vetting s"):
        is_number = title not in {"task", "", "canary"}
        table.add_column(
            title,
            justify="right" if is_number else "left",
            no_wrap=title != "task",
            overflow="fold",
        )
    for each in found:
        if not each.certificate:
            table.add_row(escape(each.task), "[red]failed[/]")
            continue
        told, took = each.certificate, each.certificate.measured
        table.add_row(
            escape(each.task),
            "[green]certified[/]" if each.ok else f"[yellow]{told.findings[0].defect}[/]",
            f"{took.test_s:.1f}",
            f"{told.timeout_s:.0f}",
            _mib(took.peak_memory_mib),
            _mib(took.disk_mib),
            {None: "", True: "yes", False: "no"}[told.canary],
            f"{each.seconds:.1f}",
        )
    return table


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f}"


def _reasons(found: Sequence[Vetted]) -> Mapping[str, tuple[int, str]]:
    """Return the number of Tasks with each defect, and the first one's detail."""
    reasons: dict[str, tuple[int, str]] = {}
    for each in found:
        for finding in each.certificate.findings if each.certificate else ():
            number, example = reasons.get(finding.defect, (0, f"{each.task}: {finding.detail}"))
            reasons[finding.defect] = (number + 1, example)
    return dict(sorted(reasons.items(), key=lambda item: -item[1][0]))


def _reason_table(reasons: Mapping[str, tuple[int, str]]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from swerl.cli._text import safe

    table = Table("reason", "tasks", "for example", box=SIMPLE, pad_edge=False)
    table.columns[1].justify = "right"
    table.columns[2].overflow = "fold"
    for reason, (number, example) in reasons.items():
        table.add_row(reason, f"{number:,}", safe(example[:_DETAIL_CHARS]))
    return table
