"""The report: its table, its place in a page, and the page of the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swerl.core import plugins
from swerl.core.errors import InputError
from tests.compat import report
from tests.compat.cases import CASES
from tests.compat.trial import Figures, TrialOutcome, TrialResult, TrialResults

PAGE = Path(__file__).parents[4] / "docs" / "measurements" / "agent-compat.md"
FIGURES = Figures(4, 2, 2, 0.99999, 1.5, 3, ("lookup api.example.com",))
ROWS = (
    TrialResult("codex 1", "tools", "tiny", TrialOutcome.DONE, figures=FIGURES),
    TrialResult("codex 1", "slow", "tiny", TrialOutcome.CANNOT, "it | has none"),
    TrialResult("codex 1", "tools", "qwen3", TrialOutcome.FAILED, "it broke", figures=FIGURES),
)
FOUND = TrialResults(ROWS, 2.0)


def test_a_row_shows_every_figure_and_rounds_no_loss_away() -> None:
    text = report.markdown(FOUND)
    assert "| codex 1 | tools | done | 4 | 2 | 2 | 99.99 | 1.50 | 3 | 1 |" in text
    assert "| codex 1 | slow | – | – | – | – | – | – | – | – |" in text  # noqa: RUF001  a dash
    assert "| qwen3 | codex 1 | 1 | 4 | 99.99 | 1.50 | 1 failed |" in text
    assert "api.example.com" not in text, "the page counts, JSON and the terminal name"
    assert list(report.attempts(ROWS)) == ["outside: codex 1: lookup api.example.com"]
    assert "- failed: codex 1: it broke (tools)" in text


def test_a_page_keeps_its_text_around_the_report(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Compat\n\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\n\nAfter.\n")
    report.write(FOUND, page)
    text = page.read_text()
    assert text.startswith(f"# Compat\n\n{report.MARKS[0]}\n")
    assert text.endswith(f"{report.MARKS[1]}\n\nAfter.\n")
    assert "old" not in text
    report.write(FOUND, page)
    assert page.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_json_holds_what_the_table_leaves_out(tmp_path: Path) -> None:
    report.write(FOUND, tmp_path / "compat.json")
    rows = json.loads((tmp_path / "compat.json").read_text())["rows"]
    assert rows[0]["figures"]["outside"] == ["lookup api.example.com"]
    assert [row["outcome"] for row in rows] == [row.outcome.value for row in ROWS]


@pytest.mark.parametrize("name", ["compat.txt", "compat", "absent/compat.md"])
def test_an_impossible_path_for_a_report_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        report.check(tmp_path / name)


def test_the_docs_hold_a_report_of_every_agent_in_every_case() -> None:
    _, _, rest = PAGE.read_text().partition(report.MARKS[0])
    body, ended, _ = rest.partition(report.MARKS[1])
    assert ended
    lines = [line for line in body.splitlines() if line.startswith("|")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert rows[0] == report.HEADINGS
    shown = {(row[0].split()[0], row[1]) for row in rows}
    for agent in plugins.names("harnesses"):
        for case in CASES:
            assert (agent, case) in shown, f"run: nox -s compat; {agent}, {case} is missing"
    ends = {row[2] for row in rows if row[1] in CASES}
    assert TrialOutcome.FAILED.value not in ends
