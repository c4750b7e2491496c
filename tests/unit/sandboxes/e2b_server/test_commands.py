"""Commands through the SDK: output, exit codes, input, signals, and a client that leaves."""

from __future__ import annotations

import pytest
from e2b import (
    CommandExitException,
    Sandbox,
    SandboxException,
)

from .helpers import eventually


def test_a_command_outlives_its_client_and_its_output_is_dropped(sandbox: Sandbox) -> None:
    script = "echo one; read x; yes | head -c 20000000; touch printed; sleep 60"
    handle = sandbox.commands.run(script, background=True, stdin=True)
    assert next(iter(handle))[0] == "one\n"
    handle.disconnect()
    sandbox.commands.send_stdin(handle.pid, "go\n")
    eventually(lambda: sandbox.files.exists("printed"))
    assert handle.pid in [info.pid for info in sandbox.commands.list()]
    with pytest.raises(SandboxException, match="does not serve"):
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


def test_terminals_are_not_served(sandbox: Sandbox) -> None:
    from e2b.sandbox.commands.command_handle import PtySize

    with pytest.raises(SandboxException, match="does not serve terminals"):
        sandbox.pty.create(PtySize(rows=31, cols=97))
