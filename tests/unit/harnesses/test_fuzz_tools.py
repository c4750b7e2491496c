"""Whatever an agent asks the built-in tools for, and whatever files it makes, is answered by text.

Every call runs in a real sandbox. An exception of a call would end the Episode as `infra`, so the
agent could choose that end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swerl.core.chat import Json
from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxUnavailableError
from swerl.core.sandbox import Limits
from swerl.harnesses._builtin_tools import BASH, EDITOR, SUBMIT, Shell, Tools
from swerl.sandboxes import local

LIMITS = Limits(memory_mib=512, num_processes=64, disk_mib=64, lifetime_s=300)
WORKDIR = "/repo"
ODD = r"""
mkdir -p odd/deep/er odd/locked && cd odd
mkfifo pipe; echo text >file; : >empty; printf '\377\376' >binary; truncate -s 1T huge
ln -s loop loop; ln -s a b; ln -s b a; ln -s /dev/zero zero; ln -s /dev/full full; ln -s / root
ln -s nowhere dangling; ln -s nowhere/deep deepdangling; ln -s . here; ln -s file link
ln -s /proc/self/mem memory; ln -s /proc/kmsg kmsg; ln -s /etc/passwd passwd
mkdir $'new\nline' '-rf' $'\377' 'é漢😀'; touch $'new\nline/x' -- '-n'
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")' 2>/dev/null
echo x >locked/inside; chmod 0 locked; echo x >unreadable; chmod 0 unreadable; chmod 444 file
"""
NAMES = (
    *("pipe", "file", "empty", "binary", "huge", "loop", "a", "b", "zero", "full", "root", "here"),
    *("dangling", "deepdangling", "link", "memory", "kmsg", "passwd", "new\nline", "-rf", "-n"),
    *("\udcff", "é漢😀", "socket", "locked", "locked/inside", "unreadable", "deep", "new", ""),
    *("/dev/zero", "/dev/null", "/dev/stdin", "/dev/tty", "/proc/1/mem", "/proc/self/fd/0", "/"),
    *("/sys/kernel/uevent_helper", "/proc/sysrq-trigger", "/etc/shadow", "/swerl", "/proc/1/root"),
    *("..", "../..", ".", "~", "x" * 255, "x" * 256, "y/" * 2100, "\0", "a\0b", "\ud800", "$(id)"),
)

texts = st.one_of(
    st.sampled_from(["", "x", "text", "text\n", "\0", "\ud800", "\udcff", "\u2028", "a" * 100_000]),
    st.text(st.characters(), max_size=20),
    st.text("\n\r\t\x1b\u2028\ufeff \"'\\$`", max_size=6),
)
paths = st.one_of(
    st.builds("/".join, st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)),
    st.builds("odd/{}".format, st.sampled_from(NAMES)),
    texts,
)
numbers = st.one_of(st.integers(), st.sampled_from([10**400, -(10**400), 2**63, True, 1.5]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), texts, paths),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
commands = st.sampled_from(["view", "create", "str_replace", "insert", "undo_edit", "", "\ud800"])
honest = st.fixed_dictionaries(
    {"command": commands, "path": paths},
    optional={
        "file_text": texts,
        "old_str": texts,
        "new_str": texts,
        "insert_line": numbers,
        "view_range": st.lists(numbers, max_size=3),
    },
)
FIELDS = ["command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"]
wild = st.dictionaries(st.sampled_from(FIELDS) | texts, values, max_size=5)
quick = st.sampled_from(["true", "echo x >odd/pipe &", "cd odd/deep", "exit 300", "cd /; kill $$"])
shell = st.fixed_dictionaries(
    {"command": st.one_of(quick, st.text("\"'\0\ud800\\\n;&()", max_size=4))}
)
calls = st.one_of(
    st.tuples(st.just(EDITOR), honest),
    st.tuples(st.just(EDITOR), wild),
    st.tuples(st.just(BASH), shell | wild),
    st.tuples(st.just(SUBMIT) | texts, wild),
)


class Ground:
    """A sandbox with odd files and the tools."""

    def __init__(self, runner: asyncio.Runner, sandbox: Sandbox) -> None:
        self.runner = runner
        self.sandbox = sandbox
        self.tools = Tools(sandbox, Shell(sandbox, WORKDIR, 2.0), WORKDIR)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    backend = local.build(local.Options())
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        opened = backend.open("host", LIMITS, workdir=WORKDIR)
        try:
            sandbox = runner.run(stack.enter_async_context(opened))
        except SandboxUnavailableError as error:
            pytest.skip(f"{error}: {error.hint}")
        done = runner.run(sandbox.run(["bash", "-c", ODD], cwd=WORKDIR, timeout_s=20))
        assert b"loop" in runner.run(sandbox.run(["ls", "odd"], cwd=WORKDIR)).stdout, done
        yield Ground(runner, sandbox)
        # It still works after all of this.
        assert runner.run(sandbox.run(["echo", "alive"])).stdout == b"alive\n"
        runner.run(stack.aclose())


bounded = settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@bounded
@given(call=calls)
def test_every_call_is_answered_by_text(ground: Ground, call: tuple[str, dict[str, Json]]) -> None:
    name, arguments = call
    text = ground.runner.run(ground.tools.use(name, arguments))
    assert isinstance(text, str)
    # The next request carries the text.
    text.encode()
