"""The repository inside an agent's Sandbox: where it starts, and the patch that came of it.

A Task's image may hold changes that nobody committed, or changes committed after the base commit.
They are no work of the agent's, and the grading Sandbox has them too, so a patch is taken against
the work tree as it stood at the start and not against a commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError

MAX_PATCH_BYTES = 8 * 2**20
"""Largest patch that is graded; real fixes are a thousand times smaller."""
_MAX_UNTRACKED_KIB = 16 * 2**10
"""Untracked files of the image are watched up to this size together; above it (an environment of
its own, data) each one over a hundredth of it is left out of patches."""
_TIMEOUT_S = 60.0

# Hooks and external diffs that an image or an agent configured stay switched off, and no setting
# or replacement of theirs changes what a patch looks like: another shape would not apply.
_GIT = r"""
export GIT_OPTIONAL_LOCKS=0 GIT_NO_REPLACE_OBJECTS=1
unset GIT_DIFF_OPTS GIT_EXTERNAL_DIFF
run_git() {
  git -c safe.directory='*' -c core.fsmonitor=false -c core.hooksPath=/dev/null \
    -c core.quotePath=false -c status.showUntrackedFiles=normal -c diff.noprefix=false \
    -c diff.mnemonicPrefix=false -c diff.srcPrefix=a/ -c diff.dstPrefix=b/ -c diff.relative=false \
    -c diff.submodule=short -c diff.orderFile=/dev/null -c diff.context=3 \
    -c diff.interHunkContext=0 -c diff.suppressBlankEmpty=false "$@"
}
"""

# An index of its own takes the work tree in, so that the repository's index stays as it is.
_START = r"""
if ! run_git rev-parse --verify -q HEAD >/dev/null; then
  run_git init -q && run_git add -Af . &&
  run_git -c user.name=swerl -c user.email=swerl@localhost commit -q --allow-empty -m base || exit
fi
if [ -z "$(run_git status --porcelain | head -n 1)" ]; then
  printf 'base %s\n' "$(run_git rev-parse HEAD)"
  exit
fi
cd "$(run_git rev-parse --show-toplevel)" || exit
index=$(run_git rev-parse --git-path index)
export GIT_INDEX_FILE=$(mktemp) && rm -f "$GIT_INDEX_FILE" || exit
if [ -f "$index" ]; then cp "$index" "$GIT_INDEX_FILE"; fi
run_git add -u . 2>/dev/null || exit
others=$(run_git ls-files --others --exclude-standard --directory)
if [ -n "$others" ]; then
  sizes=$(run_git ls-files --others --exclude-standard --directory -z | xargs -0 du -sk --)
  total=0
  while read -r size path; do total=$((total + size)); done <<END
$sizes
END
  while IFS='	' read -r size path; do
    if [ "$total" -gt "$1" ] && [ "$size" -gt $(($1 / 100)) ]
    then printf 'skip %s\n' "$path"
    else run_git add -- "$path" 2>/dev/null
    fi
  done <<END
$sizes
END
fi
tree=$(run_git write-tree) && rm -f "$GIT_INDEX_FILE" || exit
printf 'tree %s\n' "$tree"
"""

_KEEP = r"""
printf '%s\n^%s\n' "$1" "$(run_git rev-parse HEAD)" | run_git pack-objects --revs --stdout -q
"""

# The index is a copy, so that a lock that a killed git left is in nobody's way. A folder that git
# cannot take in, such as a repository without a commit, costs itself alone.
_DIFF = r"""
cd "$(run_git rev-parse --show-toplevel)" || exit
base=$1; shift
run_git cat-file -e "$base" 2>/dev/null || run_git unpack-objects -q || exit
index=$(run_git rev-parse --git-path index)
export GIT_INDEX_FILE=$(mktemp) || exit
cat "$index" >"$GIT_INDEX_FILE" 2>/dev/null && run_git ls-files >/dev/null 2>&1 ||
  { rm -f "$GIT_INDEX_FILE" && run_git read-tree "$base"; } || exit
run_git add -AN --ignore-errors . "$@" 2>/dev/null
run_git diff --binary --full-index --no-ext-diff --no-textconv --no-color "$base" -- . "$@"
code=$?
rm -f "$GIT_INDEX_FILE"
exit $code
"""


@dataclass(frozen=True, slots=True)
class Start:
    """The work tree as an agent finds it."""

    base: str
    """HEAD's commit where the work tree equals it, else a tree that nothing refers to."""
    pack: bytes = b""
    """That tree's own objects, in case the agent removes what nothing refers to."""
    skipped: tuple[str, ...] = ()
    """Large untracked paths that no patch shows."""


async def start(sandbox: Sandbox, workdir: str) -> Start:
    """Note where the agent starts from, making a commit where there is no repository."""
    script = [*_shell(_START), str(_MAX_UNTRACKED_KIB)]
    done = await sandbox.run(script, cwd=workdir, timeout_s=_TIMEOUT_S)
    lines = [line.partition(" ") for line in done.stdout.decode(errors="replace").splitlines()]
    said = {key: value for key, _, value in lines}
    if done.exit_code or not said.keys() & {"base", "tree"}:
        raise SandboxError(
            f"{workdir} cannot be used as a git work tree: {done.text.strip()[-200:]}",
            hint="`swerl sandbox smoke` checks images for this",
        )
    if "base" in said:
        return Start(said["base"])
    skipped = tuple(value for key, _, value in lines if key == "skip")
    kept = await sandbox.run([*_shell(_KEEP), said["tree"]], cwd=workdir, timeout_s=_TIMEOUT_S)
    pack = b"" if kept.exit_code or kept.truncated else kept.stdout
    return Start(said["tree"], pack, skipped)


async def take_patch(sandbox: Sandbox, workdir: str, start: Start) -> str | None:
    """Return everything that changed since the start as a binary-safe diff.

    None where the agent left a work tree that git can no longer read, or a patch over the cap.
    """
    script = [*_shell(_DIFF), start.base, *(f":(exclude,literal){path}" for path in start.skipped)]
    done = await sandbox.run(script, cwd=workdir, timeout_s=_TIMEOUT_S, stdin=start.pack)
    if done.exit_code or done.truncated or len(done.stdout) > MAX_PATCH_BYTES:
        return None
    return done.stdout.decode("utf-8", "surrogateescape")


def _shell(script: str) -> list[str]:
    return ["sh", "-c", _GIT + script, "sh"]
