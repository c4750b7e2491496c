"""Changes: the files that differ between two work trees; writing and reading diffs of them.

A grader takes these files and not a text, because a hostile diff has more than one meaning. The
canonical diff is written from the files: `git apply` of it makes the same tree.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TypeAlias

MAX_PATCH_BYTES = 8 * 2**20
"""Size limit of a graded patch; real fixes are a thousand times smaller."""
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4000, 255
_CONTEXT = 3
"""Unchanged lines around a hunk, as in git."""
_MAX_PAIRS = 1_000_000
"""Above this product of lines, one hunk replaces all; a finer diff would take seconds."""
_INVISIBLE = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
_GIT_NAME = re.compile(r"(\.git|git~1)[ .]*(:.*)?", re.IGNORECASE)
"""Spellings of git's folder on some file system; git refuses all of them in a patch."""
_NO_ID = "0" * 40
_ODD = re.compile(r'[\x00-\x1f\x7f"\\]')
_ENDS = re.compile(r" /|/ | $| b/")
"""Blanks behind which git may see the end of a name that has no quotes."""
_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_UNUSUAL = re.compile(r"//|(?:^|/)\.(?:/|\Z)|/\Z")
"""In a path that pathlib would change."""
_NAME_LINES = ("--- ", "+++ ", "*** ", "Index: ")
_PLAIN_NAME_LINES = ("rename from ", "rename to ", "copy from ", "copy to ")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_ESCAPES = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}
_LETTERS = {ord(letter): code for code, letter in _ESCAPES.items()}


class FileKind(StrEnum):
    """Kind of a file that git can record; the value is git's mode."""

    REGULAR = "100644"
    EXECUTABLE = "100755"
    LINK = "120000"


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One file of a work tree."""

    data: bytes
    """Content; of a link, its target."""
    kind: FileKind = FileKind.REGULAR
    mtime_s: int = field(default=0, compare=False)
    """Time of the last change, in Unix seconds; build tools compare those of files."""

    @property
    def is_link(self) -> bool:
        return self.kind is FileKind.LINK

    @property
    def is_binary(self) -> bool:
        """True if a text diff cannot hold the content."""
        return b"\0" in self.data


FileMap: TypeAlias = Mapping[str, TreeFile | None]
"""Files by path relative to the workdir; None: there is none. Bytes that are no UTF-8 are
surrogates in a path."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The files of a work tree that an agent changed, made or deleted."""

    files: FileMap = field(default_factory=dict)
    """Files afterwards; None if a file was deleted."""
    before: FileMap | None = None
    """The same paths in a clean work tree; None if they have not been read yet."""

    def against(self, before: FileMap) -> Changes:
        """Return those Changes that differ from the clean work tree."""
        different = {path: file for path, file in self.files.items() if file != before.get(path)}
        return Changes(different, {path: before.get(path) for path in different})

    def only(self, files: FileMap) -> Changes:
        """Return Changes with these files instead, and what was there before."""
        return replace(self, files=files).against(self.before or {})

    @property
    def num_bytes(self) -> int:
        return sum(len(path) + len(file.data if file else b"") for path, file in self.files.items())


AgentPatch: TypeAlias = str | Changes
"""An agent's work: its files, or a diff where only a text is known."""


def is_plain(path: str) -> bool:
    """Return True for a relative path of files that git can record, and not git's own ones."""
    parts = path.split("/")
    if len(path) > _MAX_PATH_BYTES or "\0" in path:
        return False
    return all(
        part not in ("", ".", "..") and len(part) <= _MAX_NAME_BYTES and not _is_git(part)
        for part in parts
    )


def leads_out(path: str, target: bytes) -> bool:
    """Return True if a link at `path` may lead out of the work tree or into git's folder.

    `..` counts only at the beginning: behind a name, which may be a link, it can lead anywhere.
    """
    text = target.decode("utf-8", "surrogateescape")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not text or text.startswith("/") or "\0" in text:
        return True
    steps = [part for part in parts if part != ".."]
    if ".." in parts[len(parts) - len(steps) :] or any(map(_is_git, steps)):
        return True
    return len(parts) - len(steps) > path.count("/")


def parents(path: str) -> Iterator[str]:
    """Yield the folders that hold a path, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


def diff(changes: Changes) -> str:
    """Write Changes, whose earlier files are known, as a diff that `git apply` reads.

    A path that git refuses is left out.
    """
    before = changes.before or {}
    # A file cannot be made before the folder in its place has gone, and the other way round.
    deletions: list[str] = []
    others: list[str] = []
    for path in sorted(changes.files):
        old, new = before.get(path), changes.files[path]
        if old == new or not is_plain(path):
            continue
        if old and (new is None or old.is_link != new.is_link):
            deletions.append(_section(path, old, None))
            old = None
        if new:
            others.append(_section(path, old, new))
    return "".join([*deletions, *others])


def without_leftovers(changes: Changes) -> Changes:
    """Leave out binary, then new files, the largest first, until the diff fits MAX_PATCH_BYTES."""
    before = changes.before or {}

    def rank(path: str) -> tuple[bool, int]:
        sides = [file for file in (before.get(path), changes.files[path]) if file]
        return not any(file.is_binary for file in sides), -sum(len(file.data) for file in sides)

    leftovers = [
        path
        for path, file in changes.files.items()
        if file and (before.get(path) is None or not rank(path)[0])
    ]
    huge = {path for path in leftovers if -rank(path)[1] > MAX_PATCH_BYTES}
    files = {path: file for path, file in changes.files.items() if path not in huge}
    total = len(diff(changes.only(files)))
    for path in sorted(set(leftovers) - huge, key=rank):
        if total > MAX_PATCH_BYTES:
            total -= len(diff(changes.only({path: files.pop(path)})))
    return changes.only(files)


def _is_git(name: str) -> bool:
    return bool(_GIT_NAME.fullmatch(_INVISIBLE.sub("", name)))


def _section(path: str, old: TreeFile | None, new: TreeFile | None) -> str:
    lines = [f"diff --git {_quoted('a/' + path)} {_quoted('b/' + path)}"]
    if old and new and old.kind is not new.kind:
        lines += [f"old mode {old.kind}", f"new mode {new.kind}"]
    elif not old and new:
        lines.append(f"new file mode {new.kind}")
    elif old and not new:
        lines.append(f"deleted file mode {old.kind}")
    head = "\n".join(lines) + "\n"
    was, now = old.data if old else b"", new.data if new else b""
    if old and new and was == now:
        return head
    same_kind = f" {new.kind}" if old and new and old.kind is new.kind else ""
    head += f"index {_blob_id(old)}..{_blob_id(new)}{same_kind}\n"
    if was == now:
        return head
    if b"\0" in was or b"\0" in now:
        return head + "GIT binary patch\n" + _literal(now) + "\n" + _literal(was) + "\n"
    sides = ("a/" + path if old else "/dev/null", "b/" + path if new else "/dev/null")
    head += "".join(
        f"{mark} {_quoted(side)}" + ("\t\n" if " " in side else "\n")
        for mark, side in zip(("---", "+++"), sides, strict=True)
    )
    return head + _hunks(was, now).decode("utf-8", "surrogateescape")


def _quoted(name: str) -> str:
    """Write a name as git does: in quotes if it has a character that would end or change it."""
    if not (_ODD.search(name) or _ENDS.search(name)):
        return name
    return f'"{_ODD.sub(_escaped, name)}"'


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "\\" + _ESCAPES.get(code, f"{code:03o}")


def _blob_id(file: TreeFile | None) -> str:
    """Return git's id of a file's content."""
    if file is None:
        return _NO_ID
    head = f"blob {len(file.data)}\0".encode()
    return hashlib.sha1(head + file.data, usedforsecurity=False).hexdigest()


def _literal(data: bytes) -> str:
    """Write content as a part of a binary patch: lines of 52 bytes, each with its length."""
    packed = zlib.compress(data)
    lines = [f"literal {len(data)}\n"]
    for start in range(0, len(packed), 52):
        piece = packed[start : start + 52]
        size = len(piece)
        length = chr(ord("A") + size - 1) if size <= 26 else chr(ord("a") + size - 27)
        lines.append(length + base64.b85encode(piece, pad=True).decode() + "\n")
    return "".join(lines)


def _hunks(old: bytes, new: bytes) -> bytes:
    was, now = _lines(old), _lines(new)
    out: list[bytes] = []
    for group in _grouped(was, now):
        first, last = group[0], group[-1]
        spans = _span(first[1], last[2]), _span(first[3], last[4])
        out.append(b"@@ -%s +%s @@\n" % spans)
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                out.extend(_marked(b" ", was[i1:i2]))
            else:
                out.extend(_marked(b"-", was[i1:i2]))
                out.extend(_marked(b"+", now[j1:j2]))
    return b"".join(out)


_Op: TypeAlias = tuple[str, int, int, int, int]


def _grouped(was: Sequence[bytes], now: Sequence[bytes]) -> Iterator[list[_Op]]:
    """Yield the hunks as difflib's operations; equal lines at both ends are skipped first."""
    start, most = 0, min(len(was), len(now))
    while start < most and was[start] == now[start]:
        start += 1
    end = 0
    while end < most - start and was[-1 - end] == now[-1 - end]:
        end += 1
    # The context must be within reach of difflib.
    start, end = max(0, start - _CONTEXT), max(0, end - _CONTEXT)
    old, new = was[start : len(was) - end], now[start : len(now) - end]
    if len(old) * len(new) > _MAX_PAIRS:
        yield [("replace", start, start + len(old), start, start + len(new))]
        return
    matcher = difflib.SequenceMatcher(None, old, new)
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        yield [
            (tag, i1 + start, i2 + start, j1 + start, j2 + start) for tag, i1, i2, j1, j2 in group
        ]


def _lines(data: bytes) -> list[bytes]:
    """Split at newlines only; every line keeps its end."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _marked(mark: bytes, lines: Sequence[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield mark + line
        if not line.endswith(b"\n"):
            yield b"\n\\ No newline at end of file\n"


def _span(start: int, end: int) -> bytes:
    """Write a range of lines; an empty one names the line before it."""
    size = end - start
    first = start + 1 if size else start
    return b"%d" % first if size == 1 else b"%d,%d" % (first, size)


@dataclass(frozen=True, slots=True)
class FileEdit:
    """One replacement in one file; `old` is empty if the file is new."""

    path: str
    old: str
    new: str


def edits(patch: str) -> list[FileEdit]:
    """Return one edit per hunk: context and removed lines -> context and added lines."""
    changes = []
    path = ""
    # splitlines() would also split inside content, at form feeds.
    lines = deque(f"{line}\n" for line in patch.removesuffix("\n").split("\n"))
    while lines:
        line = lines.popleft()
        if line.startswith(("--- ", "+++ ")):
            name = _strip_side(_header_name(line.rstrip("\n"), line[:4]))
            path = path if name == "/dev/null" else name
        elif match := _HUNK.match(line):
            old, new = _hunk(lines, int(match[1] or 1), int(match[2] or 1))
            changes.append(FileEdit(path, old, new))
    return changes


def _hunk(lines: deque[str], num_old: int, num_new: int) -> tuple[str, str]:
    """Remove one hunk from `lines`; a file may end without a newline, on either side."""
    old: list[str] = []
    new: list[str] = []
    while lines and (len(old) < num_old or len(new) < num_new):
        line = lines.popleft()
        sides = [side for side, marks in ((old, " -\n"), (new, " +\n")) if line[:1] in marks]
        text = line[1:] or "\n"
        if lines and lines[0].startswith("\\"):
            lines.popleft()
            text = text.removesuffix("\n")
        for side in sides:
            side.append(text)
    return "".join(old), "".join(new)


def touched(patch: str) -> tuple[str, ...]:
    """Return the paths that a git or plain diff changes, creates, deletes or renames, in order."""
    return tuple(dict.fromkeys(name for part in _sections(patch) for name in _names(part)))


def _sections(patch: str) -> Iterator[list[str]]:
    """Yield the lines of each file's part; hunk sizes separate content from headers.

    Text after a file's hunks is left out, because `patch` would read diffs of other kinds in it.
    """
    lines = patch.split("\n")  # as in `edits`
    section: list[str] = []
    num_old = num_new = 0
    has_hunks = False
    for index, line in enumerate(lines):
        if num_old > 0 or num_new > 0:
            num_old -= line[:1] not in ("+", "\\")
            num_new -= line[:1] not in ("-", "\\")
        elif match := _HUNK.match(line):
            num_old, num_new = int(match[1] or 1), int(match[2] or 1)
            has_hunks = True
        elif _begins_file(lines, index, section):
            if section:
                yield section
            section, has_hunks = [], False
        elif has_hunks and line.strip() and not line.startswith("\\"):
            continue
        section.append(line)
    if section:
        yield section


def _begins_file(lines: list[str], index: int, section: list[str]) -> bool:
    if lines[index].startswith("diff --git "):
        return True
    if not lines[index].startswith("--- ") or index + 1 == len(lines):
        return False
    # A plain diff has no `diff --git`: its `---` begins a file unless that file just began.
    has_names = any(line.startswith("+++ ") for line in section)
    return lines[index + 1].startswith("+++ ") and has_names


def _names(section: list[str]) -> list[str]:
    names: dict[str, None] = {}
    for line in section:
        if _HUNK.match(line):
            break
        if line.startswith("diff --git "):
            names.update(dict.fromkeys(_header_names(line[len("diff --git ") :].rstrip("\r"))))
        for prefix in _NAME_LINES:
            if line.startswith(prefix):
                names[_strip_side(_header_name(line, prefix))] = None
        for prefix in _PLAIN_NAME_LINES:
            if line.startswith(prefix):
                names[_plain(_header_name(line, prefix))] = None
    names.pop("/dev/null", None)
    return list(names)


def _header_name(line: str, prefix: str) -> str:
    return _unquote(line[len(prefix) :].rstrip("\r").split("\t")[0])


def _header_names(text: str) -> list[str]:
    if text.startswith('"') or text.endswith('"'):
        parts = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', text)
        return [_strip_side(_unquote(part)) for part in parts]
    # Without quotes both sides are equal unless renamed, and a rename names its paths again.
    half = len(text) // 2
    if text[half : half + 1] == " " and text[2:half] == text[half + 3 :]:
        return [text[2:half]]
    old, _, new = text.partition(" b/")
    return [_strip_side(old), new]


def _strip_side(name: str) -> str:
    """Remove the first folder, as `-p1` does."""
    return name if name == "/dev/null" else _plain(name.split("/", 1)[-1])


def _plain(name: str) -> str:
    # Most names are plain, and pathlib is slow.
    return str(PurePosixPath(name)) if _UNUSUAL.search(name) or not name else name


def _unquote(name: str) -> str:
    if not (len(name) > 1 and name.startswith('"') and name.endswith('"')):
        return name
    raw = name[1:-1].encode("utf-8", "surrogateescape")
    return _ESCAPE.sub(_unescaped, raw).decode("utf-8", "surrogateescape")


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    return bytes([int(code, 8) & 255 if len(code) == 3 else _LETTERS.get(code[0], code[0])])
