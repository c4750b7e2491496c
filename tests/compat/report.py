"""The report of trials: tables in Markdown, all figures in JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from swerl.core import files
from swerl.core.errors import InputError
from tests.compat.trial import NONE, Figures, TrialResult, TrialResults

MARKS = ("<!-- lab report: begin -->", "<!-- lab report: end -->")
REPLAY_MARKS = ("<!-- replay report: begin -->", "<!-- replay report: end -->")
HEADINGS = (
    *("agent", "case", "end", "turns", "branches", "samples"),
    *("trained", "packed", "extra", "outside"),
)
FAMILY_HEADINGS = ("family", "agent", "cases", "turns", "trained", "most packed", "ends")
REPLAY_HEADINGS = ("agent", "cases", "turns", "replayed", "differ by", "played, s", "replayed, s")


def write(found: TrialResults, path: Path, *, replays: bool = False) -> None:
    """Write the report, or that of the replays: JSON for `.json`, Markdown for `.md`.

    In a page with the report's two markers, only the text between them changes. Raises InputError
    on another file ending, RunError if the file cannot be written.
    """
    check(path)
    if path.suffix == ".json":
        files.write_json(path, as_row(found))
        return
    begin, end = REPLAY_MARKS if replays else MARKS
    body = f"{begin}\n{replay_markdown(found) if replays else markdown(found)}{end}"
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    files.write_text(
        path, between.sub(lambda _: body, page) if between.search(page) else body + "\n"
    )


def as_row(found: TrialResults) -> dict[str, object]:
    return {"seconds": round(found.seconds, 1), "rows": [row.to_json() for row in found.rows]}


def check(path: Path) -> None:
    """Raise InputError if no report can be written at this path."""
    if path.suffix not in (".json", ".md"):
        raise InputError(
            f"a report ends in .md or .json, not {path.suffix or 'without an ending'!r}",
            hint="for example -o report.md",
        )
    if not path.parent.is_dir():
        raise InputError(
            f"there is no folder {path.parent}", hint="make it, or name another path for the report"
        )


def markdown(found: TrialResults) -> str:
    """Return the report in Markdown: a table of agents, one of further families, the reasons."""
    first = found.rows[0].family
    main = [row for row in found.rows if row.family == first]
    others = [row for row in found.rows if row.family != first]
    parts = [f"Family `{first}`:", "", *_table(HEADINGS, map(cells, main))]
    if others:
        parts += ["", *_table(FAMILY_HEADINGS, _by_family([*_of_one_agent(main, others), *others]))]
    lines = [f"- {line}" for line in reasons(found.rows)]
    parts += ["", *lines] if lines else []
    return "\n".join(parts) + "\n"


def replay_markdown(found: TrialResults) -> str:
    """Return the replays in Markdown: a row for each agent, the share of all, the failures."""
    lines = [*_table(REPLAY_HEADINGS, replay_cells(found.rows)), "", replay_summary(found.rows)]
    problems = [f"- {line}" for line in reasons(found.rows)]
    return "\n".join([*lines, *(["", *problems] if problems else [])]) + "\n"


def replay_cells(rows: Sequence[TrialResult]) -> Iterator[list[str]]:
    """Yield the table cells of each agent's replays, summed over the cases."""
    for agent in dict.fromkeys(row.agent for row in rows):
        mine = [row.replay for row in rows if row.agent == agent and row.replay]
        rules: Counter[str] = Counter()
        for each in mine:
            rules.update(each.differences)
        yield [
            *(agent, str(len(mine)), str(sum(each.turns for each in mine))),
            str(sum(each.replayed for each in mine)),
            ", ".join(f"{rule} {count}" for rule, count in rules.most_common()) or NONE,
            f"{sum(each.seconds_before for each in mine):.0f}",
            f"{sum(each.seconds for each in mine):.0f}",
        ]


def replay_summary(rows: Sequence[TrialResult]) -> str:
    """Return the share of all Turns that replay, as a sentence."""
    found = [row.replay for row in rows if row.replay]
    turns, replayed = sum(each.turns for each in found), sum(each.replayed for each in found)
    return f"{replayed} of {turns} turns replay: {_percent(replayed_share(rows))} %."


def replayed_share(rows: Sequence[TrialResult]) -> float:
    """Return the share of all Turns that replay, 0 to 1."""
    found = [row.replay for row in rows if row.replay]
    return sum(each.replayed for each in found) / max(sum(each.turns for each in found), 1)


def cells(row: TrialResult) -> list[str]:
    return [row.agent, row.case, row.outcome.value, *_numbers(row.figures)]


def _numbers(figures: Figures | None) -> list[str]:
    if figures is None:
        return [NONE] * (len(HEADINGS) - 3)
    return [
        *map(str, (figures.turns, figures.branches, figures.samples)),
        _percent(figures.trained),
        f"{figures.packed:.2f}",
        str(figures.extra),
        NONE if figures.outside is None else str(len(figures.outside)),
    ]


def _by_family(rows: Sequence[TrialResult]) -> Iterator[list[str]]:
    """Sum up each family with each of its agents over the cases."""
    for family, agent in dict.fromkeys((row.family, row.agent) for row in rows):
        mine = [row for row in rows if (row.family, row.agent) == (family, agent)]
        figures = [row.figures for row in mine if row.figures]
        ends = [row.outcome.value for row in mine if row.figures or not row.reason]
        summary = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends))
        if not figures:
            yield [family, agent, "0", *[NONE] * (len(FAMILY_HEADINGS) - 3)]
            continue
        yield [
            *(family, agent, str(len(figures)), str(sum(each.turns for each in figures))),
            _percent(min(each.trained for each in figures)),
            f"{max(each.packed for each in figures):.2f}",
            summary,
        ]


def _of_one_agent(main: Sequence[TrialResult], others: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the first family's rows of the agents that also ran with other families."""
    agents = {row.agent for row in others}
    return [row for row in main if row.agent in agents]


def reasons(rows: Sequence[TrialResult]) -> Iterator[str]:
    """Yield the reasons of failed and impossible trials, each once, and what does not replay."""
    cases_of: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row.reason:
            cases_of.setdefault((row.outcome.value, row.agent, row.reason), {})[row.case] = None
    for (outcome, agent, reason), cases in cases_of.items():
        yield f"{outcome}: {agent}: {reason} ({', '.join(cases)})"
    for row in rows:
        if row.replay and row.replay.problem:
            yield f"{row.agent}, {row.case}: {row.replay.problem}"


def attempts(rows: Sequence[TrialResult]) -> Iterator[str]:
    """Yield the attempts of each agent to reach outside, each once."""
    tried = [(row.agent, each) for row in rows if row.figures for each in row.figures.outside or ()]
    yield from (f"outside: {agent}: {each}" for agent, each in dict.fromkeys(tried))


def _percent(share: float) -> str:
    """Return a share in percent; a share below 1 is never rounded up to 100."""
    return "100" if share == 1 else f"{int(share * 10_000) / 100:.2f}"


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    headings = list(headings)
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
