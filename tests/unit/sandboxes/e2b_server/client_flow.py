"""What a user's program does with the SDK; written for every version of it.

Runs in the interpreter that holds the version under test: `python client_flow.py URL KEY`.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys

import httpcore
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxQuery,
    TimeoutException,
)


def commands(sandbox: Sandbox) -> None:
    seen: list[str] = []
    done = sandbox.commands.run("echo out; echo err >&2; echo $A", on_stdout=seen.append)
    assert (done.stdout, done.stderr, "".join(seen)) == ("out\n1\n", "err\n", "out\n1\n")
    try:
        sandbox.commands.run("exit 3")
    except CommandExitException as error:
        assert error.exit_code == 3
    try:
        sandbox.commands.run("sleep 20", timeout=1)
    except (TimeoutException, httpcore.ReadTimeout):
        # Old releases give the server no second more than themselves; either may be first.
        pass
    else:
        raise AssertionError("the timeout was not kept")
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    assert handle.pid in [info.pid for info in sandbox.commands.list()]
    sandbox.commands.send_stdin(handle.pid, "in\n")
    assert next(iter(handle))[0] == "in\n"
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    assert again.kill()
    assert not sandbox.commands.kill(handle.pid)


def files(sandbox: Sandbox) -> None:
    data = os.urandom(5 << 20)
    assert sandbox.files.write("deep/f.bin", data).path == "/home/user/deep/f.bin"
    assert bytes(sandbox.files.read("deep/f.bin", format="bytes")) == data
    sandbox.files.write("stream", io.BytesIO(b"abc"))
    assert sandbox.files.read("stream") == "abc"
    sandbox.files.write_files([{"path": "/tmp/a", "data": "1"}, {"path": "b c", "data": b"2"}])
    assert sandbox.files.read("/tmp/a") + sandbox.files.read("b c") == "12"
    assert sorted(entry.name for entry in sandbox.files.list(".")) == ["b c", "deep", "stream"]
    assert sandbox.files.rename("b c", "deep/d").name == "d"
    assert sandbox.files.make_dir("new")
    assert not sandbox.files.make_dir("new")
    sandbox.files.remove("new")
    assert not sandbox.files.exists("new")
    try:
        sandbox.files.read("new")
    except NotFoundException:
        pass
    else:
        raise AssertionError("a file that is not there was read")


def life(sandbox: Sandbox, options: dict[str, str]) -> None:
    assert sandbox.is_running()
    sandbox.set_timeout(200)
    assert sandbox.get_info().metadata == {"flow": "yes"}
    query = SandboxQuery(metadata={"flow": "yes"})
    found = Sandbox.list(query=query, **options).next_items()
    assert [info.sandbox_id for info in found] == [sandbox.sandbox_id]
    assert Sandbox.connect(sandbox.sandbox_id, **options).commands.run("echo x").stdout == "x\n"
    try:
        Sandbox.create(**{**options, "api_key": "e2b_" + "0" * 40})
    except AuthenticationException:
        pass
    else:
        raise AssertionError("a wrong key opened the server")
    assert sandbox.kill()
    assert not sandbox.is_running()
    assert not sandbox.kill()


async def asynchronous(options: dict[str, str]) -> None:
    sandbox = await AsyncSandbox.create(**options)
    done = await asyncio.gather(*(sandbox.commands.run(f"echo {n}") for n in range(10)))
    assert [each.stdout for each in done] == [f"{n}\n" for n in range(10)]
    await sandbox.files.write("a", "b")
    assert await sandbox.files.read("a") == "b"
    await sandbox.kill()


def main(url: str, key: str) -> None:
    options = {"api_url": url, "sandbox_url": url, "api_key": key}
    sandbox = Sandbox.create(timeout=100, metadata={"flow": "yes"}, envs={"A": "1"}, **options)
    commands(sandbox)
    files(sandbox)
    life(sandbox, options)
    asyncio.run(asynchronous(options))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # threads of the SDK that still run at the interpreter's end can abort it
