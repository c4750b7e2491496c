"""A login in a URL is stored and printed nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swerl.core.errors import InputError
from swerl.core.events import Notice
from swerl.core.files import read_json
from swerl.core.secrets import public, without_logins
from swerl.runs.history import EventLog
from swerl.runs.layout import open_run


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:hidden@host/v1", "http://***@host/v1"),
        ("http://user:hid@den@host:80/a@b", "http://***@host:80/a@b"),
        ("git+https://hidden@host?x=1", "git+https://***@host?x=1"),
        ("'http://u:hid'den@h', \"ws://u:hidden@h\"", "'http://***@h', \"ws://***@h\""),
        ("http://host/v1?mail=a@b", "http://host/v1?mail=a@b"),
        ("write to a@b: see https://host", "write to a@b: see https://host"),
    ],
)
def test_the_login_of_a_url_is_replaced(text: str, shown: str) -> None:
    assert without_logins(text) == shown
    assert public({"a": [text, (text,), 1, None]}) == {"a": [shown, [shown], 1, None]}


def test_errors_events_and_recipes_have_no_login(tmp_path: Path) -> None:
    url = "http://user:hidden@host/v1"
    error = InputError(f"no server at {url}", hint=f"start {url}")
    assert error.explained() == "no server at http://***@host/v1 (start http://***@host/v1)"
    recipe = {"name": "r", "engine": {"type": "openai", "base_url": url}}
    for _ in range(2):  # The same recipe, with its login, belongs to the folder.
        with open_run(tmp_path / "r", recipe) as run, EventLog(run.events) as log:
            log(Notice(f"no answer from {url}"))
    stored = read_json(tmp_path / "r" / "recipe.resolved.json")
    assert stored["engine"]["base_url"] == "http://***@host/v1"
    texts = [path.read_text() for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert not any("hidden" in text for text in texts)
    assert json.loads(run.events.read_text().splitlines()[-1])["text"].endswith("***@host/v1")
