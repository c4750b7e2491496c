"""The canonical diff of Changes, against git; the edits of a diff."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swerl.core.changes import (
    Changes,
    FileEdit,
    FileKind,
    FileMap,
    TreeFile,
    diff,
    edits,
    is_plain,
    leads_out,
    touched,
)


def write(folder: Path, files: FileMap) -> None:
    for path, file in files.items():
        if file is None:
            continue
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.is_link:
            place.symlink_to(os.fsdecode(file.data))
        else:
            place.write_bytes(file.data)
            place.chmod(int(file.kind, 8) & 0o777)


def read(folder: Path) -> dict[str, TreeFile]:
    found = {}
    for place in folder.rglob("*"):
        path = str(place.relative_to(folder))
        if place.is_symlink():
            found[path] = TreeFile(os.fsencode(place.readlink()), FileKind.LINK)
        elif place.is_file():
            runs = place.stat().st_mode & 0o100
            kind = FileKind.EXECUTABLE if runs else FileKind.REGULAR
            found[path] = TreeFile(place.read_bytes(), kind)
    return found


def apply(folder: Path, patch: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=folder,
        input=patch.encode("utf-8", "surrogateescape"),
        capture_output=True,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
    )


NAMES = st.sampled_from(
    [
        *("a", "b.py", "a b", "tab\tname", 'quote".py', "new\nline", "ü", "\udcff", "back\\slash"),
        *("-f", " lead", "trail ", "a => b", "b/x", "with b/inside", "dev", "null", "\x7f"),
    ]
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
LINES = st.sampled_from(
    [b"", b"x", b"y", b"\r", b"x\r", b"--- a/z", b"+++ b/z", b"@@ -1 +1 @@", b"\xff"]
)
TEXTS = st.lists(LINES, max_size=12).map(b"\n".join) | st.binary(max_size=80)
FILES = st.builds(TreeFile, TEXTS, st.sampled_from([FileKind.REGULAR, FileKind.EXECUTABLE]))
LINKS = st.builds(TreeFile, st.sampled_from([b"nowhere", b"../none"]), st.just(FileKind.LINK))
TREES = st.dictionaries(PATHS, FILES | LINKS, max_size=6)


def without_conflicts(tree: dict[str, TreeFile]) -> dict[str, TreeFile]:
    """Leave out each path below another one's file."""
    return {
        path: file
        for path, file in tree.items()
        if not any(path.startswith(other + "/") for other in tree)
    }


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=TREES.map(without_conflicts), after=TREES.map(without_conflicts))
def test_git_makes_the_same_tree_from_the_diff(
    tmp_path_factory: pytest.TempPathFactory,
    before: dict[str, TreeFile],
    after: dict[str, TreeFile],
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    write(folder, before)
    paths = {**before, **after}
    changes = Changes({path: after.get(path) for path in paths}).against(before)
    done = apply(folder, diff(changes)) if changes.files else None
    assert not done or done.returncode == 0, (done.stderr, diff(changes))
    assert read(folder) == after


@pytest.mark.parametrize(
    ("num_lines", "changed", "most"),
    [(200_000, range(77, 78), 500), (3000, range(3000), 60_000)],
    ids=["a line of many", "every line"],
)
def test_a_diff_of_a_large_file_is_as_small_as_its_changes(
    tmp_path: Path, num_lines: int, changed: range, most: int
) -> None:
    lines = [b"a %d\n" % number for number in range(num_lines)]
    old = TreeFile(b"".join(lines))
    for number in changed:
        lines[number] = b"b %d\n" % number
    new = TreeFile(b"".join(lines))
    patch = diff(Changes({"lock": new}, {"lock": old}))
    assert len(patch) < most
    write(tmp_path, {"lock": old})
    assert apply(tmp_path, patch).returncode == 0
    assert read(tmp_path) == {"lock": new}


@pytest.mark.parametrize(
    "path",
    [
        *("", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\0b", "x" * 300),
        *(".git/config", "a/.GIT/x", ".git", ".git /x", ".git./x", "git~1/x", ".g\u200cit/x"),
    ],
)
def test_some_names_are_no_files_of_a_tree(path: str) -> None:
    assert not is_plain(path)
    assert diff(Changes({path: TreeFile(b"x")}, {})) == ""


@pytest.mark.parametrize("path", [".gitignore", "a/.github/x", "git", "a b", "...", ".gitmodules"])
def test_other_names_are(path: str) -> None:
    assert is_plain(path)


@pytest.mark.parametrize(
    ("path", "target", "leads"),
    [
        ("link", b"calc.py", False),
        ("docs/link", b"../calc.py", False),
        ("docs/link", b"../../outside", True),
        ("link", b"/etc/passwd", True),
        ("link", b".git/config", True),
        ("link", b"src/other/../../..", True),
        ("a/b/link", b".././../x", False),
        ("link", b"", True),
    ],
)
def test_links_that_lead_out_are_known(path: str, target: bytes, leads: bool) -> None:
    assert leads_out(path, target) is leads


PATCH = """diff --git a/pkg/a.py b/pkg/a.py
index 111..222 100644
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,3 +1,3 @@ def f():
 one
-two
+TWO
 three
@@ -10,2 +10,3 @@
 ten

+eleven
diff --git a/new.txt b/new.txt
new file mode 100644
--- /dev/null
+++ b/new.txt
@@ -0,0 +1,2 @@
+hello
+world
diff --git a/old.py b/moved.py
similarity index 100%
rename from old.py
rename to moved.py
"""


def test_each_hunk_is_one_edit_and_a_rename_touches_both_sides() -> None:
    assert edits(PATCH) == [
        FileEdit("pkg/a.py", "one\ntwo\nthree\n", "one\nTWO\nthree\n"),
        FileEdit("pkg/a.py", "ten\n\n", "ten\n\neleven\n"),
        FileEdit("new.txt", "", "hello\nworld\n"),
    ]
    assert touched(PATCH) == ("pkg/a.py", "new.txt", "old.py", "moved.py")


NO_NEWLINE = "\\ No newline at end of file\n"


@pytest.mark.parametrize(
    ("patch", "found"),
    [
        (
            '--- "a/\\303\\274"\n+++ "b/\\303\\274"\n@@ -1 +1,2 @@\n--- a\fa\n+++ b/y\r\n+++ b/z\n',
            [FileEdit("ü", "-- a\fa\n", "++ b/y\r\n++ b/z\n")],
        ),
        (
            f"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n one\n-two\n{NO_NEWLINE}+TWO\n",
            [FileEdit("x", "one\ntwo", "one\nTWO\n")],
        ),
        (
            f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-one\n+ONE\n{NO_NEWLINE}"
            "--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
            [FileEdit("x", "one\n", "ONE"), FileEdit("y", "a\n", "b\n")],
        ),
        ("--- a/x\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-one\n", [FileEdit("x", "one\n", "")]),
    ],
    ids=["odd lines", "no newline before", "no newline after", "deleted"],
)
def test_edits_are_read_by_the_counts_of_their_hunks(patch: str, found: list[FileEdit]) -> None:
    assert edits(patch) == found
