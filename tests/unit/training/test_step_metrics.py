"""Wall time of a step: spans that overlap count once."""

import pytest

from swerl.training.step_metrics import covered


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 3), (2, 5)], 4),
        ([(2, 5), (1, 9), (3, 4)], 8),
        ([(-5, 2), (9, 20)], 3),
        ([(20, 30)], 0),
    ],
)
def test_overlapping_spans_count_once_and_only_inside_the_window(
    spans: list[tuple[float, float]], seconds: float
) -> None:
    assert covered(spans, (0, 10)) == seconds
