"""A Task's work tree in a sandbox: list its files, take what an agent changed, lay it elsewhere.

No git decides here which files changed. `find` lists every file before and after the agent, with
its size and times; an agent cannot set the time of a file's last change (ctime). Files that differ
are read. An agent controls the programs of its sandbox, so whatever they print is only a list of
files and contents, and is parsed strictly. Files are laid only into clean sandboxes.
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from swerl.core.changes import Changes, FileMap, TreeFile, parents
from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError, SandboxFileError, SandboxLostError
from swerl.tasks.tree_formats import (
    TreeDifference,
    TreeEntry,
    differing,
    entry_of,
    escaped_path,
    file_of,
    packed_files,
    parsed,
    path_list,
    path_of,
    raw_path,
    unpacked,
)

_TIMEOUT_S = 120.0
"""Seconds for one command; a listing of 100,000 files takes one or two."""
_MAX_READ_BYTES = 64 * 2**20
"""Limit of all files that are read; those that turn out to be unchanged count too."""
_MAX_FILES, _NEW_FILES = 20_000, 5_000
"""Limits of files that are read, and of new ones among them."""
_LARGE_FILE_BYTES = 2**20
"""Size from which a new file is rather built than written; such files are read last."""
_CHUNK_BYTES, _CHUNK_FILES = 2 * 2**20, 2_000
"""Most that one command prints; the output of a sandbox's command is capped."""
_IGNORED_FILE_BYTES, _IGNORED_BYTES, _IGNORED_FILES = 2**20, 4 * 2**20, 2_000
"""Limits of the files that the repository's rules ignore: for each, and for all."""
_FEW_FILES, _FEW_BYTES = 3, 256 * 2**10
"""So few files are named in a command itself, and written one by one: more would take a remote
sandbox longer than a command."""
_SMALL_LISTING_BYTES = 32 * 2**10
_LAID_FILES = 500
"""Most files that one command makes or removes."""
_TRIES = 3
"""Attempts at reading a tree that processes left behind may still change."""

PRUNED = frozenset(
    {"node_modules", "bower_components", "site-packages", "dist-packages", "__pypackages__"}
    | {".venv", ".tox", ".nox", ".eggs", "__pycache__"}
    | {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".gradle", ".nyc_output"}
)
"""Folders of installed packages and caches, which are no part of a tree at any depth."""
_DERIVED = frozenset({"target", "venv", "htmlcov", ".next", ".cache"})
"""Folders of derived files, if the repository ignores them; no Python module is one in `target`."""
_DERIVED_ENDS = (".egg-info", ".dist-info")

_PATH = "export LC_ALL=C PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
# A secret word begins each record, because a name may hold any other text. `stat` prints whole
# seconds, so the first list ends a second later: an edit in the same second would look like none.
_LIST = r"""
token=$1 pause=$2 zips=$3; shift 3
list() {
  find . "$@" -printf "$token"'%y%m %s %T@ %C@ %p\n'
  code=$?
  if [ "$code" != 0 ] && ! find . -maxdepth 0 -printf '' 2>/dev/null; then
    find . "$@" -exec stat -c "$token%f %s %Y %Z %n" {} + && sleep "$pause"
    code=$?
  fi
  printf '\0%s' "$code"
}
if [ "$zips" ] && command -v gzip >/dev/null; then list "$@" | gzip -1; else list "$@"; fi
"""
# Print of each group of files: their records, a letter for each, targets of links, contents.
_READ = r"""
token=$1; shift
if ! find "$@" -prune ! -type d -printf "$token"'%y%m %s %T@ %C@ %p\n' 2>/dev/null &&
  ! find . -maxdepth 0 -printf '' 2>/dev/null
then stat -c "$token%f %s %Y %Z %n" -- "$@" 2>/dev/null
fi
printf '\0%s ' "$#"
# A path below a link belongs to another file.
below_link() {
  parent=$1
  while parent=${parent%/*}; [ "$parent" != . ]; do [ ! -L "$parent" ] || return 0; done
  return 1
}
for path do
  if below_link "$path"; then printf -- -
  elif [ -L "$path" ]; then printf l
  elif [ -f "$path" ] && [ -r "$path" ]; then printf f
  else printf -- -
  fi
done
for path do
  shift
  if below_link "$path"; then :
  elif [ -L "$path" ]; then readlink -n -- "$path"
  elif [ -f "$path" ] && [ -r "$path" ]; then set -- "$@" "$path"
  fi
done
[ $# = 0 ] || cat -- "$@"
"""
# The repository's own rules; without a readable repository, those of its files of rules.
_GIT = r"""
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_OPTIONAL_LOCKS=0
git='git -c safe.directory=* -c core.fsmonitor=false -c core.excludesFile=/dev/null'
set -f
"""
_IGNORED = f"{_GIT}exec $git check-ignore -z --stdin"
_IGNORED_WITHOUT_GIT = rf"""{_GIT}
dir=$(mktemp -d) && $git init -q --template= "$dir" >/dev/null || exit 128
$git --git-dir="$dir/.git" --work-tree=. check-ignore --no-index -z --stdin
code=$?
rm -rf "$dir"
exit $code
"""
# Nothing is removed or made through a link: a parent that is no folder blocks its files. Odd
# characters of a path come as octal escapes.
_LAY = r"""
umask 022
command -v tar >/dev/null || exit 90
mode=$1 any=; shift
for given do
  shift; path=$given blocked=
  case $given in *\\*) path=$(printf '%b.' "$given"); path=${path%.} ;; esac
  parent=$path
  while parent=${parent%/*}; [ "$parent" != . ]; do
    if [ -L "$parent" ] || { [ -e "$parent" ] && [ ! -d "$parent" ]; }; then blocked=1; break; fi
  done
  if [ "$blocked" ]; then any=1; printf '%s\n' "$given"
  else set -- "$@" "$path"
  fi
done
[ $# = 0 ] || rm -rf -- "$@"
if [ "$mode" = gone ]; then
  for path do shift; set -- "$@" "${path%/*}"; done
  [ $# = 0 ] || rmdir -p -- "$@" 2>/dev/null
  exit 0
fi
[ -z "$any" ] || exit 92
tar -xpof - || exit 91
"""
_NO_TAR, _BLOCKED = 90, 92


@dataclass(frozen=True, slots=True)
class TreeListing:
    """The files of a work tree at one moment, packed."""

    packed: bytes
    since_s: int
    """Unix time of the list; files that are laid elsewhere are never older."""
    has_rules: bool = True
    """True if the repository may have rules for ignored files."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Files taken from a work tree."""

    changes: Changes
    num_left: int = 0
    """Changed files that are left out: derived and ignored ones, devices, unreadable ones."""


async def list_tree(
    sandbox: Sandbox, workdir: str, *, kept: Iterable[str] = (), pause_s: int = 1, zips: bool = True
) -> TreeListing:
    """List the files of the work tree. Raises SandboxError if that fails.

    A folder with one of the paths `kept` is listed, whatever its name. `zips` compresses the
    output, which needs another program.
    """
    names = sorted(PRUNED - {part for path in kept for part in path.split("/")})
    tests = [word for name in names for word in ("-o", "-name", name)][1:]
    prune = ["(", "-name", ".git", "-o", "-type", "d", "(", *tests, ")", ")", "-prune"]
    token = secrets.token_hex(16)
    how = [token, str(pause_s), "1" if zips else ""]
    argv = [*_shell(_LIST), *how, *prune, "-o", "!", "-type", "d"]
    result = await sandbox.run(argv, cwd=workdir, user="root", timeout_s=_TIMEOUT_S)
    packed = b"%s\n%s" % (token.encode(), result.stdout)
    if result.exit_code or result.truncated or unpacked(packed) is None:
        raise SandboxError(
            f"the files of {workdir} cannot be listed: {result.text[-200:].strip()!r}",
            hint="`swerl sandbox smoke` checks images for this",
        )
    return TreeListing(packed, int(time.time()))


async def list_start(sandbox: Sandbox, workdir: str, *, kept: Iterable[str]) -> TreeListing:
    """List the files of the work tree before an agent starts. Raises SandboxError."""
    listing = await list_tree(sandbox, workdir, kept=kept)
    return replace(listing, has_rules=await _has_rules(sandbox, workdir, listing))


def is_older(listing: TreeListing, unix_s: float) -> bool:
    """Return True if no file of a listing has changed since then."""
    times = (facts.split(b" ")[-1] for facts in (unpacked(listing.packed) or {}).values())
    return all(float(time_s) < unix_s for time_s in times)


async def take(
    sandbox: Sandbox,
    workdir: str,
    start: TreeListing,
    *,
    kept: Iterable[str] = (),
    ignores: bool = True,
) -> Taken | None:
    """Return the files that differ since the start; None if there are too many.

    A file that was touched or written with the same content may be among them. `ignores` leaves
    out large and binary files that the repository's rules ignore.
    """
    zips = len(start.packed) > _SMALL_LISTING_BYTES
    for _ in range(_TRIES):
        try:
            end = await list_tree(sandbox, workdir, kept=kept, pause_s=0, zips=zips)
        except SandboxError as error:
            if error.retryable or error.from_inside or isinstance(error, SandboxLostError):
                raise
            if zips:
                return None
            zips = True  # the agent has made many files
            continue
        pair = start.packed, end.packed
        is_large = sum(map(len, pair)) > _CHUNK_BYTES
        difference = await asyncio.to_thread(differing, *pair) if is_large else differing(*pair)
        if not (difference.changed or difference.gone):
            return Taken(Changes(), difference.num_left)
        paths = [*difference.changed, *difference.gone]
        ignored = set[str]()
        if ignores and (start.has_rules or is_large or _names_rules(end)):
            ignored = await _ignored(sandbox, workdir, paths)
        gone = [path for path in difference.gone if path not in ignored]
        chosen = _chosen(difference, ignored)
        if len(chosen) + len(gone) > _MAX_FILES:
            return None
        if (read := await _read(sandbox, workdir, chosen)) is not None:
            texts = {p: f for p, f in read.items() if not (p in ignored and f.is_binary)}
            files = {**dict.fromkeys(gone), **texts}
            num_left = difference.num_left + len(difference.changed) - len(texts)
            return Taken(Changes(_laid_files(files, start.since_s)), num_left)
    return None


async def compare(sandbox: Sandbox, workdir: str, changes: Changes) -> Changes | None:
    """Compare Changes with a clean work tree; None if its files are too large to read."""
    before = await read_clean(sandbox, workdir, list(changes.files))
    return None if before is None else changes.against(before)


async def read_clean(sandbox: Sandbox, workdir: str, paths: Sequence[str]) -> FileMap | None:
    """Return those of the paths that a clean work tree has; None if they are too large to read."""
    if not paths:
        return {}
    # One command is enough unless the earlier files are far larger.
    files = await _read_chunk(sandbox, workdir, paths) if len(paths) <= _CHUNK_FILES else None
    if files is None:
        entries = await _entries(sandbox, workdir, paths)
        if sum(entry.size for entry in entries.values()) > _MAX_READ_BYTES:
            return None
        files = await _read(sandbox, workdir, entries)
    if files is None:
        return None
    # A path below a link of the clean tree belongs to another file.
    return {
        path: file
        for path, file in files.items()
        if not any(parent in files for parent in parents(path))
    }


async def lay(sandbox: Sandbox, workdir: str, changes: Changes) -> tuple[str, ...] | None:
    """Make the changed files in a clean sandbox; None if that fails.

    Returns the paths that could not be made, because another kind of file is in their way.
    """
    laid = {path: file for path, file in changes.files.items() if file}
    gone = [path for path in changes.files if path not in laid]
    direct = _in_place(laid, changes.before or {}) if not gone else {}
    for path, file in direct.items():
        try:
            await sandbox.write(f"{workdir}/{path}", file.data)
        except SandboxFileError:
            continue  # the command below finds out why
        del laid[path]
    for paths in _slices(gone):
        if await _lay(sandbox, workdir, paths, None) is None:
            return None
    blocked = list[str]()
    for paths in _slices(list(laid)):
        for _ in range(_TRIES):
            refused = await _lay(sandbox, workdir, paths, {path: laid[path] for path in paths})
            if refused is None:
                return None
            blocked += refused
            paths = [path for path in paths if path not in refused]
            if not (refused and paths):
                break
        else:
            return None
    return tuple(blocked)


def _in_place(files: Mapping[str, TreeFile], before: FileMap) -> dict[str, TreeFile]:
    """Return a few small files, oldest first, that only replace the content of plain files.

    No command is needed for them: a path of `before` has no link above it.
    """
    small = {
        path: file
        for path, file in files.items()
        if not file.is_link and (old := before.get(path)) and old.kind is file.kind
    }
    if len(small) > _FEW_FILES or any(len(file.data) > _FEW_BYTES for file in small.values()):
        return {}
    return dict(sorted(small.items(), key=lambda item: item[1].mtime_s))


def _slices(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(paths), _LAID_FILES):
        yield paths[start : start + _LAID_FILES]


async def _lay(
    sandbox: Sandbox, workdir: str, paths: Sequence[str], files: Mapping[str, TreeFile] | None
) -> list[str] | None:
    """Make these files, or remove the paths if there are none; return the paths in the way.

    If a path is blocked, no file was made. None if it fails. Raises SandboxError without `tar`.
    """
    escaped = {escaped_path(path): path for path in paths}
    result = await sandbox.run(
        [*_shell(_LAY), "gone" if files is None else "laid", *escaped],
        cwd=workdir,
        timeout_s=_TIMEOUT_S,
        stdin=b"" if files is None else packed_files(files),
    )
    if result.exit_code == _NO_TAR:
        message = f"no files can be written: {result.text.strip()[-200:]}"
        raise SandboxError(message, hint="the image needs `tar`")
    if not result.exit_code:
        return []
    lines = result.stdout.decode(errors="replace").splitlines()
    blocked = [escaped[line] for line in lines if line in escaped]
    return (blocked or None) if result.exit_code == _BLOCKED else None


def _shell(script: str) -> list[str]:
    return ["sh", "-c", _PATH + script, "sh"]


async def _has_rules(sandbox: Sandbox, workdir: str, listing: TreeListing) -> bool:
    """Return False if the workdir is a repository without any rule of ignored files."""
    if _names_rules(listing):
        return True
    try:
        await sandbox.read(f"{workdir}/.git/HEAD")
    except (FileNotFoundError, SandboxFileError):
        return True
    try:
        rules = await sandbox.read(f"{workdir}/.git/info/exclude")
    except FileNotFoundError:
        return False
    except SandboxFileError:
        return True
    return any(line.strip() and not line.startswith(b"#") for line in rules.splitlines())


def _names_rules(listing: TreeListing) -> bool:
    return any(name.endswith(b"/.gitignore") for name in unpacked(listing.packed) or {})


async def _ignored(sandbox: Sandbox, workdir: str, paths: Sequence[str]) -> set[str]:
    """Return the untracked paths that the repository's rules ignore; none without git."""
    for script in (_IGNORED, _IGNORED_WITHOUT_GIT):
        result = await sandbox.run(
            _shell(script), cwd=workdir, user="root", timeout_s=_TIMEOUT_S, stdin=path_list(paths)
        )
        if result.exit_code in (0, 1):  # 1: none is ignored
            return {path_of(raw) for raw in result.stdout.split(b"\0") if raw}
    return set()


def _chosen(difference: TreeDifference, ignored: Collection[str]) -> dict[str, TreeEntry]:
    """Return the files to read: those of the repository, and within limits new and ignored ones.

    Small files in folders with few others come first: they are written by hand.
    """
    changed = difference.changed
    new = [path for path in difference.new if path not in ignored]
    edited = [path for path in changed if path not in ignored and path not in difference.new]
    own = [*edited, *_by_hand(changed, new)[:_NEW_FILES]]
    chosen = _fitting(changed, own, _MAX_READ_BYTES, _MAX_FILES)
    sources = [
        path
        for path in changed
        if path in ignored and not _is_derived(path) and changed[path].size <= _IGNORED_FILE_BYTES
    ]
    ignored_sources = _by_hand(changed, sources)
    return chosen | _fitting(changed, ignored_sources, _IGNORED_BYTES, _IGNORED_FILES)


def _by_hand(changed: Mapping[str, TreeEntry], paths: Sequence[str]) -> list[str]:
    counts = Counter(map(posixpath.dirname, paths))

    def key(path: str) -> tuple[bool, int, str]:
        return changed[path].size > _LARGE_FILE_BYTES, counts[posixpath.dirname(path)], path

    return sorted(paths, key=key)


def _fitting(
    changed: Mapping[str, TreeEntry], paths: Sequence[str], max_bytes: int, max_files: int
) -> dict[str, TreeEntry]:
    """Return the first files that fit into the limits; a file that does not fit is left out."""
    chosen: dict[str, TreeEntry] = {}
    total = 0
    for path in paths:
        if len(chosen) < max_files and total + changed[path].size <= max_bytes:
            chosen[path] = changed[path]
            total += changed[path].size
    return chosen


def _is_derived(path: str) -> bool:
    names = _DERIVED - {"target"} if path.endswith(".py") else _DERIVED
    return any(p in names or p.endswith(_DERIVED_ENDS) for p in path.split("/")[:-1])


async def _read(
    sandbox: Sandbox, workdir: str, entries: Mapping[str, TreeEntry]
) -> dict[str, TreeFile] | None:
    """Read files, few or large ones without a command; None if one of them changed meanwhile."""
    files: dict[str, TreeFile] = {}
    for chunk in _chunks(entries):
        part = {path: entries[path] for path in chunk}
        is_large = part[chunk[0]].size > _CHUNK_BYTES
        is_small = all(each.kind == "f" and each.size <= _FEW_BYTES for each in part.values())
        is_direct = is_large or (is_small and len(part) <= _FEW_FILES)
        read = await _read_directly(sandbox, workdir, part) if is_direct else None
        if read is None and not is_large:
            read = await _read_chunk(sandbox, workdir, chunk)
        if read is None:
            return None
        files.update(read)
    return files


def _chunks(entries: Mapping[str, TreeEntry]) -> Iterator[list[str]]:
    """Divide files so that each part fits into one command's output."""
    chunk: list[str] = []
    size = 0
    for path, entry in entries.items():
        if chunk and (size + entry.size > _CHUNK_BYTES or len(chunk) == _CHUNK_FILES):
            yield chunk
            chunk, size = [], 0
        chunk.append(path)
        size += entry.size
    if chunk:
        yield chunk


async def _read_chunk(
    sandbox: Sandbox, workdir: str, paths: Sequence[str]
) -> dict[str, TreeFile] | None:
    """Read the files that exist and are readable; None if the output is not whole."""
    token = secrets.token_hex(16)
    argv = ["xargs", "-0", "-r", "-n", "500", *_shell(_READ), token]
    stdin = path_list(paths)
    result = await sandbox.run(argv, cwd=workdir, user="root", timeout_s=_TIMEOUT_S, stdin=stdin)
    return None if result.truncated else parsed(token.encode(), result.stdout, list(paths))


async def _read_directly(
    sandbox: Sandbox, workdir: str, entries: Mapping[str, TreeEntry]
) -> dict[str, TreeFile] | None:
    """Read plain files one by one; None if one is not of the size in its entry."""
    files: dict[str, TreeFile] = {}
    for path, entry in entries.items():
        try:
            files[path] = file_of(await sandbox.read(f"{workdir}/{path}"), entry)
        except (FileNotFoundError, SandboxFileError):
            return None
        if len(files[path].data) != entry.size:
            return None
    return files


async def _entries(sandbox: Sandbox, workdir: str, paths: Sequence[str]) -> dict[str, TreeEntry]:
    """Return the facts about those of the files that exist."""
    listing = await list_tree(sandbox, workdir, kept=paths, pause_s=0)
    records = await asyncio.to_thread(unpacked, listing.packed) or {}
    entries = {path: entry_of(records.get(raw_path(path), b"")) for path in paths}
    return {path: entry for path, entry in entries.items() if entry and entry.kind in "fl"}


def _laid_files(files: Mapping[str, TreeFile | None], since_s: int) -> dict[str, TreeFile | None]:
    """Leave out paths below another file, and bound the times.

    What an image has built is older than each change, as it was for the agent.
    """
    now_s = int(time.time())
    return {
        path: file and replace(file, mtime_s=min(max(file.mtime_s, since_s), now_s))
        for path, file in files.items()
        if not any(files.get(parent) for parent in parents(path))
    }
