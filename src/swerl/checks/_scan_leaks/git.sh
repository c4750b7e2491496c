# Report what a repository and its machine reveal of the future. Follows common.sh and copies.sh.
#
#   sh -c SCRIPT scan WORKDIR BASE <input       (the same input as for hiding the future)
#
# Prints lines of fields between tabs: `leak KIND NAME EVIDENCE`, and `unchecked REASON`.
look=1 extra=''

main() {
  input=$(cat)
  for tool in git find sed sort comm; do
    command -v "$tool" >/dev/null 2>&1 || say "unchecked$tab""git: the image has no $tool"
  done
  find_top
  base=
  if [ -n "$top" ]; then
    dir=$top/.git
    check_links
    if find_base; then
      check_settings
      check_references
      check_notes
      check_objects
    fi
    check_inside
  else
    top=$(cd -P -- "$work" && pwd -P)
  fi
  check_user_settings
  check_hidden
  solved=$(say "$input" | sed -n 's/^solved //p')$line_end
  note_base
  look_elsewhere >/dev/null
  for_each "$copies" check_copy
  command -v python3 >/dev/null 2>&1 || { check_lines solution; check_lines tests; }
}

leak() { printf 'leak\t%s\t%s\t%s\n' "$1" "$2" "$(say "$3" | tr '\n\t' '; ' | cut -c 1-300)"; }

repository() { safe_git --git-dir="$dir" --work-tree="$top" "$@"; }

find_base() {
  head=$(repository rev-parse -q --verify 'HEAD^{commit}' 2>/dev/null) || {
    say "unchecked$tab""git: HEAD of $top names no commit"
    return 1
  }
  base=$head
  [ -n "$want" ] && full=$(repository rev-parse -q --verify "$want^{commit}" 2>/dev/null) &&
    repository merge-base --is-ancestor "$full" "$head" 2>/dev/null && base=$full
  past=$home/past
  repository rev-list "$base" 2>/dev/null | sort >"$past"
  if [ "$head" != "$base" ]; then
    leak reference HEAD "$(repository log --format='%h %s' -n 3 "$base..$head" 2>/dev/null)"
  fi
}

check_links() {
  if [ -L "$dir" ]; then leak link "$dir" "a link to $(readlink "$dir")"
  elif [ -f "$dir" ]; then leak link "$dir" "$(head -n 1 "$dir")"
  fi
  [ ! -f "$dir/objects/info/alternates" ] ||
    leak link "$dir/objects/info/alternates" "$(cat "$dir/objects/info/alternates")"
}

check_settings() {
  names=$(git config --no-includes -f "$dir/config" --name-only --list 2>/dev/null)
  for_each "$names" check_setting
  [ ! -f "$dir/config.worktree" ] || leak setting "$dir/config.worktree" "settings of one work tree"
}

check_setting() {
  is_safe_setting "$1" && return
  leak setting "$1" "$(git config --no-includes -f "$dir/config" --get-all "$1")"
}

check_references() {
  others=$(repository for-each-ref --no-merged="$base" --format='%(refname)' 2>/dev/null)
  for_each "$others" check_reference
}

check_reference() {
  leak reference "$1" "$(repository log -1 --format='%h %s' "$1" -- 2>/dev/null)"
}

# Git's files beside its references, and the programs that it would run.
check_notes() {
  for path in "$dir"/*; do
    case ${path##*/} in
      HEAD | config | index | sharedindex.* | objects | refs | shallow | info | description | \
        COMMIT_EDITMSG | branches | logs | packed-refs | hooks | config.worktree) ;;
      *) [ ! -e "$path" ] || leak state "$path" "$(head -c 200 "$path" 2>/dev/null)" ;;
    esac
  done
  for path in "$dir"/hooks/*; do
    case $path in *.sample) ;; *) [ ! -e "$path" ] || leak setting "$path" "a program" ;; esac
  done
  sides=$(repository ls-files --resolve-undo 2>/dev/null | head -n 3)
  [ -z "$sides" ] || leak state "$dir/index" "both sides of a conflict: $sides"
  [ ! -e "$dir/info/grafts" ] || leak state "$dir/info/grafts" "$(cat "$dir/info/grafts")"
  for path in "$dir"/objects/info/commit-graph* "$dir"/objects/pack/multi-pack-index*; do
    [ ! -e "$path" ] || leak state "$path" "a list of commits and objects"
  done
  check_log shallow "$dir/shallow"
  check_log packed-refs "$dir/packed-refs"
  if [ -d "$dir/logs" ]; then
    find "$dir/logs" -type f | while IFS= read -r path; do check_log reflog "$path"; done
  fi
}

# Commit ids in one of git's files that are not in the past.
check_log() {
  [ -f "$2" ] || return 0
  unknown=$(grep -o -E '\b[0-9a-f]{40}([0-9a-f]{24})?\b' "$2" | grep -v '^0*$' | sort -u |
    comm -23 - "$past" | head -n 3)
  if [ "$1" = packed-refs ]; then unknown=$(tags_aside "$unknown"); fi
  [ -z "$unknown" ] || leak "$([ "$1" = reflog ] && say reflog || say state)" "$2" "$unknown"
}

tags_aside() {
  say "$1" | repository cat-file --batch-check 2>/dev/null | sed -n 's/ commit .*//p'
}

check_objects() {
  repository rev-list --objects --indexed-objects "$base" 2>/dev/null | cut -d ' ' -f 1 |
    sort -u >"$home/needed"
  repository cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' 2>/dev/null |
    sort >"$home/held"
  cut -d ' ' -f 1 "$home/held" | comm -23 - "$home/needed" >"$home/spare"
  spare=$(wc -l <"$home/spare")
  if [ "$spare" -gt 0 ]; then
    commits=$(join "$home/spare" "$home/held" 2>/dev/null | sed -n 's/ commit$//p')
    first=$(say "$commits" | head -n 3 | repository log --no-walk --stdin --format='%h %s' \
      2>/dev/null)
    leak object "$spare objects" "${first:-$(head -n 3 "$home/spare")}"
  fi
  odd=$(find "$dir/objects" ! -type d 2>/dev/null | grep -v -E '/objects/([0-9a-f]{2}/([0-9a-f]{38}|[0-9a-f]{62})|pack/pack-[0-9a-f]+\.(pack|idx|rev|bitmap)|info/(packs|commit-graph.*|alternates))$')
  [ -z "$odd" ] || leak object "$dir/objects" "$odd"
  for pack in "$dir"/objects/pack/*.pack; do
    [ ! -e "$pack" ] || [ -e "${pack%.pack}.idx" ] || leak object "$pack" "a pack without an index"
  done
}

check_inside() {
  walk
  for_each "$inside" check_left_over
  for_each "$(stale_compiled)" check_compiled
}

check_compiled() { leak file "$top/$1" "compiled from another source than the one beside it"; }

check_left_over() {
  case $1 in
    */.git)
      if [ -f "$1" ] || [ -L "$1" ]; then leak link "$1" "$(head -n 1 "$1" 2>/dev/null)"; return; fi
      number=$(safe_git --git-dir="$1" rev-list --all --reflog 2>/dev/null | wc -l)
      [ "$number" -le 1 ] || leak copy "$1" "a repository of $number commits inside the work tree" ;;
    *) is_of_base "${1#"${top%/}"/}" || leak file "$1" "$(head -c 200 "$1" 2>/dev/null)" ;;
  esac
}

is_of_base() {
  [ -n "$base" ] && [ -n "$(repository ls-tree -r "$base" -- "$1" | head -n 1)" ]
}

check_user_settings() { for_each "$(user_settings)" check_user_file; }

check_user_file() {
  file=$1
  for_each "$(git config --no-includes -f "$1" --name-only --list 2>/dev/null)" check_user_setting
}

check_user_setting() {
  is_safe_user_setting "$1" || leak setting "$file: $1" "$(git config -f "$file" --get-all "$1")"
}

check_hidden() {
  old_ifs=$IFS IFS=$line_end
  for path in $(set -f; say "$input" | sed -n 's/^hidden //p'); do
    case "$top/" in "$path"/* | "${path%/}"/*) continue ;; esac
    [ -e "$path" ] || continue
    case $path in "${top%/}"/*) is_of_base "${path#"${top%/}"/}" && continue ;; esac
    leak file "$path" "a file that its dataset hides"
  done
  folder=$(cd -P -- "$work" && pwd -P)
  prefix=${folder#"$top"} prefix=${prefix#/} prefix=${prefix:+$prefix/}
  cd -- "$top" || exit 93
  for path in $(set -f; say "$input" | sed -n 's/^inside //p'); do
    [ ! -e "$path" ] || is_of_base "$path" || leak file "$top/$path" "a file that its dataset hides"
  done
  IFS=$old_ifs
  for_each "$(say "$input" | sed -n 's/^test //p')" check_test
}

check_test() {
  set -- "$prefix$1"
  name=${1##*/} folder=.
  case $1 in */*) folder=${1%/*} ;; esac
  for path in "$folder/__pycache__/${name%.*}".*.pyc; do
    [ ! -e "$path" ] || leak file "$top/$path" "a hidden test, compiled"
  done
  [ -e "$1" ] || return 0
  if ! is_of_base "$1"; then leak file "$top/$1" "a hidden test that the base does not have"
  elif ! repository diff --quiet --no-ext-diff --no-textconv "$base" -- "$1" 2>/dev/null
  then leak file "$top/$1" "differs from the base, and a hidden test replaces it"
  fi
}

check_copy() {
  leak copy "$1" "$(safe_git --git-dir="$1" log -1 --format='%h %s' 2>/dev/null)"
}

# Without Python, plain files are at least searched for long lines.
check_lines() {
  : >"$home/base" && : >"$home/lines"
  say "$input" | sed -n "s/^$1 line //p" >"$home/all"
  [ -s "$home/all" ] || return 0
  [ -z "$base" ] || repository grep -h -a -F -f "$home/all" "$base" >"$home/base" 2>/dev/null
  while IFS= read -r line; do
    grep -q -a -F -e "$line" "$home/base" || say "$line" >>"$home/lines"
  done <"$home/all"
  enough=$(wc -l <"$home/lines")
  [ "$enough" -gt 0 ] || return 0
  [ "$enough" -lt 3 ] || enough=3
  for_each "$(find / "$work" /dev/shm -xdev \( -path /proc -o -path /sys -o -path /dev \
    -o -path "$top/.git" -o -path "$home" \) -prune -o -type f -size -16384 \
    -exec grep -l -a -F -f "$home/lines" {} + 2>/dev/null | sort -u)" check_lines_of
}

check_lines_of() {
  case $1 in "${top%/}"/*) ! is_of_base "${1#"${top%/}"/}" || return 0 ;; esac
  held=$(grep -o -a -F -f "$home/lines" "$1" | sort -u)
  [ "$(say "$held" | wc -l)" -lt "$enough" ] || leak text "$1" "$held"
}
