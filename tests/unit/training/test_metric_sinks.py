import re
import sys
import threading
import time
from pathlib import Path

import pytest

from swerl.core.errors import RecipeError
from swerl.core.events import EvalEnded, Event, Notice, StepEnded
from swerl.recipe.schema import MetricsSection, Recipe
from swerl.training import metric_sinks
from swerl.training.metric_sinks import open_sinks

ROOT = Path(__file__).parents[3]


def ignore(event: Event) -> None:
    """Drop an event."""


def _recipe(*sinks: str) -> Recipe:
    return Recipe(name="a", metrics=MetricsSection(sinks=sinks))


def test_a_sink_that_is_not_installed_is_refused_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    with pytest.raises(RecipeError) as caught, open_sinks(_recipe("trackio"), tmp_path, ignore):
        pass
    assert "[trackio]" in caught.value.hint


def test_weights_and_biases_gets_every_step_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with open_sinks(_recipe("wandb"), tmp_path, ignore) as listen:
        listen(StepEnded(0, {"reward": 0.5}))
        listen(EvalEnded(1, "heldout", 0.25, 4))
    [logged] = tmp_path.rglob("*.wandb")
    deadline = time.monotonic() + 20  # its own process may still be writing
    while b"eval/heldout" not in logged.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert b"reward" in logged.read_bytes()


class FakeTracker:
    """A tracker; the named call fails, or hangs until the test ends."""

    def __init__(self, call: str, hang: threading.Event | None = None) -> None:
        self._call, self._hang = call, hang
        self.settings: dict[str, object] = {}

    def init(self, **settings: object) -> None:
        self.settings = settings
        self._work("init")

    def log(self, *_: object, **settings: object) -> None:
        self._work("log")

    def finish(self) -> None:
        self._work("finish")

    def _work(self, call: str) -> None:
        if call == self._call and self._hang:
            self._hang.wait()
        elif call == self._call:
            raise ConnectionError("no route")


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_fails_or_hangs_is_reported_once_and_delays_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, hangs: bool
) -> None:
    end = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", FakeTracker(call, end if hangs else None))
    for name in ("_CALL_S", "_END_S"):
        monkeypatch.setattr(metric_sinks, name, 0.2)
    events: list[Event] = []
    began = time.monotonic()
    with open_sinks(_recipe("wandb"), tmp_path, events.append) as listen:
        for step in range(5):
            listen(StepEnded(step, {"reward": 0.5}))
            time.sleep(0.1)
    assert time.monotonic() - began < 5
    end.set()
    [notice] = events
    assert isinstance(notice, Notice)
    assert "wandb failed" in notice.text
    assert ("takes over 0.2 s" if hangs else "no route") in notice.text


def test_two_runs_of_one_name_have_ids_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for folder in ("a", "b", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        tracker = FakeTracker("")
        monkeypatch.setitem(sys.modules, "wandb", tracker)
        with open_sinks(_recipe("wandb"), tmp_path / folder, ignore):
            pass
        ids.append(tracker.settings["id"])
    assert ids[0] != ids[1] == ids[2]


def test_every_metric_that_the_docs_explain_is_reported_somewhere() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) > 60
    files = (ROOT / "src" / "swerl").rglob("*.py")
    source = "\n".join(path.read_text() for path in files)
    assert [name for name in names if not _is_reported(name, source)] == []


def _is_reported(name: str, source: str) -> bool:
    """Whether a string of the source is the name without its ending, such as `_s` or `_d1`."""
    part = re.sub(r"(_s|_d\d+|_positive|_negative|^PHASE_)(?=$|\w)", "", name)
    return any(f'"{each}' in source for each in (name, part)) or f"{name}: float" in source
