"""What every sandbox backend must do, whichever it is."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

import pytest

from swerl.errors import SandboxError, SandboxLostError
from swerl.interfaces import Limits, Mount, Sandbox, SandboxBackend

from .conftest import LIMITS, WORKDIR


async def sh(sandbox: Sandbox, script: str, **options: object) -> str:
    """Run a shell script that must succeed and return what it prints."""
    done = await sandbox.run(["sh", "-c", script], timeout_s=20, **options)  # type: ignore[arg-type]
    assert done.exit_code == 0, done
    return done.stdout.decode()


# Commands


async def test_a_command_returns_its_output_and_zero(sandbox: Sandbox) -> None:
    done = await sandbox.run(["sh", "-c", "echo out; echo err >&2"])
    assert (done.exit_code, done.stdout, done.stderr) == (0, b"out\n", b"err\n")
    assert done.duration_s > 0
    assert not done.timed_out
    assert not done.truncated


async def test_exit_codes_come_through(sandbox: Sandbox) -> None:
    assert (await sandbox.run(["sh", "-c", "exit 37"])).exit_code == 37


async def test_death_by_a_signal_is_128_plus_its_number(sandbox: Sandbox) -> None:
    assert (await sandbox.run(["sh", "-c", "kill -TERM $$"])).exit_code == 143


async def test_a_missing_program_is_127_and_says_which(sandbox: Sandbox) -> None:
    done = await sandbox.run(["no-such-program"])
    assert done.exit_code == 127
    assert b"no-such-program" in done.stderr


async def test_a_file_that_is_no_program_is_126(sandbox: Sandbox) -> None:
    await sandbox.write(f"{WORKDIR}/plain", b"text")
    assert (await sandbox.run([f"{WORKDIR}/plain"])).exit_code == 126


async def test_a_missing_folder_to_run_in_is_126(sandbox: Sandbox) -> None:
    done = await sandbox.run(["true"], cwd="/no/such/folder")
    assert done.exit_code == 126
    assert b"/no/such/folder" in done.stderr


async def test_commands_run_in_the_workdir_unless_told(sandbox: Sandbox) -> None:
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


async def test_stdin_is_what_was_given_and_else_empty(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 4096
    assert (await sandbox.run(["wc", "-c"], stdin=data)).stdout.split() == [b"1048576"]
    assert (await sandbox.run(["cat"], timeout_s=5)).stdout == b""


async def test_the_environment_holds_nothing_of_the_host(
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


async def test_given_environment_is_added_and_wins(sandbox: Sandbox) -> None:
    text = await sh(sandbox, 'echo "$A $HOME"', env={"A": "1 2", "HOME": "/tmp"})
    assert text == "1 2 /tmp\n"


async def test_the_agent_is_an_ordinary_user_with_a_home(sandbox: Sandbox) -> None:
    assert await sh(sandbox, "id -u; id -un; touch ~/.rc && echo yes") == "1000\nagent\nyes\n"


async def test_root_is_a_user_too_and_an_unknown_one_is_refused(sandbox: Sandbox) -> None:
    text = await sh(
        sandbox, "id -u; echo ~; touch /root/x; grep CapEff /proc/self/status", user="root"
    )
    assert text.split() == ["0", "/root", "CapEff:", "0000000000000000"]
    with pytest.raises(SandboxError, match="nobody-knows"):
        await sandbox.run(["true"], user="nobody-knows")


async def test_commands_run_at_the_same_time(sandbox: Sandbox) -> None:
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


async def test_a_background_process_with_the_output_does_not_hold_its_command(
    sandbox: Sandbox,
) -> None:
    done = await sandbox.run(["sh", "-c", "sleep 60 & echo done"], timeout_s=10)
    assert (done.exit_code, done.stdout) == (0, b"done\n")


# Time, output, cancellation


async def test_a_timeout_is_124_and_keeps_what_was_printed(sandbox: Sandbox) -> None:
    done = await sandbox.run(["sh", "-c", "echo early; sleep 60"], timeout_s=0.15)
    assert (done.exit_code, done.timed_out, done.stdout) == (124, True, b"early\n")


DAEMONS = """
sleep 61 &
setsid sleep 61 &
(setsid sh -c 'sleep 61 & sleep 61' &)
python3 -c '
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execlp("sleep", "sleep", "61")
    os._exit(0)
os.wait()'
sleep 61
"""


async def processes(sandbox: Sandbox, words: str) -> int:
    """Count the processes with exactly this command line."""
    script = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done | grep -cx \"$0 \""
    return int((await sandbox.run(["sh", "-c", script, words])).stdout)


async def until(sandbox: Sandbox, words: str, count: int) -> None:
    """Wait until as many processes with this command line run."""
    async with asyncio.timeout(10):
        while await processes(sandbox, words) != count:  # noqa: ASYNC110  no event tells
            await asyncio.sleep(0.005)


async def test_a_timeout_kills_daemons_of_other_sessions_too(sandbox: Sandbox) -> None:
    bystander = asyncio.ensure_future(sandbox.run(["sleep", "62"]))
    victim = asyncio.ensure_future(sandbox.run(["sh", "-c", DAEMONS], timeout_s=1.0))
    await until(sandbox, "sleep 61", 6)
    assert (await victim).timed_out
    assert await processes(sandbox, "sleep 61") == 0
    assert await processes(sandbox, "sleep 62") == 1
    bystander.cancel()


async def test_cancelling_a_run_kills_the_command(sandbox: Sandbox) -> None:
    run = asyncio.ensure_future(sandbox.run(["sh", "-c", "setsid sleep 63 & sleep 63"]))
    await until(sandbox, "sleep 63", 2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(sandbox, "sleep 63", 0)


async def test_output_over_the_cap_is_dropped_without_a_deadlock(sandbox: Sandbox) -> None:
    script = "head -c 3000000 /dev/zero; head -c 700000 /dev/zero >&2; exit 3"
    done = await sandbox.run(["sh", "-c", script], timeout_s=20)
    assert (done.exit_code, done.truncated) == (3, True)
    assert (len(done.stdout), len(done.stderr)) == (1 << 19, 1 << 19)


async def test_output_up_to_the_cap_is_whole(sandbox: Sandbox) -> None:
    done = await sandbox.run(["head", "-c", str(1 << 19), "/dev/zero"], timeout_s=20)
    assert (len(done.stdout), done.truncated) == (1 << 19, False)


async def test_endless_output_ends_at_the_timeout(sandbox: Sandbox) -> None:
    done = await sandbox.run(["yes"], timeout_s=0.2)
    assert (done.timed_out, done.truncated) == (True, True)


# Files


@pytest.mark.parametrize(
    "name", ["plain", "with space", "new\nline", "é漢😀", "-rf", "a/deep/er/path"]
)
async def test_files_keep_their_bytes_whatever_their_name(sandbox: Sandbox, name: str) -> None:
    data = bytes(range(256))
    await sandbox.write(f"{WORKDIR}/{name}", data)
    assert await sandbox.read(f"{WORKDIR}/{name}") == data
    assert (await sandbox.run(["cat", f"{WORKDIR}/{name}"])).stdout == data


async def test_twenty_megabytes_go_in_and_out(sandbox: Sandbox) -> None:
    data = os.urandom(20 << 20)
    await sandbox.write("/tmp/big", data)
    assert await sandbox.read("/tmp/big") == data
    assert int(await sh(sandbox, "stat -c %s /tmp/big")) == 20 << 20


async def test_writing_again_replaces_the_whole_file(sandbox: Sandbox) -> None:
    await sandbox.write("f", b"a long first text")
    await sandbox.write("f", b"short")
    assert await sandbox.read("f") == b"short"


async def test_a_written_file_belongs_to_the_agent(sandbox: Sandbox) -> None:
    await sandbox.write(f"{WORKDIR}/new/f", b"1")
    assert (
        await sh(sandbox, "echo 2 >> new/f; touch new/g; stat -c %U new new/f") == "agent\nagent\n"
    )


async def test_a_missing_file_is_file_not_found(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        await sandbox.read("/no/such/file")


@pytest.mark.parametrize("path", ["/tmp", "/dev/zero", "/tmp/pipe"])
async def test_only_plain_files_can_be_read_and_written(sandbox: Sandbox, path: str) -> None:
    await sh(sandbox, "mkfifo /tmp/pipe")
    with pytest.raises(SandboxError):
        await sandbox.read(path)
    with pytest.raises(SandboxError):
        await sandbox.write(path, b"x")


@pytest.fixture
def host_secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a host file that no sandbox may reach."""
    path = tmp_path_factory.mktemp("host") / "secret"
    path.write_text("host secret")
    path.chmod(0o644)
    return str(path)


async def test_links_do_not_lead_out(sandbox: Sandbox, host_secret: str) -> None:
    up = "/".join([".."] * 20)
    links = {
        "absolute": host_secret,
        "climbing": up + host_secret,
        "magic": "/proc/1/root" + host_secret,
    }
    for name, target in links.items():
        await sh(sandbox, f"ln -s {target} /tmp/{name}")
        with pytest.raises((FileNotFoundError, SandboxError)):
            await sandbox.read(f"/tmp/{name}")
    await sh(sandbox, f"ln -s {os.path.dirname(host_secret)} /tmp/folder")  # noqa: PTH120
    with pytest.raises((FileNotFoundError, SandboxError)):
        await sandbox.write("/tmp/folder/secret", b"overwritten")
    assert open(host_secret).read() == "host secret"  # noqa: PTH123, ASYNC230, SIM115


async def test_dots_do_not_lead_out(sandbox: Sandbox, host_secret: str) -> None:
    climbing = "/tmp" + "/.." * 20 + host_secret
    with pytest.raises(FileNotFoundError):
        await sandbox.read(climbing)
    await sandbox.write(climbing, b"inside")
    assert open(host_secret).read() == "host secret"  # noqa: PTH123, ASYNC230, SIM115
    assert await sandbox.read(host_secret) == b"inside"


async def test_a_link_is_followed_inside(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkdir real && ln -s /testbed/real link && echo hi > real/f")
    assert await sandbox.read(f"{WORKDIR}/link/f") == b"hi\n"


async def test_a_read_only_mount_shows_a_host_folder(
    backend: SandboxBackend, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tool")
    (folder / "f").write_text("tool")
    async with backend.open(
        "host", LIMITS, workdir=WORKDIR, mounts=[Mount(folder, "/opt/tool")]
    ) as sandbox:
        assert await sh(sandbox, "cat /opt/tool/f") == "tool"
        assert (await sandbox.run(["touch", "/opt/tool/g"])).exit_code == 1
        with pytest.raises(SandboxError):
            await sandbox.write("/opt/tool/f", b"x")
    assert (folder / "f").read_text() == "tool"


# Isolation


async def test_there_is_no_network_but_loopback(sandbox: Sandbox) -> None:
    assert await sh(sandbox, "ls /proc/sys/net/ipv4/conf") == "all\ndefault\nlo\n"
    assert len((await sh(sandbox, "cat /proc/net/route")).splitlines()) <= 1


async def test_the_hosts_loopback_cannot_be_reached(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        done = await sandbox.run(["python3", "-c", script])
    assert b"ConnectionRefusedError" in done.stderr


async def test_the_hosts_abstract_sockets_cannot_be_reached(sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        name = f"\0swerl-test-{os.getpid()}"
        server.bind(name)
        server.listen()
        script = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        done = await sandbox.run(["python3", "-c", script])
    assert b"ConnectionRefusedError" in done.stderr


async def test_host_folders_are_hidden(sandbox: Sandbox, host_secret: str) -> None:
    assert (await sandbox.run(["cat", host_secret])).exit_code == 1
    assert (await sandbox.run(["cat", "/etc/shadow"])).exit_code == 1
    assert await sh(sandbox, "ls -A /home") == "agent\n"
    here = os.path.dirname(__file__)  # noqa: PTH120
    assert (await sandbox.run(["ls", here])).exit_code == 2


async def test_host_processes_are_hidden(sandbox: Sandbox) -> None:
    pids = [int(name) for name in (await sh(sandbox, "ls /proc")).split() if name.isdigit()]
    assert len(pids) <= 5
    assert (await sandbox.run(["kill", "-0", str(os.getpid())])).exit_code == 1


async def test_programs_of_the_host_cannot_be_changed(sandbox: Sandbox) -> None:
    for path in ("/usr/bin/env", "/usr/new"):
        done = await sandbox.run(["sh", "-c", f"echo x >> {path}"], user="root")
        assert done.exit_code != 0
        assert b"Read-only" in done.stderr or b"denied" in done.stderr


async def test_kernel_settings_cannot_be_changed(sandbox: Sandbox) -> None:
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/swappiness"):
        assert (await sandbox.run(["sh", "-c", f"cat {path} > {path}"], user="root")).exit_code != 0


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_no_user_has_a_capability_or_can_gain_one(sandbox: Sandbox, user: str) -> None:
    text = await sh(sandbox, "grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status", user=user)
    facts = dict(line.split(":\t") for line in text.splitlines())
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(facts[kind], 16) == 0
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize(
    "command",
    [
        ["mount", "-t", "tmpfs", "none", "/tmp"],
        ["unshare", "-Ur", "true"],
        ["chroot", "/tmp"],
        ["python3", "-c", "import socket; socket.socket(40, socket.SOCK_STREAM)"],
        ["python3", "-c", "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"],
        ["mknod", "/tmp/disk", "b", "8", "0"],
    ],
    ids=["mount", "new-namespace", "chroot", "vsock", "raw-socket", "device-node"],
)
async def test_powers_are_refused(sandbox: Sandbox, command: list[str]) -> None:
    done = await sandbox.run(command, user="root", timeout_s=10)
    assert done.exit_code != 0
    assert b"not permitted" in done.stderr or b"denied" in done.stderr


async def test_sandboxes_share_nothing(backend: SandboxBackend) -> None:
    async with (
        backend.open("host", LIMITS, workdir=WORKDIR) as one,
        backend.open("host", LIMITS, workdir=WORKDIR) as two,
    ):
        assert one.id != two.id
        await sh(one, "echo 1 > f; echo 1 > /tmp/f; echo 1 > ~/f; sleep 64 >/dev/null 2>&1 &")
        assert await sh(two, "ls /testbed /home/agent /tmp | grep -c '^f$' || true") == "0\n"
        assert await processes(two, "sleep 64") == 0
    async with backend.open("host", LIMITS, workdir=WORKDIR) as three:
        assert await sh(three, "ls -A") == ""


# Limits


def require_process_limit(sandbox: Sandbox) -> None:
    """Skip where neither a cgroup nor, because the kernel spares root, an rlimit holds."""
    if "pids" not in getattr(sandbox, "limits", {"pids"}) and os.geteuid() == 0:
        pytest.skip("root without a writable cgroup has no process limit")


async def test_a_memory_bomb_dies_alone(sandbox: Sandbox) -> None:
    script = "x = bytearray(); \nwhile True: x += bytes(1 << 24)"
    done = await sandbox.run(["python3", "-c", script], timeout_s=30)
    assert done.exit_code != 0
    assert not done.timed_out
    assert await sh(sandbox, "echo still here") == "still here\n"


async def test_a_fork_bomb_is_contained(sandbox: Sandbox) -> None:
    require_process_limit(sandbox)
    done = await sandbox.run(["sh", "-c", "b() { b | b & }; b; sleep 60"], timeout_s=0.2)
    assert done.timed_out
    assert await sh(sandbox, "echo still here") == "still here\n"


async def test_the_disk_fills_up_at_its_limit(sandbox: Sandbox) -> None:
    script = "head -c 400000000 /dev/zero > /tmp/big"
    done = await sandbox.run(["sh", "-c", script], timeout_s=30)
    assert done.exit_code != 0
    with pytest.raises(SandboxError) as raised:
        await sandbox.write("/tmp/more", bytes(8 << 20))
    assert "disk_mib" in raised.value.hint
    await sh(sandbox, "rm /tmp/big && echo x > /tmp/small")


async def test_a_sandbox_ends_with_its_lifetime(backend: SandboxBackend) -> None:
    limits = Limits(memory_mib=128, num_processes=16, disk_mib=16, lifetime_s=0.3)
    async with backend.open("host", limits, workdir=WORKDIR) as sandbox:
        with pytest.raises(SandboxLostError, match="lifetime"):
            await sandbox.run(["sleep", "60"], timeout_s=20)
        with pytest.raises(SandboxLostError):
            await sandbox.read("/etc/passwd")


# The end


async def test_closing_kills_everything(backend: SandboxBackend) -> None:
    token = f"{time.time():.6f}"
    async with backend.open("host", LIMITS, workdir=WORKDIR) as sandbox:
        await sh(sandbox, f"setsid sleep 1{token} >/dev/null 2>&1 &")
        running = asyncio.ensure_future(sandbox.run(["sleep", f"2{token}"]))
        await until(sandbox, f"sleep 2{token}", 1)
        assert host_processes(token)
    assert not host_processes(token)
    with pytest.raises(SandboxLostError):
        await running


async def test_a_closed_sandbox_says_so(backend: SandboxBackend) -> None:
    async with backend.open("host", LIMITS, workdir=WORKDIR) as sandbox:
        pass
    with pytest.raises(SandboxLostError):
        await sandbox.run(["true"])
    with pytest.raises(SandboxLostError):
        await sandbox.read("/etc/passwd")


async def test_leaving_twice_is_safe(backend: SandboxBackend) -> None:
    context = backend.open("host", LIMITS, workdir=WORKDIR)
    sandbox = await context.__aenter__()
    close = getattr(sandbox, "close", None)
    if close:
        await asyncio.gather(close(), close())
    await context.__aexit__(None, None, None)


async def test_an_error_in_the_body_closes_and_comes_out(backend: SandboxBackend) -> None:
    token = f"{time.time():.6f}"
    with pytest.raises(ZeroDivisionError):
        async with backend.open("host", LIMITS, workdir=WORKDIR) as sandbox:
            await sh(sandbox, f"sleep 3{token} >/dev/null 2>&1 &")
            raise ZeroDivisionError
    assert not host_processes(token)


async def test_cancelling_while_it_opens_leaves_nothing(backend: SandboxBackend) -> None:
    async def hold() -> None:
        async with backend.open("host", LIMITS, workdir=WORKDIR):
            await asyncio.sleep(60)

    before = host_processes("_spawner")
    for wait_s in (0.0, 0.001, 0.005, 0.05):
        task = asyncio.ensure_future(hold())
        await asyncio.sleep(wait_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert host_processes("_spawner") <= before


async def test_sixteen_open_at_once(backend: SandboxBackend) -> None:
    async def one(number: int) -> bytes:
        async with backend.open("host", LIMITS, workdir=WORKDIR) as sandbox:
            await sandbox.write("f", str(number).encode())
            return (await sandbox.run(["cat", "/f"])).stdout

    answers = await asyncio.gather(*(one(number) for number in range(16)))
    assert answers == [str(number).encode() for number in range(16)]


def host_processes(words: str) -> set[int]:
    """Return the host's processes with these words on their command line, zombies left out."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:  # noqa: PTH123
                if words.encode() in file.read():
                    found.add(int(name))
        except OSError:
            continue
    return found


# The way to the gateway


class Echo:
    """A listener that greets every connection with its name."""

    def __init__(self, name: bytes) -> None:
        self.name = name

    async def attach(self, sock: socket.socket) -> None:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(self.name)
            writer.close()

        self.server = await asyncio.start_server(greet, sock=sock)


GREETED = "import socket,sys; h, p = sys.argv[1].split('/')[2].split(':'); "
GREETED += "print(socket.create_connection((h, int(p)), 5).recv(99).decode())"


async def test_listeners_of_two_sandboxes_do_not_mix(backend: SandboxBackend) -> None:
    async with (
        backend.open("host", LIMITS, workdir=WORKDIR) as one,
        backend.open("host", LIMITS, workdir=WORKDIR) as two,
    ):
        for sandbox, name in ((one, "one"), (two, "two")):
            listener = Echo(name.encode())
            url = await sandbox.expose(listener)
            assert url.startswith("http://127.0.0.1:")
            done = await sandbox.run(["python3", "-c", GREETED, url], timeout_s=10)
            assert done.stdout.decode() == f"{name}\n", done
            listener.server.close()


async def test_one_sandbox_takes_several_listeners(sandbox: Sandbox) -> None:
    listeners = [Echo(b"first"), Echo(b"second")]
    urls = [await sandbox.expose(listener) for listener in listeners]
    assert len(set(urls)) == 2
    for url, listener in zip(urls, listeners, strict=True):
        done = await sandbox.run(["python3", "-c", GREETED, url], timeout_s=10)
        assert done.stdout.strip() == listener.name, done
        listener.server.close()


async def test_an_exposed_port_is_not_open_on_the_host(sandbox: Sandbox) -> None:
    listener = Echo(b"inside only")
    url = await sandbox.expose(listener)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    listener.server.close()


async def test_a_kill_from_outside_is_a_lost_sandbox(sandbox: Sandbox) -> None:
    pid = getattr(sandbox, "pid", 0)
    if not pid:
        pytest.skip("this backend's first process is not on this machine")
    running = asyncio.ensure_future(sandbox.run(["sleep", "60"]))
    await sandbox.run(["true"])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxLostError, match="killed"):
        await running
