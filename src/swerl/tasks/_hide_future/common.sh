# Functions for hiding the future and scanning for leaks. POSIX sh, git 2.17 or newer.
#
# No configuration of the image is in force: git's own home is empty, programs that a repository
# names are overruled, and every transport is forbidden, so that a partial clone fetches nothing.
set -u
umask 022
work=$1 want=$2
while read -r _ name; do
  case $name in GIT_[A-Z]*) unset "${name%%=*}" ;; esac
done <<END
$(export -p)
END
home=$(mktemp -d) || exit 93
trap 'rm -rf "$home"' EXIT
printf '[safe]\n\tdirectory = *\n\tdirectory = %s\n' "$work" >"$home/.gitconfig"
export HOME="$home" XDG_CONFIG_HOME="$home" LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 \
  GIT_TERMINAL_PROMPT=0 GIT_NO_REPLACE_OBJECTS=1 GIT_NO_LAZY_FETCH=1 GIT_ALLOW_PROTOCOL=none \
  GIT_OPTIONAL_LOCKS=0 GIT_PAGER=cat
line_end='
'
tab='	'

say() { printf '%s\n' "$*"; }
broken() { say "$1" >&2; exit 93; }
foreign() { say "$1" >&2; exit 94; }
deny() { say "denied $1"; }
safe_git() {
  git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.attributesFile=/dev/null \
    -c core.packedGitLimit=64m -c core.packedGitWindowSize=16m -c core.deltaBaseCacheLimit=32m \
    -c core.bigFileThreshold=16m -c core.fsync=none \
    -c core.commitGraph=false -c core.multiPackIndex=false "$@"
}

# Go to the repository that the workdir lies in: `top`, empty where there is none.
find_top() {
  top=$(cd -P -- "$work" 2>/dev/null && pwd -P) || broken "there is no folder $work"
  while [ ! -e "$top/.git" ] && [ ! -L "$top/.git" ]; do
    [ "$top" != / ] || { top=''; return; }
    top=${top%/*} top=${top:-/}
  done
}

# One walk below `top` sets `inside` to what tools leave there (repositories, bundles, files of
# merges, caches) and `compiled` to compiled Python.
walk() {
  compiled=''
  inside=$(find "$top" \( -name .git ! -path "$top/.git" -o -name .hg -o -name .svn -o -name .bzr \
    -o -name .jj -o -name .sl -o -name '*.orig' -o -name '*.rej' -o -name '*.bundle' \
    -o -name .pytest_cache -o -name .mypy_cache \) -print -prune \
    -o -path "$top/.git" -prune -o -path '*/__pycache__/*.pyc' -print 2>/dev/null)
  case $inside in
    *.pyc*)
      compiled=$(say "$inside" | grep '/__pycache__/[^/]*\.pyc$')
      inside=$(say "$inside" | grep -v '/__pycache__/[^/]*\.pyc$') ;;
  esac
}

# Prints which of `compiled` is not of the source beside it: that is newer, or gone.
stale_compiled() {
  [ -n "$compiled" ] || return 0
  stale=$(say "$compiled" | while IFS= read -r path; do
    name=${path##*/} source=${path%/__pycache__/*}/
    source=$source${name%%.*}.py
    if [ ! -e "$source" ] || [ "$source" -nt "$path" ]; then say "${path#"${top%/}"/}"; fi
  done)
  [ -n "$stale" ] || return 0
  say "$stale" | sort >"$home/stale"
  : >"$home/committed"
  [ -z "$base" ] || safe_git --git-dir="$top/.git" ls-tree -r --name-only "$base" |
    grep /__pycache__/ | sort >"$home/committed"
  comm -23 "$home/stale" "$home/committed"
}

# Run a command for each line of a text.
for_each() {
  old_ifs=$IFS IFS=$line_end
  set -f
  for each in $1; do IFS=$old_ifs; set +f; "$2" "$each"; set -f; IFS=$line_end; done
  set +f
  IFS=$old_ifs
}

# Whether a repository's setting is known to run no program and to name no other place.
is_safe_setting() {
  case $1 in
    core.repositoryformatversion | core.filemode | core.symlinks | core.ignorecase | core.bare | \
    core.precomposeunicode | core.autocrlf | core.eol | core.safecrlf | \
    core.logallrefupdates | core.sparsecheckout | core.sparsecheckoutcone | core.splitindex | \
    core.untrackedcache | index.sparse | index.version | extensions.objectformat | \
    user.name | user.email | gc.auto | status.showuntrackedfiles) ;;
    *) return 1 ;;
  esac
}

is_safe_user_setting() {
  case $1 in
    user.* | safe.* | init.* | gc.* | color.* | advice.* | pull.* | push.* | status.* | \
    maintenance.* | core.autocrlf | core.eol | core.filemode | core.quotepath | core.symlinks | \
    http.version) ;;
    *) return 1 ;;
  esac
}

user_settings() {
  for file in /etc/gitconfig /root/.gitconfig /root/.config/git/config \
    /home/*/.gitconfig /home/*/.config/git/config; do
    [ ! -s "$file" ] || [ ! -r "$file" ] || say "$file"
  done
}
