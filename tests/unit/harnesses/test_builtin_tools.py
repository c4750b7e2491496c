"""The built-in agent's tools: what they do, and what a model reads of each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swerl.core.sandbox import Limits
from swerl.harnesses._builtin_tools import EDITOR, Shell, Tools
from swerl.sandboxes import local

from .plain import calls, edit, use


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo out; echo err >&2", "out\nerr"),
        ("true", "ok"),
        ("echo no; exit 3", "no\nexit code 3"),
        ("pwd | xargs basename", "{name}"),
    ],
)
async def test_bash_answers_with_what_the_command_printed(
    tmp_path: Path, command: str, expected: str
) -> None:
    assert await calls(tmp_path, use("bash", command=command)) == [
        expected.format(name=tmp_path.name)
    ]


async def test_the_middle_of_a_long_output_is_left_out(tmp_path: Path) -> None:
    (text,) = await calls(tmp_path, use("bash", command="seq 9999"))
    assert text.startswith("1\n2\n3\n")
    assert text.endswith("9999")
    assert "characters left out" in text


async def test_old_str_must_occur_exactly_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\ny = 2\n")
    missing, twice, empty, once = await calls(
        tmp_path,
        edit("str_replace", path="a.py", old_str="z", new_str="w"),
        edit("str_replace", path="a.py", old_str="x = 1", new_str="x = 3"),
        edit("str_replace", path="a.py", old_str="", new_str="w"),
        edit("str_replace", path="a.py", old_str="y = 2\n"),
    )
    assert "does not occur" in missing
    assert "occurs 2 times" in twice
    assert "does not occur" in empty
    assert once == "ok"
    assert (tmp_path / "a.py").read_text() == "x = 1\nx = 1\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_a_change_is_in_its_place_and_keeps_the_files_line_ends(
    tmp_path: Path, end: str
) -> None:
    (tmp_path / "a.py").write_bytes(f"one{end}two".encode())
    *changes, view = await calls(
        tmp_path,
        edit("insert", path="a.py", insert_line=1, new_str="middle"),
        edit("insert", path="a.py", insert_line=99, new_str="last\n"),
        edit("insert", path="a.py", insert_line=0, new_str="first"),
        edit("str_replace", path="a.py", old_str="one\nmiddle", new_str=f"1{end}2"),
        edit("view", path="a.py"),
    )
    assert changes == ["ok"] * 4
    assert view.splitlines()[1:3] == ["     2\t1", "     3\t2"]
    wanted = end.join(("first", "1", "2", "two", "last", ""))
    assert (tmp_path / "a.py").read_bytes() == wanted.encode()


async def test_view_numbers_lines_and_lists_folders(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/a.py").write_text("one\ntwo\nthree\n")
    (tmp_path / ".hidden").write_text("")
    whole, part, listing = await calls(
        tmp_path,
        edit("view", path="pkg/a.py"),
        edit("view", path=str(tmp_path / "pkg/a.py"), view_range=[2, -1]),
        edit("view", path="."),
    )
    assert whole.split() == ["1", "one", "2", "two", "3", "three"]
    assert part.split() == ["2", "two", "3", "three"]
    assert listing.splitlines() == [str(tmp_path / p) for p in ("", "pkg", "pkg/a.py")]


async def test_create_refuses_what_exists_and_makes_parents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    refused, folder, made = await calls(
        tmp_path,
        edit("create", path="a.py", file_text="y"),
        edit("create", path=".", file_text="y"),
        edit("create", path="new/b.py", file_text="z"),
    )
    assert "exists" in refused
    assert "exists" in folder
    assert made == "ok"
    assert (tmp_path / "a.py").read_text() == "x"
    assert (tmp_path / "new/b.py").read_text() == "z"


@pytest.mark.parametrize(
    "call",
    [
        lambda: use("python", code="1"),
        lambda: use("bash"),
        lambda: use("bash", command=["ls"]),
        lambda: use("bash", command="a\0b"),
        lambda: edit("undo", path="a.py"),
        lambda: edit("view"),
        lambda: edit("view", path=""),
        lambda: edit("view", path="missing.py"),
        lambda: edit("view", path="a.py", view_range="1"),
        lambda: edit("view", path="a.bin"),
        lambda: edit("create", path="b.py"),
        lambda: edit("str_replace", path="missing.py", old_str="a"),
        lambda: edit("insert", path="a.py", insert_line="first", new_str="x"),
    ],
)
async def test_a_wrong_call_is_answered_with_text_not_an_end(
    tmp_path: Path, call: Callable[[], dict[str, Any]]
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    (text,) = await calls(tmp_path, call())
    assert text.startswith("error: ")


def bash(command: str) -> dict[str, Any]:
    return use("bash", command=command)


async def test_folder_and_exported_variables_last_from_call_to_call(tmp_path: Path) -> None:
    (tmp_path / "sub dir").mkdir()
    _, where, _, failed, after = await calls(
        tmp_path,
        bash("cd 'sub dir' && export A=\"1 '2'\" B=3"),
        bash('basename "$PWD"; echo "$A $B"'),
        bash("unset B; cd ..; LOCAL=5"),
        bash("export C=6; exit 4"),
        bash('basename "$PWD"; echo "[$B$LOCAL$C]"'),
    )
    assert where == "sub dir\n1 '2' 3"
    assert failed == "exit code 4"
    assert after == f"{tmp_path.name}\n[6]"
    assert [path.name for path in tmp_path.iterdir()] == ["sub dir"]


async def test_a_call_starts_no_program_of_its_own() -> None:
    backend = local.build(local.Options())
    async with backend.open("host", Limits(), workdir="/repo") as sandbox:
        shell = Shell(sandbox, "/repo", timeout_s=60)
        pids = [int(await shell.run("echo $$")) for _ in range(3)]
        # A pid namespace numbers its processes in the order of their starts.
        assert pids[2] - pids[1] == pids[1] - pids[0] == 1
        assert await shell.run("export A='1\n2'; echo a\0b") == "ab"
        assert await shell.run('echo "[$A]"') == "[1\n2]"


async def test_a_command_that_is_stopped_leaves_folder_and_variables_as_they_were(
    tmp_path: Path,
) -> None:
    (tmp_path / "sub").mkdir()
    _, stopped, after = await calls(
        tmp_path,
        bash("export A=1"),
        bash("cd sub; export A=2; exec sleep 20"),
        bash('basename "$PWD"; echo $A'),
        tool_timeout_s=0.5,
    )
    assert stopped == "timed out after 0.5 s"
    assert after == f"{tmp_path.name}\n1"


async def test_a_command_longer_than_an_argument_may_be_is_run(tmp_path: Path) -> None:
    text = "x" * 300_000
    (said,) = await calls(tmp_path, bash(f"cat >big.txt <<'EOF'\n{text}\nEOF\nwc -c <big.txt"))
    assert said == "300001"


async def test_lines_are_counted_as_other_tools_count_them(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\x0c\u2028still one\r\ntwo\n", newline="")
    shown, _ = await calls(
        tmp_path,
        edit("view", path="a.py", view_range=[2, 2]),
        edit("insert", path="a.py", insert_line=1, new_str="middle"),
    )
    assert shown == "     2\ttwo"
    assert (tmp_path / "a.py").read_bytes().decode() == ("one\x0c\u2028still one\r\nmiddle\ntwo\n")


ODD = r"""
mkfifo pipe; truncate -s 1T huge; printf '\377\376' >binary; mkdir locked; echo x >locked/inside
chmod 0 locked; ln -s loop loop; ln -s nowhere/deep dangling; ln -s / root
ln -s /dev/zero zero; ln -s /dev/full full; ln -s /proc/self/mem memory
"""
PATHS = (
    *("pipe", "huge", "binary", "locked", "locked/inside", "loop", "dangling", "root", "zero"),
    *("full", "memory", "x" * 256, "y/" * 2100, "new\nline", "-rf", "é漢😀", "\ud800", "\0"),
    *("/proc/1/mem", "/proc/sysrq-trigger", "/dev/stdin", "/etc/shadow", "..", "~", "/"),
)


async def test_no_path_that_an_agent_makes_ends_its_run() -> None:
    """An exception would end the Episode as `infra`, so the agent could choose that end."""
    backend = local.build(local.Options())
    limits = Limits(memory_mib=512, num_processes=64, disk_mib=64)
    async with backend.open("host", limits, workdir="/repo") as sandbox:
        await sandbox.run(["bash", "-c", ODD])
        tools = Tools(sandbox, Shell(sandbox, "/repo", 2.0), "/repo")
        for path in PATHS:
            for command in ("view", "create", "str_replace", "insert"):
                fields = {"file_text": "x", "old_str": "x", "new_str": "y", "insert_line": 0}
                text = await tools.use(EDITOR, {"command": command, "path": path, **fields})
                assert text.encode()  # the next request carries it
        assert (await sandbox.run(["echo", "alive"])).text == "alive\n"
