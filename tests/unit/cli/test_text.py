"""Commands write numbers as people do."""

from __future__ import annotations

from swerl.cli._output import counted


def test_one_thing_is_no_plural() -> None:
    assert counted(1, "sandbox", "sandboxes") == "1 sandbox"
    assert counted(0, "sandbox", "sandboxes") == "0 sandboxes"
    assert counted(2000, "image") == "2,000 images"
