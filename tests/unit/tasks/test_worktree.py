"""What an agent changed is taken from its sandbox and laid into another one."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swerl.core.changes import Changes, FileKind, TreeFile
from swerl.core.contracts import Sandbox
from swerl.core.sandbox import Exec, Limits
from swerl.sandboxes import local
from swerl.tasks import tree_formats, worktree
from tests.unit.grading._folder_sandbox import FolderSandbox

WORKDIR = "/repo"
SCRIPT = """
git init -q --template= -b main; git config user.name a; git config user.email a@b
printf 'one\\n' >code.py; printf 'pin\\n' >setup.cfg; mkdir pkg; echo a >pkg/a.py; ln -s code.py ln
printf 'build/\\n*.o\\ntarget\\n' >.gitignore; git add -A; git commit -qm base
printf 'pin changed by the image\\n' >setup.cfg; echo object >a.o
"""
Open = Callable[[], AbstractAsyncContextManager[Sandbox]]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A repository of one commit with a change that is not committed."""
    subprocess.run(["sh", "-ec", SCRIPT], cwd=tmp_path, check=True)
    return tmp_path


@pytest.fixture
def opened(image: Path) -> Open:
    backend = local.build(local.Options())
    return lambda: backend.open(f"dir:{image}", Limits(disk_mib=512), workdir=WORKDIR)


@pytest.fixture
async def sandbox(opened: Open) -> AsyncIterator[Sandbox]:
    async with opened() as sandbox:
        yield sandbox


async def sh(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.run(["bash", "-ec", script], cwd=WORKDIR, timeout_s=60)
    assert done.exit_code == 0, done.text
    return done.stdout.decode(errors="surrogateescape")


async def taken(sandbox: Sandbox, script: str) -> worktree.Taken:
    """What is taken after an agent ran a script."""
    start = await worktree.list_tree(sandbox, WORKDIR)
    await sh(sandbox, script)
    found = await worktree.take(sandbox, WORKDIR, start)
    assert found is not None
    return found


async def changed(sandbox: Sandbox, script: str) -> dict[str, bytes | None]:
    files = (await taken(sandbox, script)).changes.files
    return {path: file and file.data for path, file in files.items()}


async def test_nothing_changed(sandbox: Sandbox) -> None:
    assert await changed(sandbox, "cat code.py; mkdir empty") == {}


async def test_new_changed_and_deleted_files_of_every_kind(sandbox: Sandbox) -> None:
    script = "echo two >>code.py; rm -r pkg; echo x >new; chmod +x new; ln -sfn new ln; ln -s a b"
    files = (await taken(sandbox, script)).changes.files
    assert files == {
        "code.py": TreeFile(b"one\ntwo\n"),
        "pkg/a.py": None,
        "new": TreeFile(b"x\n", FileKind.EXECUTABLE),
        "ln": TreeFile(b"new", FileKind.LINK),
        "b": TreeFile(b"a", FileKind.LINK),
    }


@pytest.mark.parametrize(
    "left",
    [
        "git add -A; git commit -qm work",
        "git commit -q --amend -am x; git reflog expire --expire=now --all; git gc -q --prune=now",
        "git update-index --assume-unchanged code.py",
        "git update-index --skip-worktree code.py",
        ": >.git/index.lock",
        "echo nonsense >.git/index",
        "rm -rf .git",
        "git config core.worktree /tmp; git config core.bare true",
        "git config diff.external /bin/true; git config core.autocrlf true",
        "git checkout -q --orphan other",
        "touch -d 2001-01-01 code.py new.py",
    ],
)
async def test_no_state_of_git_and_no_time_hides_a_change(sandbox: Sandbox, left: str) -> None:
    found = await changed(sandbox, f"echo two >>code.py; echo new >new.py; {left}")
    assert found == {"code.py": b"one\ntwo\n", "new.py": b"new\n"}


async def test_an_edit_of_the_same_size_in_the_same_second_is_seen(sandbox: Sandbox) -> None:
    script = "git checkout -q -- code.py; t=$(date -Ins -r code.py); echo uno >code.py"
    assert await changed(sandbox, f"{script}; touch -d $t code.py") == {"code.py": b"uno\n"}


async def test_the_files_of_a_nested_repository_are_taken(sandbox: Sandbox) -> None:
    script = "git init -q inner; echo x >inner/f; (cd inner; git add f); git add inner 2>/dev/null"
    assert await changed(sandbox, f"{script} || true") == {"inner/f": b"x\n"}


async def test_ignored_files_are_taken_while_they_are_small_texts(sandbox: Sandbox) -> None:
    script = """
    mkdir -p build target pkg.egg-info env; echo x >build/mod.py; echo y >target/main.d
    echo m >target/mod.py
    printf 'a\\0b' >build/lib.so; head -c 1100000 /dev/zero | tr '\\0' x >build/large.txt
    echo changed >a.o; echo made >b.o; touch env/pyvenv.cfg; echo z >env/activate
    mkdir -p node_modules/a __pycache__; echo >node_modules/a/i.js; echo >__pycache__/x.pyc
    """
    found = await taken(sandbox, script)
    assert set(found.changes.files) == {"build/mod.py", "target/mod.py", "a.o", "b.o"}
    assert found.num_left == 5


async def test_many_ignored_files_do_not_push_out_a_module(sandbox: Sandbox) -> None:
    script = "mkdir -p build/gen build/own; echo x >build/own/mod.py; cd build/gen; touch {1..2100}"
    files = (await taken(sandbox, script)).changes.files
    assert "build/own/mod.py" in files
    assert len(files) == 2000


async def test_without_git_every_file_counts(sandbox: Sandbox) -> None:
    found = await changed(sandbox, "rm -rf .git .gitignore; mkdir build; echo x >build/mod.py")
    assert found == {".gitignore": None, "build/mod.py": b"x\n"}


async def test_what_is_no_file_is_left_out(sandbox: Sandbox) -> None:
    found = await taken(sandbox, "rm code.py; mkfifo code.py pipe")
    assert (found.changes.files, found.num_left) == ({"code.py": None}, 2)


async def test_large_files_are_read_in_parts_up_to_a_limit(sandbox: Sandbox) -> None:
    found = await changed(sandbox, "head -c 5000001 /dev/urandom >big; cp big /tmp/big")
    assert found["big"] == await sandbox.read("/tmp/big")
    found = await taken(sandbox, "for i in 1 2 3; do head -c 30000000 /dev/zero >zeros$i; done")
    assert set(found.changes.files) == {"zeros1", "zeros2"}
    assert found.num_left == 1


class Liar(FolderSandbox):
    """A sandbox whose programs print something else than they should."""

    def __init__(self, garble: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._garble = garble

    async def run(self, argv: Sequence[str], **options: Any) -> Exec:
        done = await super().run(argv, **options)
        return replace(done, stdout=self._garble(done.stdout))


@pytest.mark.parametrize(
    "garble",
    [
        lambda out: b"",
        lambda out: b"\0" * 1000,
        lambda out: b"\x1f\x8b" + out,
        lambda out: out[: len(out) // 2],
        lambda out: gzip.compress(bytes(200_000_000)),
        lambda out: gzip.compress(b"9 " * 1000 + b"\x000"),
        lambda out: out + out,
    ],
)
async def test_a_broken_or_lying_tool_gives_no_error(
    image: Path, garble: Callable[[bytes], bytes]
) -> None:
    start = await worktree.list_tree(FolderSandbox(), str(image))
    (image / "code.py").write_text("two")
    found = await worktree.take(Liar(garble), str(image), start)
    # An empty list of files is a tree too.
    files = found.changes.files if found else {}
    assert not any(file for path, file in files.items() if path != "code.py")


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200) | st.text("0 fl-:\0TK./a\n", max_size=120).map(str.encode))
def test_output_of_any_kind_is_parsed_or_refused(data: bytes) -> None:
    files = tree_formats.parsed(b"TK", data, ["a", "b"])
    assert files is None or set(files) <= {"a", "b"}
    tree_formats.unpacked(b"TK\n" + data)


async def test_changes_are_compared_with_the_clean_tree(opened: Open) -> None:
    async with opened() as agents:
        script = "touch setup.cfg; echo x >>code.py; rm pkg/a.py; echo n >pkg/b.py"
        changes = (await taken(agents, script)).changes
    async with opened() as clean:
        compared = await worktree.compare(clean, WORKDIR, changes)
    assert "setup.cfg" in changes.files
    assert compared is not None
    assert compared.before == {
        "code.py": TreeFile(b"one\n"),
        "pkg/a.py": TreeFile(b"a\n"),
        "pkg/b.py": None,
    }


async def test_a_large_earlier_file_is_read_in_parts(opened: Open, image: Path) -> None:
    (image / "data").write_bytes(os.urandom(9_000_000))
    async with opened() as clean:
        compared = await worktree.compare(clean, WORKDIR, Changes({"data": None}))
    assert compared is not None and compared.before is not None
    assert compared.before["data"] == TreeFile((image / "data").read_bytes())


@pytest.mark.parametrize(
    "script",
    [
        "echo two >>code.py; rm -r pkg; echo x >new; chmod +x new; ln -sfn new ln; : >empty",
        "rm -r pkg; echo file >pkg; rm code.py; mkdir code.py; echo x >code.py/x",
        "rm ln; mkdir ln; echo x >ln/x; mv pkg other; ln -s other pkg",
        "printf 'a\\0b\\r\\n' >$'new\\nline'; mkdir -- -d ' b '; echo x >./-d/-f; echo y >' b / '",
        "printf x >$'bad\\xff'; printf '\\r\\n' >ü; chmod 755 code.py; mkdir -p a/b; echo >a/b/c",
        "for i in {1..1200}; do echo $i >file$i; done",
    ],
)
async def test_a_laid_tree_equals_the_agents(opened: Open, script: str) -> None:
    state = "find . -name .git -prune -o ! -type d -printf '%p %m %l ' -type f -exec md5sum {} \\;"
    async with opened() as agents:
        changes = (await taken(agents, script)).changes
        wanted = await sh(agents, f"{state} | sort")
    async with opened() as clean:
        compared = await worktree.compare(clean, WORKDIR, changes)
        assert compared is not None
        assert await worktree.lay(clean, WORKDIR, compared) == ()
        assert await sh(clean, f"{state} | sort") == wanted


async def of_kinds(opened: Open, tools: str) -> tuple[dict[str, object], str]:
    """What is taken after changes of every kind, and the tree in which it is laid."""
    edits = """printf 'two\n' >code.py; rm -r pkg; echo x >new; chmod +x new; ln -sfn new ln
    echo y >'a name
of two lines'; mkdir -p d/e; echo é >d/e/ö; mkfifo pipe; echo object2 >a.o; mkdir empty"""
    async with opened() as agents:
        await sh(agents, tools)
        files = (changes := (await taken(agents, edits)).changes).files
    async with opened() as clean:
        await sh(clean, tools)
        compared = await worktree.compare(clean, WORKDIR, changes)
        assert compared is not None
        assert await worktree.lay(clean, WORKDIR, compared) == ()
        state = "find . -name .git -prune -o ! -type d -exec ls -dn {} + | awk '{print $1, $5, $9}'"
        tree = await sh(clean, f"{state} | sort; cat code.py new d/e/* a*")
    return {path: file and (file.data, file.kind) for path, file in files.items()}, tree


@pytest.mark.skipif(not shutil.which("busybox"), reason="busybox is not installed")
async def test_busybox_lists_takes_and_lays_as_other_tools_do(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await of_kinds(opened, "true")
    monkeypatch.setattr(worktree, "_PATH", "export LC_ALL=C PATH=/tmp/busybox\n")
    make_tools = """mkdir /tmp/busybox; ln -s "$(command -v git)" /tmp/busybox/git
    for each in $(busybox --list); do ln -s "$(command -v busybox)" /tmp/busybox/$each; done
    /tmp/busybox/find . -maxdepth 0
    if /tmp/busybox/find . -maxdepth 0 -printf '' 2>/dev/null; then exit 3; fi"""
    files, tree = await of_kinds(opened, make_tools)
    assert {"code.py", "pkg/a.py", "new", "ln", "a.o", "a name\nof two lines"} <= files.keys()
    assert (files, tree) == expected


async def test_nothing_is_laid_through_a_link_or_over_a_file(opened: Open) -> None:
    files = {"out/x": TreeFile(b"x"), "code.py/x": TreeFile(b"x"), "new/x": TreeFile(b"x")}
    async with opened() as clean:
        await sh(clean, "mkdir /tmp/elsewhere; echo y >/tmp/elsewhere/y; ln -s /tmp/elsewhere out")
        changes = Changes({**files, "out/y": None})
        assert await worktree.lay(clean, WORKDIR, changes) == ("out/x", "code.py/x")
        assert await sh(clean, "ls /tmp/elsewhere; cat new/x code.py") == "y\nxone\n"


async def test_times_keep_their_order_and_are_never_older_than_the_start(opened: Open) -> None:
    async with opened() as agents:
        script = "echo x >first; touch -d 1999-01-01 first; echo y >last; touch -d 2099-01-01 last"
        start = await worktree.list_tree(agents, WORKDIR)
        await sh(agents, script)
        found = await worktree.take(agents, WORKDIR, start)
    assert found is not None
    first, last = found.changes.files["first"], found.changes.files["last"]
    assert first is not None and last is not None
    assert start.since_s == first.mtime_s <= last.mtime_s < start.since_s + 300


class Recording:
    """A sandbox that notes the commands that it is asked to run."""

    def __init__(self, inner: Sandbox) -> None:
        self.inner = inner
        self.ran: list[str] = []

    async def run(self, argv: Sequence[str], **options: Any) -> Exec:
        self.ran.append(" ".join(argv))
        return await self.inner.run(argv, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_an_edit_of_plain_files_is_laid_without_a_command(opened: Open) -> None:
    edit = Changes({"code.py": TreeFile(b"two\n"), "pkg/a.py": TreeFile(b"b\n")})
    async with opened() as sandbox:
        compared = await worktree.compare(sandbox, WORKDIR, edit)
        assert compared
        recording: Any = Recording(sandbox)
        assert await worktree.lay(recording, WORKDIR, compared) == ()
        assert await sh(sandbox, "cat code.py pkg/a.py") == "two\nb\n"
    assert recording.ran == []


@pytest.mark.parametrize(
    ("prepare", "path"),
    [("mv pkg /tmp/out; ln -s /tmp/out pkg", "pkg/a.py"), ("ln -sf /tmp/x code.py", "code.py")],
)
async def test_nothing_is_laid_through_a_link_of_the_clean_tree(
    opened: Open, prepare: str, path: str
) -> None:
    async with opened() as sandbox:
        await sh(sandbox, f"echo kept >/tmp/x; {prepare}")
        compared = await worktree.compare(sandbox, WORKDIR, Changes({path: TreeFile(b"new\n")}))
        assert compared
        await worktree.lay(sandbox, WORKDIR, compared)
        assert "new" not in await sh(sandbox, "cat /tmp/x; cat /tmp/out/a.py 2>/dev/null || true")


@pytest.mark.parametrize(
    ("rules", "asks"),
    [
        ("rm .gitignore", False),
        ("true", True),
        ("rm .gitignore; mkdir -p .git/info; echo '*.tmp' >.git/info/exclude", True),
        ("rm .gitignore; mkdir -p .git/info; echo '# none' >.git/info/exclude", False),
        ("rm -r .git .gitignore", True),
    ],
)
async def test_git_is_asked_only_if_there_may_be_rules(
    opened: Open, rules: str, asks: bool
) -> None:
    async with opened() as sandbox:
        await sh(sandbox, rules)
        start = await worktree.list_start(sandbox, WORKDIR, kept=())
        await sh(sandbox, "echo two >code.py; echo x >new.tmp")
        recording: Any = Recording(sandbox)
        taken = await worktree.take(recording, WORKDIR, start)
    assert taken and taken.changes.files["code.py"] == TreeFile(b"two\n")
    assert any("check-ignore" in command for command in recording.ran) is asks


async def test_rules_that_the_agent_writes_count(opened: Open) -> None:
    async with opened() as sandbox:
        await sh(sandbox, "rm .gitignore")
        start = await worktree.list_start(sandbox, WORKDIR, kept=())
        await sh(sandbox, "echo '*.bin' >.gitignore; printf 'a\\0' >big.bin; echo x >new.py")
        taken = await worktree.take(sandbox, WORKDIR, start)
    assert taken and sorted(taken.changes.files) == [".gitignore", "new.py"]
