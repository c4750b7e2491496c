"""Logins are found where `docker login` leaves them, and never shown."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pytest

from swerl.core.errors import ImageError
from swerl.images.http import Login, find_login, logged_in


def config(folder: Path, **settings: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(settings))
    return file


def helper(folder: Path, script: str) -> None:
    program = folder / "docker-credential-fake"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


async def test_login_of_docker_hub_is_found_by_its_old_name(tmp_path: Path) -> None:
    pair = base64.b64encode(b"ann:s:3cret").decode()
    file = config(tmp_path, auths={"https://index.docker.io/v1/": {"auth": pair}})
    assert await find_login("docker.io", file) == Login("ann", "s:3cret")
    assert await find_login("ghcr.io", file) is None
    assert logged_in(file) == ["docker.io"]


async def test_helper_program_is_asked_for_its_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(tmp_path, 'read key; printf \'{"Username": "bob", "Secret": "%s!"}\' "$key"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    file = config(tmp_path, credHelpers={"ghcr.io": "fake"})
    assert await find_login("ghcr.io", file) == Login("bob", "ghcr.io!")


async def test_helper_without_an_entry_means_no_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(tmp_path, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert await find_login("ghcr.io", config(tmp_path, credsStore="fake")) is None


async def test_helper_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="docker-credential-absent"):
        await find_login("ghcr.io", config(tmp_path, credsStore="absent"))


async def test_a_helper_is_killed_when_its_caller_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    helper(tmp_path, f"echo $$ > {note}.part; mv {note}.part {note}; exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    asking = asyncio.create_task(find_login("ghcr.io", config(tmp_path, credsStore="fake")))
    async with asyncio.timeout(20):
        while not note.exists():  # noqa: ASYNC110  another process makes it
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while Path("/proc", note.read_text().strip()).exists():  # noqa: ASYNC110  reaped soon
            await asyncio.sleep(0.01)


async def test_sections_of_nothing_mean_no_login(tmp_path: Path) -> None:
    file = config(tmp_path, auths=None, credHelpers=None, credsStore=None)
    assert await find_login("ghcr.io", file) is None
    assert logged_in(file) == []


async def test_damaged_config_or_login_is_one_clear_error(tmp_path: Path) -> None:
    file = config(tmp_path, auths={"ghcr.io": {"auth": "%%%"}})
    with pytest.raises(ImageError, match="is damaged"):
        await find_login("ghcr.io", file)
    file.write_text("{")
    with pytest.raises(ImageError, match="cannot read Docker's config"):
        await find_login("ghcr.io", file)
    assert logged_in(file) == []


def test_password_is_not_in_the_repr() -> None:
    assert "s3cret" not in repr(Login("ann", "s3cret"))
