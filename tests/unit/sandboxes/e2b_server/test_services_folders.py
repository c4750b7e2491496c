"""Folders through the SDK: list, stat, make, rename, remove, watch."""

from __future__ import annotations

import time

import pytest
from e2b import (
    AsyncSandbox,
    FileNotFoundException,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    Sandbox,
)

from .helpers import Service, eventually


def test_a_list_tells_kinds_sizes_owners_and_links(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkdir d; printf 12345 > f; chmod 640 f; ln -s f to-f; ln -s no to-no")
    found = {entry.name: entry for entry in sandbox.files.list(".")}
    assert {name: entry.type for name, entry in found.items()} == {
        "d": FileType.DIR, "f": FileType.FILE, "to-f": FileType.SYMLINK, "to-no": FileType.SYMLINK
    }  # fmt: skip
    file = found["f"]
    assert (file.size, file.mode, file.permissions) == (5, 0o640, "-rw-r-----")
    assert (file.path, file.owner) == ("/home/user/f", "agent")
    assert abs(file.modified_time.timestamp() - time.time()) < 60
    assert found["to-f"].symlink_target == "/home/user/f"


def test_a_list_goes_as_deep_as_asked_and_is_sorted(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkdir -p a/b/c a-b; touch a/b/c/deep a/z")
    assert [entry.path for entry in sandbox.files.list("/home/user", depth=2)] == [
        "/home/user/a", "/home/user/a/b", "/home/user/a/z", "/home/user/a-b",
    ]  # fmt: skip
    assert len(sandbox.files.list("~", depth=9)) == 6


def test_names_that_look_like_anything_survive(sandbox: Sandbox) -> None:
    names = ["new\nline", " spaces ", "-rf", "$(id)", "ünï", "'\"", "a%sb", "*"]
    for name in names:
        sandbox.files.write(f"/tmp/names/{name}", "x")
    listed = [entry.name for entry in sandbox.files.list("/tmp/names")]
    assert sorted(listed) == sorted(names)
    assert all(sandbox.files.exists(f"/tmp/names/{name}") for name in names)


def test_what_is_not_there_is_not_found(sandbox: Sandbox) -> None:
    assert not sandbox.files.exists("nothing")
    for ask in (sandbox.files.get_info, sandbox.files.list, sandbox.files.watch_dir):
        with pytest.raises(FileNotFoundException):
            ask("nothing")
    sandbox.files.write("file", "x")
    for ask in (sandbox.files.list, sandbox.files.watch_dir):
        with pytest.raises(InvalidArgumentException, match="not a directory"):
            ask("file")


def test_folders_are_made_once_with_their_parents(sandbox: Sandbox) -> None:
    assert sandbox.files.make_dir("a/b/c")
    assert not sandbox.files.make_dir("a/b/c")
    assert sandbox.files.get_info("a/b/c").type == FileType.DIR
    sandbox.commands.run("touch a/b/c/mine")


def test_rename_and_remove(sandbox: Sandbox) -> None:
    sandbox.files.write("old", "content")
    assert sandbox.files.rename("old", "deep/new").path == "/home/user/deep/new"
    assert sandbox.files.read("deep/new") == "content"
    assert not sandbox.files.exists("old")
    with pytest.raises(FileNotFoundException):
        sandbox.files.rename("old", "elsewhere")
    sandbox.files.remove("deep")
    sandbox.files.remove("deep")
    assert not sandbox.files.exists("deep")


def test_a_watcher_tells_what_happens_below_a_folder(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkdir -p w/sub; echo 1 > w/there; echo 1 > w/moves; echo 1 > w/goes")
    flat = sandbox.files.watch_dir("w")
    deep = sandbox.files.watch_dir("w", recursive=True)
    sandbox.commands.run("cd w; echo 22 > there; mv moves moved; rm goes; touch sub/new; mkdir d")
    kind = FilesystemEventType
    expected = {
        ("there", kind.WRITE), ("moves", kind.RENAME), ("moved", kind.CREATE),
        ("goes", kind.REMOVE), ("d", kind.CREATE),
    }  # fmt: skip
    seen: set[tuple[str, FilesystemEventType]] = set()
    below: set[tuple[str, FilesystemEventType]] = set()

    def look() -> bool:
        seen.update((event.name, event.type) for event in flat.get_new_events())
        below.update((event.name, event.type) for event in deep.get_new_events())
        return seen >= expected and len(below) > len(expected)

    eventually(look)
    assert seen == expected
    assert below == expected | {("sub/new", kind.CREATE)}


def test_a_watcher_that_is_stopped_leaves_nothing_running(sandbox: Sandbox) -> None:
    def count() -> int:
        return int(sandbox.commands.run("ls /proc | grep -c '^[0-9]'").stdout)

    before = count()
    watcher = sandbox.files.watch_dir(".")
    assert count() > before
    watcher.stop()
    eventually(lambda: count() == before)


async def test_a_watch_streams_to_the_async_sdk(service: Service) -> None:
    sandbox = await AsyncSandbox.create(**service.sdk)
    events: list[str] = []
    handle = await sandbox.files.watch_dir(".", on_event=lambda event: events.append(event.name))
    await sandbox.files.write("noticed", "x")
    for _ in range(200):
        if events:
            break
        await sandbox.commands.run("sleep 0.02")
    await handle.stop()
    assert "noticed" in events
    await sandbox.kill()
