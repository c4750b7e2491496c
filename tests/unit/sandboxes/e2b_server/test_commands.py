"""Commands through the SDK: output, exit codes, input, signals, timeouts, reconnecting."""

from __future__ import annotations

import pytest
from e2b import (
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxException,
)

from swerl.sandboxes.e2b_server.processes import BACKLOG_BYTES

from .helpers import eventually


def test_a_command_outlives_its_client_and_keeps_unread_output(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("echo one; read x; echo two; read x", background=True, stdin=True)
    assert next(iter(handle))[0] == "one\n"
    handle.disconnect()
    eventually(lambda: sandbox.commands.list())
    sandbox.commands.send_stdin(handle.pid, "go\n")
    again = sandbox.commands.connect(handle.pid)
    assert next(iter(again))[0] == "two\n"
    sandbox.commands.send_stdin(handle.pid, "go\n")
    assert again.wait().exit_code == 0
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(handle.pid)


def test_kill_ends_a_command_once(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 60", background=True)
    assert handle.pid in [info.pid for info in sandbox.commands.list()]
    assert handle.kill()
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert (ended.value.exit_code, ended.value.error) == (-1, "signal: killed")
    assert not sandbox.commands.kill(handle.pid)


def test_the_pid_is_the_one_inside(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 60", background=True)
    sandbox.commands.run(f"kill -TERM {handle.pid}")
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert ended.value.exit_code == 143


def test_the_newest_reader_gets_the_output(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("read x; echo one; read x; echo two", background=True, stdin=True)
    newer = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(handle.pid, "go\ngo\n")
    with pytest.raises(SandboxException, match="another client"):
        handle.wait()
    assert newer.wait().stdout == "one\ntwo\n"


def test_unread_output_is_kept_up_to_a_limit(sandbox: Sandbox) -> None:
    script = "read x; yes | head -c 20000000; echo; echo last; touch printed; read x"
    handle = sandbox.commands.run(script, background=True, stdin=True)
    handle.disconnect()
    sandbox.commands.send_stdin(handle.pid, "go\n")
    eventually(lambda: sandbox.files.exists("printed"))
    again = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(handle.pid, "go\n")
    text = again.wait().stdout
    assert len(text) <= BACKLOG_BYTES
    assert text.endswith("last\n")


def test_terminals_are_not_served(sandbox: Sandbox) -> None:
    from e2b.sandbox.commands.command_handle import PtySize

    with pytest.raises(SandboxException, match="does not serve terminals"):
        sandbox.pty.create(PtySize(rows=31, cols=97))
