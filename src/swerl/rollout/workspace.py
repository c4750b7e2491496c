"""The repository inside an agent's Sandbox: its state at the start, and the agent's patch.

A Task's image may hold uncommitted changes, or changes committed after the base commit. They are
not the agent's work, and the grading Sandbox has them too. So a patch is taken against the work
tree at the start and not against a commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError

MAX_PATCH_BYTES = 8 * 2**20
"""Size limit of a graded patch; real fixes are a thousand times smaller."""
_MAX_UNTRACKED_KIB = 16 * 2**10
"""Limit for the total size of the image's untracked files. Beyond it, each file larger than a
hundredth of the limit (an environment, data) is left out of patches."""
_TIMEOUT_S = 60.0

# Hooks and external diffs that an image or an agent configured are switched off, and none of their
# settings may change the format of a patch: another format would not apply.
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

# A temporary index records the work tree, so the repository's own index is not changed.
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

# Print the objects that the start's tree adds to HEAD, as a pack.
_KEEP = r"""
printf '%s\n^%s\n' "$1" "$(run_git rev-parse HEAD)" | run_git pack-objects --revs --stdout -q
"""

# The index is a copy, so the lock of a killed git does no harm. Only a folder that git cannot add,
# such as a repository without a commit, is missing from the patch.
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
    """The work tree at the start."""

    base: str
    """HEAD's commit if the work tree equals it, else an unreferenced tree."""
    pack: bytes = b""
    """That tree's own objects, because an agent may prune unreferenced ones."""
    skipped: tuple[str, ...] = ()
    """Large untracked paths that are left out of patches."""


async def start(sandbox: Sandbox, workdir: str) -> Start:
    """Record the work tree at the start; if there is no repository, create one with a commit."""
    script = [*_shell(_START), str(_MAX_UNTRACKED_KIB)]
    done = await sandbox.run(script, cwd=workdir, timeout_s=_TIMEOUT_S)
    lines = [line.partition(" ") for line in done.stdout.decode(errors="replace").splitlines()]
    found = {key: value for key, _, value in lines}
    if done.exit_code or not found.keys() & {"base", "tree"}:
        raise SandboxError(
            f"{workdir} cannot be used as a git work tree: {done.text.strip()[-200:]}",
            hint="`swerl sandbox smoke` checks images for this",
        )
    if "base" in found:
        return Start(found["base"])
    skipped = tuple(value for key, _, value in lines if key == "skip")
    # The agent may remove unreferenced objects, so a copy of them stays outside the sandbox.
    kept = await sandbox.run([*_shell(_KEEP), found["tree"]], cwd=workdir, timeout_s=_TIMEOUT_S)
    # Without the pack, a patch fails only if the agent has pruned those objects.
    pack = b"" if kept.exit_code or kept.truncated else kept.stdout
    return Start(found["tree"], pack, skipped)


async def take_patch(sandbox: Sandbox, workdir: str, start: Start) -> str | None:
    """Return all changes since the start as a binary-safe diff.

    None if git cannot read the work tree any more, or if the patch exceeds MAX_PATCH_BYTES.
    """
    # `literal`: a path may contain characters that git reads as a pattern.
    script = [*_shell(_DIFF), start.base, *(f":(exclude,literal){path}" for path in start.skipped)]
    done = await sandbox.run(script, cwd=workdir, timeout_s=_TIMEOUT_S, stdin=start.pack)
    if done.exit_code or done.truncated or len(done.stdout) > MAX_PATCH_BYTES:
        return None
    return done.stdout.decode("utf-8", "surrogateescape")


def _shell(script: str) -> list[str]:
    return ["sh", "-c", _GIT + script, "sh"]
