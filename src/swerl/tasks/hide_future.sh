# Hide a repository's future; see hide_future.py.
#
#   sh -c SCRIPT hide_future WORKDIR BASE MAX_OBJECTS MAX_KIB PART <input
#
# PART is `files`, `repository` or `all`. Each line of the input is `outside GLOB`, `inside GLOB`
# (relative to the repository), `file PATH`, `test PATH` (relative to the workdir) or `solved BLOB`,
# the id of a file as the solution or the tests leave it. Prints `base SHA`, `history KIND`,
# `removed PATH`, and `denied PATH` for a path that only another user can change. Exit codes: 93
# broken repository, 95 failure.
#
# A repository is replaced by a new one that gets only what it needs from the old one: the objects of
# the base commit and its past, harmless settings, tags of the past. So nothing else has to be found.
# Runs with POSIX sh and git 2.17 or newer. No setting of the image is in force.
set -u
umask 022
work=$1 want=$2 max_objects=$3 max_kib=$4 part=$5
while read -r _ name; do
  case $name in GIT_[A-Z]*) unset "${name%%=*}" ;; esac
done <<END
$(export -p)
END
home=$(mktemp -d) || exit 95
trap 'rm -rf "$home"' EXIT
printf '[safe]\n\tdirectory = *\n' >"$home/.gitconfig"
export HOME="$home" XDG_CONFIG_HOME="$home" LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 \
  GIT_TERMINAL_PROMPT=0 GIT_NO_REPLACE_OBJECTS=1 GIT_NO_LAZY_FETCH=1 GIT_ALLOW_PROTOCOL=none \
  GIT_OPTIONAL_LOCKS=0 GIT_PAGER=cat
line_end='
'
tab='	'
# Settings that run no program and name no other place, of a repository and of a user.
repository_settings='core\.(repositoryformatversion|filemode|symlinks|ignorecase|bare|autocrlf|eol'\
'|precomposeunicode|safecrlf|sparsecheckout(cone)?)|index\..*|extensions\.objectformat'\
'|user\.(name|email)'
user_settings='gc\.auto|(user|safe|init|color|advice)\..*|core\.(autocrlf|eol|filemode|quotepath|symlinks)'
tag_format='%(if)%(*objectname)%(then)%(*objectname)%(else)%(objectname)%(end) %(refname)'

say() { printf '%s\n' "$*"; }
fail() { say "$2" >&2; exit "$1"; }
deny() { say "denied $1"; }
safe_git() {
  git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.attributesFile=/dev/null \
    -c core.packedGitLimit=64m -c core.packedGitWindowSize=16m -c core.deltaBaseCacheLimit=32m \
    -c core.bigFileThreshold=16m -c core.fsync=none -c core.commitGraph=false \
    -c core.multiPackIndex=false "$@"
}
new_git() { safe_git --git-dir="$new" --work-tree="$tree" "$@"; }

main() {
  read_input
  find_top
  entries=$want linked='' lent='' dir='' base='' git_dir='' new=''
  if [ -n "$top" ]; then
    borrow "$top" "$want"
    git_dir=$new
    say "base $base"
    # A copy of the project has the base commit, folders of it, or files of the solution. Equal
    # files of the base are no sign: licences are alike everywhere.
    entries=$base$line_end$(new_git ls-tree "$base" 2>/dev/null | sed -n 's/.* tree \([0-9a-f]*\).*/\1/p')
  else
    top=$(cd -P -- "$work" && pwd -P)
  fi
  if [ "$part" != files ]; then
    others=$(find_others)
    for_each "$others" hide_inner
    if [ -n "$dir" ] && can_replace; then
      replace full
      git_dir=$dir
      say "history $kept"
    elif [ -n "$dir" ]; then deny "$dir"
    fi
    for_each "$others" hide_outer
    for_each "$linked" remove_work_tree
    for_each "$lent" remove_store
  fi
  [ "$part" = repository ] || remove_files
  [ -z "$dir" ] || rm -rf "$new"
}

read_input() {
  outside='' inside='' files='' tests='' solved=''
  while IFS= read -r line; do
    value=${line#* }$line_end
    case $line in
      'outside '*) outside=$outside$value ;;
      'inside '*) inside=$inside$value ;;
      'file '*) files=$files$value ;;
      'test '*) tests=$tests$value ;;
      'solved '*) solved=$solved$value ;;
    esac
  done
}

# Sets `top` to the root of the repository that the workdir is in; empty if there is none.
find_top() {
  top=$(cd -P -- "$work" 2>/dev/null && pwd -P) || fail 93 "there is no folder $work"
  while [ -n "$top" ] && [ ! -e "$top/.git" ] && [ ! -L "$top/.git" ]; do top=${top%/*}; done
}

# Begins the new repository of a work tree; it borrows the objects of the old one. Sets `base`.
borrow() {
  tree=$1 dir=$1/.git new=$1/.git.new
  can_replace || new=$home/repository
  old=$(safe_git --git-dir="$dir" rev-parse --absolute-git-dir 2>&1) ||
    fail 93 "$dir cannot be read: $old"
  common=$old
  [ ! -f "$old/commondir" ] || common=$(cd -P -- "$old" && cd -P -- "$(cat commondir)" && pwd -P) ||
    fail 93 "$old names a repository that is not there"
  head=$(safe_git --git-dir="$dir" rev-parse -q --verify HEAD 2>/dev/null) || head=''
  branch=$(safe_git --git-dir="$dir" symbolic-ref -q HEAD) || branch=''
  rm -rf "$new"
  mkdir -p "$new/objects/pack" "$new/objects/info" "$new/refs/heads" "$new/info" ||
    fail 95 "cannot write $tree"
  say 'ref: refs/heads/main' >"$new/HEAD"
  for name in shallow info/exclude info/attributes info/sparse-checkout; do
    [ ! -f "$common/$name" ] || cp "$common/$name" "$new/$name"
  done
  [ ! -f "$old/info/sparse-checkout" ] || cp "$old/info/sparse-checkout" "$new/info/"
  cat "$common/config" "$old/config.worktree" >"$new/config" 2>/dev/null
  git config -f "$new/config" --list >/dev/null 2>&1 || fail 93 "$common/config cannot be read"
  keep_settings "$new/config" "$repository_settings"
  git config -f "$new/config" core.bare false || fail 95 "cannot write $new/config"
  stores=$common/objects
  for_each "$(cat "$common/objects/info/alternates" 2>/dev/null)" add_store
  say "$stores" >"$new/objects/info/alternates"
  linked=$(cat "$common"/worktrees/*/gitdir 2>/dev/null)
  base=$head tags=''
  [ -n "$head" ] || return 0
  new_git cat-file -e "$head^{commit}" 2>/dev/null || fail 93 "HEAD of $tree is not a commit"
  if [ -n "$2" ] && new_git merge-base --is-ancestor "$2" "$head" 2>/dev/null; then
    base=$(new_git rev-parse -q --verify "$2^{commit}")
  fi
  # Tags of the past tell a project its version; the text of an annotated one may be newer.
  safe_git --git-dir="$dir" for-each-ref refs/tags --format="$tag_format" >"$new/packed-refs" \
    2>/dev/null
  [ ! -s "$new/packed-refs" ] || tags=$(new_git for-each-ref --merged="$base" refs/tags \
    --format='%(objectname) %(refname)' 2>/dev/null)
}

can_replace() { [ -w "$tree" ] && [ -w "$dir" ]; }

add_store() {
  case $1 in /*) path=$1 ;; *) path=$common/objects/$1 ;; esac
  stores=$stores$line_end$path lent=$lent$path$line_end
}

# Copies the base commit, and its past if $1 is `full`, and puts the new repository in its place.
replace() {
  kept=$1 missing='' problem=''
  [ -z "$(find "$common/objects/pack" -name '*.promisor' 2>/dev/null)" ] ||
    missing=--missing=allow-any
  if [ -n "$missing" ] || is_large; then kept=none; fi
  if [ -n "$base" ]; then
    # A past with holes cannot be kept, nor one with files of the solution, such as a reverted fix.
    if [ "$kept" = none ] || ! copy_objects || has_solution; then
      say "$stores" >"$new/objects/info/alternates"
      kept=full
      case $(new_git rev-list --parents -n 1 "$base" 2>/dev/null) in
        *' '*) kept=none && say "$base" >"$new/shallow" ;;
      esac
      copy_objects || lost
    fi
    [ ! -f "$old/index" ] || cp -p "$old/index" "$new/index"
    cp -p "$old"/sharedindex.* "$new/" 2>/dev/null
    # Files keep their state; whatever was staged beyond the base is not staged any more.
    new_git read-tree --reset "$base" 2>/dev/null || {
      rm -f "$new/index" && problem=$(new_git read-tree "$base" 2>&1)
    } || lost
  fi
  rm -f "$new/objects/info/alternates"
  write_references
  owner=$(stat -c %u:%g "$tree")
  [ "$owner" = 0:0 ] || chown -R "$owner" "$new"
  can_replace && rm -rf "$dir" && mv "$new" "$dir" || fail 95 "cannot replace $dir"
}

is_large() {
  objects=0 kib=0
  while read -r name number; do
    case $name in
      count: | in-pack:) objects=$((objects + number)) ;;
      size: | size-pack:) kib=$((kib + number)) ;;
    esac
  done <<END
$(safe_git --git-dir="$common" count-objects -v)
END
  [ "$objects" -gt "$max_objects" ] || [ "$kib" -gt "$max_kib" ]
}

copy_objects() {
  rm -f "$new"/objects/pack/*
  problem=$(say "$base" | new_git -c pack.compression=1 -c pack.windowMemory=64m \
    -c pack.threads=1 pack-objects --quiet --revs --delta-base-offset --window=0 --non-empty \
    $missing "$new/objects/pack/pack" 2>&1 >/dev/null)
  code=$?
  rm -f "$new/objects/info/alternates"
  return "$code"
}

has_solution() {
  [ -n "$solved" ] || return 1
  stored=$(say "$solved" | new_git cat-file --batch-check 2>/dev/null | sed -n 's/ blob .*//p')
  [ -n "$stored" ] || return 1
  new_git ls-tree -r "$base" | cut -d ' ' -f 3 | cut -f 1 >"$home/base"
  say "$stored" | grep -q -v -x -F -f "$home/base"
}

lost() {
  case $problem in
    *[Nn]'o space left'* | *'ut of diskspace'* | *'quota exceeded'* | *'write error'*)
      fail 95 "no space left for the objects of the base commit" ;;
  esac
  fail 93 "objects of the base commit are lost: $problem"
}

write_references() {
  case ${branch#refs/heads/} in
    '' | main | master | trunk | dev | devel | develop | development | default | stable | next) ;;
    *[!0-9.xvV_-]*) branch=refs/heads/main ;; # it may name the task
    *[0-9]*.*) ;;
    *) branch=refs/heads/main ;;
  esac
  if [ -z "$branch" ]; then say "$base" >"$new/HEAD"
  else
    say "ref: $branch" >"$new/HEAD"
    [ -z "$base" ] || { mkdir -p "$new/${branch%/*}" && say "$base" >"$new/$branch"; }
  fi
  [ "$kept" = full ] || tags=$(say "$tags" | grep "^$base ")
  rm -f "$new/packed-refs"
  [ -z "$tags" ] || say "$tags" >"$new/packed-refs"
  # `shallow` may name commits of other branches.
  [ -f "$new/shallow" ] || return 0
  new_git cat-file --batch-check <"$new/shallow" | sed -n 's/ commit .*//p' >"$home/shallow"
  rm -f "$new/shallow"
  [ ! -s "$home/shallow" ] || cp "$home/shallow" "$new/shallow"
}

# Prints every other repository and bundle on the machine, the deepest first.
find_others() {
  find / "$work" /dev/shm -xdev \
    \( -path /proc -o -path /sys -o -path /dev -o -path "$top/.git" -o -path "$top/.git.new" \) \
    -prune -o \( -name .git -o -name HEAD -o -name '*.bundle' \) -print 2>/dev/null |
    sort -r -u | while IFS= read -r path; do
    case $path in
      "$top/.git" | */.git/HEAD) ;;
      *.bundle)
        case $(head -c 14 "$path" 2>/dev/null) in '# v'?' git bundl') say "$path" ;; esac ;;
      */HEAD) [ ! -d "${path%/*}/objects" ] || [ ! -d "${path%/*}/refs" ] || say "${path%/*}" ;;
      *) say "$path" ;;
    esac
  done
}

hide_inner() {
  case $1 in
    "$top"/*.bundle) remove "$1"; return ;;
    "$top"/*) ;;
    *) return ;;
  esac
  if [ -n "$dir" ] && is_linked "$1"; then remove_work_tree "$1"
  elif [ -n "$dir" ] && is_copy "$1"; then remove_copy "$1"
  elif [ "${1##*/}" = .git ]; then
    # A submodule, or without a repository above it perhaps the task's own.
    inner_want=$want
    [ -z "$dir" ] || inner_want=''
    (borrow "${1%/.git}" "$inner_want" && replace none) >/dev/null 2>&1 || {
      rm -rf "${1%/.git}/.git.new"
      remove "$1"
    }
  fi
}

hide_outer() {
  case $1 in
    "$top"/*) ;;
    *.bundle) remove "$1" ;;
    *) ! is_copy "$1" || remove_copy "$1" ;;
  esac
}

is_copy() {
  [ -e "$1" ] && say "$entries$line_end$solved" | grep . |
    safe_git --git-dir="$1" cat-file --batch-check 2>/dev/null | grep -q -v ' missing$'
}

# The files beside a copy's git folder go, too, if they are of a commit after the base.
remove_copy() {
  head=$(safe_git --git-dir="$1" rev-parse -q --verify 'HEAD^{commit}' 2>/dev/null) || head=''
  if is_linked "$1"; then remove "${1%/.git}"
  elif [ "${1##*/}" != .git ] || [ -z "$head" ] || [ "$head" = "$want" ] ||
    safe_git --git-dir="$git_dir" merge-base --is-ancestor "$head" "$base" 2>/dev/null
  then remove "$1"
  else remove "${1%/.git}"
  fi
}

# Whether a file `.git` points to a linked work tree, also if its repository is gone. The pointer may
# be relative, and a submodule may have the word in its name.
is_linked() {
  [ -f "$1" ] || return 1
  pointer=$(sed -n 's/^gitdir: //p' "$1")
  case $pointer in /*) ;; *) pointer=${1%/*}/$pointer ;; esac
  case $pointer in
    */worktrees/*) [ -f "$pointer/commondir" ] || [ ! -d "$pointer" ] ;;
    *) return 1 ;;
  esac
}

remove_work_tree() {
  case $1 in
    "$top/.git") ;;
    "$top"/*) [ -d "$1" ] || remove "${1%/.git}" ;;
    *) [ ! -f "$1" ] || remove "${1%/.git}" ;;
  esac
}

remove_store() {
  case $1 in "$top"/.git/*) ;; *) [ ! -d "$1" ] || remove "$1" ;; esac
}

# Removes files that datasets and tools leave, hidden tests, and what users configure for git.
remove_files() {
  for file in /etc/gitconfig /root/.gitconfig /root/.config/git/config \
    /home/*/.gitconfig /home/*/.config/git/config; do
    [ ! -f "$file" ] || keep_settings "$file" "$user_settings"
  done
  prefix=$(cd -P -- "$work" && pwd -P)
  prefix=${prefix#"$top"} prefix=${prefix#/} prefix=${prefix:+$prefix/}
  cd -- "$top/" || exit 93
  IFS=$line_end
  for path in $outside $inside; do
    case $path in /*) ;; *) path=$top/$path ;; esac
    remove "$path"
  done
  unset IFS
  for_each "$files" remove
  for_each "$tests" restore_test
  [ "$top" != / ] || return 0
  for_each "$(find "$top/" -path "$top/.git" -prune -o \( -name .hg -o -name .svn -o -name .bzr \
    -o -name .jj -o -name .sl -o -name '*.orig' -o -name '*.rej' -o -name .pytest_cache \
    -o -name .mypy_cache \) -print -prune)" remove
  remove_stale_compiled
}

# A hidden test goes; one that the base has, too, gets the base's text.
restore_test() {
  path=$prefix$1 name=${1##*/} folder=$prefix.
  case $1 in */*) folder=$prefix${1%/*} ;; esac
  rm -f -- "$folder/__pycache__/${name%.*}".*.pyc 2>/dev/null || deny "$top/$folder/__pycache__"
  blob=$(of_base "$base" -- "$path" | cut -d ' ' -f 3 | cut -f 1)
  if [ -z "$blob" ]; then remove "$top/$path"
  elif [ -e "$path" ] && [ "$(git hash-object --no-filters -- "$path" 2>/dev/null)" != "$blob" ]; then
    if safe_git --git-dir="$git_dir" --work-tree="$top" checkout -q "$base" -- "$path" 2>/dev/null
    then say "removed changes of $top/$path"
    else deny "$top/$path"
    fi
  fi
}

# Removes compiled Python whose source is newer or gone: it may hold the code of another commit.
remove_stale_compiled() {
  find "$top/" -path "$top/.git" -prune -o -path '*/__pycache__/*.pyc' -print |
    while IFS= read -r path; do
      name=${path##*/} source=${path%/__pycache__/*}/
      source=$source${name%%.*}.py
      if [ ! -e "$source" ] || [ "$source" -nt "$path" ]; then say "${path#"$top"/}"; fi
    done >"$home/stale"
  [ -s "$home/stale" ] || return 0
  of_base -r --name-only "$base" | grep '\.pyc$' >"$home/tracked"
  grep -v -x -F -f "$home/tracked" "$home/stale" | tr '\n' '\0' | xargs -0 rm -f -- ||
    deny "$top"
}

of_base() { [ -z "$base" ] || safe_git --git-dir="$git_dir" ls-tree "$@"; }

# Removes a file or folder, unless the base has files of it or the repository lies in it.
remove() {
  case $top/ in "${1%/}"/*) return ;; esac
  if [ ! -e "$1" ] && [ ! -L "$1" ]; then return; fi
  case $1 in
    "$top"/*) [ -z "$(of_base -r "$base" -- "${1#"$top"/}" | head -n 1)" ] || return 0 ;;
  esac
  if rm -rf -- "$1" 2>/dev/null; then say "removed $1"; else deny "$1"; fi
}

# Removes the settings of a file that do not match a pattern.
keep_settings() {
  for_each "$(git config --no-includes -f "$1" --name-only --list 2>/dev/null | sort -u |
    grep -v -x -E "$2")" remove_setting "$1"
}

remove_setting() { git config -f "$2" --unset-all "$1" 2>/dev/null || deny "$2"; }

# Runs a command for each line of a text, with a further argument.
for_each() {
  while IFS= read -r each; do
    [ -z "$each" ] || "$2" "$each" "${3-}" </dev/null
  done <<END
$1
END
}

main
