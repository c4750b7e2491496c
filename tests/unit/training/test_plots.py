"""The plots of a run, also of a run with few metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.runs.history import RunHistory
from swerl.training import plots

pytest.importorskip("matplotlib", reason="needs the extra swerl[twin]")
STEP = {"step_s": 9.0, "train_s": 2.0, "reward": 0.5, "solve_rate": 0.5, "mismatch": 1e-6}


def sizes(path: Path) -> tuple[int, int]:
    """Return a PNG's width and height, which stand in its header."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def test_both_plots_are_drawn_into_the_run_folder(tmp_path: Path) -> None:
    past = RunHistory(
        {0: STEP | {"rows": 2, "row_tokens": 10}, 1: STEP | {"rows": 2, "row_tokens": 20}}
    )
    past.evals["heldout"] = [(0, 0.2), (2, 0.4)]
    plots.draw(tmp_path, past)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.png", "reward.png"]


def test_sheet_has_panels_for_measured_metrics_only(tmp_path: Path) -> None:
    plots.sheet(tmp_path / "few.png", [STEP])
    plots.sheet(tmp_path / "more.png", [STEP | {"entropy": 1.0, "dollars": 3.0, "staleness": 0.0}])
    width, few = sizes(tmp_path / "few.png")
    assert sizes(tmp_path / "more.png") == (width, 2 * few)


@pytest.mark.parametrize("steps", [[], [{}], [{"skipped": 1.0, "step_s": 3.0}, STEP]])
def test_run_with_little_to_show_is_drawn(
    tmp_path: Path, steps: list[dict[str, float]], recwarn: pytest.WarningsRecorder
) -> None:
    plots.sheet(tmp_path / "a.png", steps)
    assert sizes(tmp_path / "a.png")
    assert not [str(warning.message) for warning in recwarn]
