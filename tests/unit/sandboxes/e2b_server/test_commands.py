"""Commands through the SDK: output, exit codes, input, signals, timeouts, reconnecting."""

from __future__ import annotations

import asyncio
import time

import pytest
from e2b import (
    AsyncSandbox,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    SandboxException,
    TimeoutException,
)

from swerl.sandboxes.e2b_server.processes import BACKLOG_BYTES

from .helpers import Service, eventually


def test_a_command_tells_its_output_and_its_exit_code(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("echo out; echo err >&2")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo partly; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "partly\n")


def test_output_arrives_while_the_command_runs(sandbox: Sandbox) -> None:
    seen: list[str] = []
    handle = sandbox.commands.run("echo first; read line; echo $line", background=True, stdin=True)

    def answer(text: str) -> None:
        seen.append(text)
        if len(seen) == 1:  # it waits for this: nothing else could let it go on
            sandbox.commands.send_stdin(handle.pid, "second\n")

    handle.wait(on_stdout=answer)
    assert seen == ["first\n", "second\n"]


def test_much_output_arrives_whole_and_in_order(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("seq 1 300000")
    assert done.stdout == "".join(f"{number}\n" for number in range(1, 300001))


def test_a_slow_reader_slows_the_command_and_loses_nothing(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("head -c 20000000 /dev/zero; echo end >&2", background=True)
    time.sleep(0.2)
    assert any(info.pid == handle.pid for info in sandbox.commands.list())
    done = handle.wait()
    assert (len(done.stdout), done.stderr) == (20_000_000, "end\n")


def test_environment_folder_and_user_are_as_asked(service: Service) -> None:
    sandbox = Sandbox.create(envs={"OURS": "box", "BOTH": "box"}, **service.sdk)
    script = 'echo "$OURS $BOTH $MINE $PWD $HOME"; id -u'
    done = sandbox.commands.run(script, envs={"MINE": "run", "BOTH": "run"}, cwd="/tmp")
    assert done.stdout == "box run run /tmp /home/user\n1000\n"
    assert sandbox.commands.run("pwd; id -u", user="root").stdout == "/root\n0\n"
    assert sandbox.commands.run("pwd; id -u", user="whoever").stdout == "/home/user\n1000\n"
    sandbox.kill()


def test_a_folder_that_is_not_there_is_the_callers_mistake(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidArgumentException, match="does not exist"):
        sandbox.commands.run("true", cwd="/no/such/folder")


def test_input_reaches_the_command_until_it_is_closed(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "one\n")
    sandbox.commands.send_stdin(handle.pid, "two\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\ntwo\n"


def test_a_command_without_input_reads_an_end_at_once(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("cat; echo over", timeout=10).stdout == "over\n"
    handle = sandbox.commands.run("sleep 60", background=True)
    with pytest.raises(SandboxException, match="stdin not enabled"):
        sandbox.commands.send_stdin(handle.pid, "lost")


def test_a_timeout_ends_the_call_and_the_command(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 41.5 & sleep 41.5", timeout=0.5)
    count = "grep -lxz '[4]1.5' /proc/[0-9]*/cmdline 2>/dev/null | wc -l"
    eventually(lambda: sandbox.commands.run(count).stdout == "0\n")
    assert sandbox.commands.list() == []


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


def test_a_daemon_outlives_the_command_that_started_it(sandbox: Sandbox) -> None:
    sandbox.commands.run("setsid sleep 77.7 >/dev/null 2>&1 </dev/null & echo started")
    sandbox.commands.run("true")
    assert sandbox.commands.run("grep -lxz '[7]7.7' /proc/[0-9]*/cmdline || true").stdout


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


async def test_many_commands_stream_at_once(service: Service) -> None:
    sandbox = await AsyncSandbox.create(**service.sdk)
    runs = [sandbox.commands.run(f"sleep 0.1; echo {number}") for number in range(40)]
    done = await asyncio.gather(*runs)
    assert [run.stdout for run in done] == [f"{number}\n" for number in range(40)]
    await sandbox.kill()
