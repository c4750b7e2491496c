"""Conformance of every sandbox backend: commands."""

from __future__ import annotations

import asyncio
import os

import pytest

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError

from .helpers import WORKDIR, sh


async def test_a_command_returns_its_output_and_zero(sandbox: Sandbox) -> None:
    done = await sandbox.run(["sh", "-c", "echo out; echo err >&2"])
    assert (done.exit_code, done.stdout, done.stderr) == (0, b"out\n", b"err\n")
    assert done.duration_s > 0
    assert not done.timed_out
    assert not done.truncated


@pytest.mark.parametrize(
    ("argv", "cwd", "code", "stderr"),
    [
        (["sh", "-c", "exit 37"], None, 37, b""),
        (["sh", "-c", "kill -TERM $$"], None, 128 + 15, b""),
        (["no-such-program"], None, 127, b"no-such-program"),
        ([], None, 126, b"swerl: "),
        (["echo", "nul\0byte"], None, 126, b"swerl: "),
        (["/etc/passwd"], None, 126, b""),
        (["true"], "/no/such/folder", 126, b"/no/such/folder"),
    ],
)
async def test_the_exit_code_is_that_of_a_shell(
    sandbox: Sandbox, argv: list[str], cwd: str | None, code: int, stderr: bytes
) -> None:
    done = await sandbox.run(argv, cwd=cwd)
    assert done.exit_code == code
    assert stderr in done.stderr


async def test_commands_run_in_the_workdir_by_default(sandbox: Sandbox) -> None:
    assert await sh(sandbox, "pwd") == f"{WORKDIR}\n"
    assert await sh(sandbox, "pwd", cwd="/tmp") == "/tmp\n"


async def test_arguments_arrive_unchanged(sandbox: Sandbox) -> None:
    odd = ["", " a ", "newline\nhere", "$HOME", "é漢😀", "\"'\\"]
    done = await sandbox.run(["printf", "%s\\0", *odd])
    assert done.stdout.decode().split("\0")[:-1] == odd


async def test_a_megabyte_of_arguments_arrives(sandbox: Sandbox) -> None:
    words = ["x" * 100_000] * 10
    done = await sandbox.run(["sh", "-c", "echo $# ${#1}", "sh", *words])
    assert done.stdout == b"10 100000\n"


async def test_stdin_is_the_given_bytes_or_empty(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 4096
    assert (await sandbox.run(["wc", "-c"], stdin=data)).stdout.split() == [b"1048576"]
    assert (await sandbox.run(["cat"], timeout_s=5)).stdout == b""


async def test_the_environment_has_nothing_of_the_host(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    text = await sh(sandbox, "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
    assert "hunter2" not in text
    names = {line.partition("=")[0] for line in text.splitlines()}
    assert {"PATH", "HOME", "USER"} <= names
    assert not names & set(os.environ) - {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "PWD", "OLDPWD", "SHLVL", "_")
    }


async def test_given_environment_overrides_the_default(sandbox: Sandbox) -> None:
    text = await sh(sandbox, 'echo "$A $HOME"', env={"A": "1 2", "HOME": "/tmp"})
    assert text == "1 2 /tmp\n"


async def test_the_agent_is_an_ordinary_user_with_a_home(sandbox: Sandbox) -> None:
    assert await sh(sandbox, "id -u; id -un; touch ~/.rc && echo yes") == "1000\nagent\nyes\n"


async def test_root_is_accepted_and_an_unknown_user_refused(sandbox: Sandbox) -> None:
    text = await sh(
        sandbox, "id -u; echo ~; touch /root/x; grep CapEff /proc/self/status", user="root"
    )
    assert text.split() == ["0", "/root", "CapEff:", "0000000000000000"]
    with pytest.raises(SandboxError, match="nobody-knows"):
        await sandbox.run(["true"], user="nobody-knows")


async def test_commands_run_concurrently(sandbox: Sandbox) -> None:
    script = f"touch {WORKDIR}/$0; until [ -e {WORKDIR}/$1 ]; do sleep 0.01; done; echo $0"
    runs = [
        sandbox.run(["sh", "-c", script, me, other], timeout_s=10)
        for me, other in (("a", "b"), ("b", "c"), ("c", "a"))
    ]
    assert [done.stdout for done in await asyncio.gather(*runs)] == [b"a\n", b"b\n", b"c\n"]


async def test_python_and_git_work(sandbox: Sandbox) -> None:
    await sh(
        sandbox, "git init -q . && echo 1 > f && git add f && git commit -qm one && echo 2 > f"
    )
    assert "+2" in await sh(sandbox, "git diff")
    assert await sh(sandbox, "python3 -c 'import json, ssl, sqlite3; print(6 * 7)'") == "42\n"


async def test_a_background_process_outlives_its_command(sandbox: Sandbox) -> None:
    await sh(sandbox, "sleep 60 >/dev/null 2>&1 & echo $! > pid")
    assert await sh(sandbox, "kill -0 $(cat pid) && echo alive") == "alive\n"


async def test_a_background_process_that_holds_the_output_does_not_block_its_command(
    sandbox: Sandbox,
) -> None:
    done = await sandbox.run(["sh", "-c", "sleep 60 & echo done"], timeout_s=10)
    assert (done.exit_code, done.stdout) == (0, b"done\n")
