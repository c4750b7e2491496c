# Brings the repository of a task's image to a state without a future. POSIX sh, git 2.17 or newer.
#
#   sh -c SCRIPT scrub WORKDIR BASE HISTORY LIMIT LOOK <orders
#
# Orders are lines: `hidden GLOB` outside the work tree, `inside GLOB` and `test PATH` relative to
# it, `copy PATH` found by an earlier look, `solved BLOB` ids of the files as the solution leaves
# them. Says lines: `base SHA`, `history KIND`, `changed`, `removed PATH`, `found PATH`.
# Exit codes: 93 the repository is broken, 94 another user owns something, 0 done.
#
# No configuration of the image is in force: git's own home is empty, the repository's settings are
# reduced to harmless ones before anything else, and every transport is forbidden, so that a
# partial clone fetches nothing.
set -u
umask 022
work=$1 want=$2 history=$3 limit=$4 look=$5
for name in $(env | sed -n 's/^\(GIT_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done
home=$(mktemp -d) || exit 93
trap 'rm -rf "$home"' EXIT
printf '[safe]\n\tdirectory = *\n\tdirectory = %s\n' "$work" >"$home/.gitconfig"
export HOME="$home" XDG_CONFIG_HOME="$home" LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 \
  GIT_TERMINAL_PROMPT=0 GIT_NO_REPLACE_OBJECTS=1 GIT_NO_LAZY_FETCH=1 GIT_ALLOW_PROTOCOL=none \
  GIT_OPTIONAL_LOCKS=0 GIT_PAGER=cat
line_end='
'

say() { printf '%s\n' "$*"; }
broken() { say "$1" >&2; exit 93; }
foreign() { say "$1" >&2; exit 94; }
safe_git() {
  git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.attributesFile=/dev/null \
    -c core.packedGitLimit=256m -c core.packedGitWindowSize=32m -c core.deltaBaseCacheLimit=32m \
    -c core.bigFileThreshold=16m -c core.fsyncObjectFiles=false -c core.fsync=none \
    -c core.commitGraph=false -c core.multiPackIndex=false "$@"
}

main() {
  changed='' extra=''
  top=$(cd -P -- "$work" 2>/dev/null && pwd -P) || broken "there is no folder $work"
  while [ ! -e "$top/.git" ] && [ ! -L "$top/.git" ] && [ "$top" != / ]; do
    top=${top%/*} top=${top:-/}
  done
  base=
  orders=$(cat)
  if [ -e "$top/.git" ] || [ -L "$top/.git" ]; then
    find_inside
    scrub_repository "$top" "$want" "$history"
    base=$sha
    say "base $base"
    say "history $kept"
    drop_solved
  else
    top=$(cd -P -- "$work" && pwd -P) inside=
  fi
  clean_user_settings
  remove_hidden
  remove_left_over
  if [ "$look" = 1 ]; then look_elsewhere; fi
  remove_copies
  [ -z "$changed" ] || say changed
}

# One walk of the work tree: repositories inside it are scrubbed, files are judged later.
find_inside() {
  inside=$(find "$top" \( -name .git ! -path "$top/.git" -o -name .hg -o -name .svn -o -name .bzr \
    -o -name .jj -o -name .sl -o -name '*.orig' -o -name '*.rej' -o -name '*.bundle' \
    -o -name .pytest_cache \) -print -prune -o -path "$top/.git" -prune 2>/dev/null | sort -r)
  old_ifs=$IFS IFS=$line_end
  set -f
  for found in $inside; do
    case $found in
      */.git) IFS=$old_ifs; set +f; scrub_nested "${found%/.git}"; set -f; IFS=$line_end ;;
    esac
  done
  set +f
  IFS=$old_ifs
}
