# Other repositories on the machine, and what they share with this one.

# Other repositories on the machine, named by their HEAD, and bundles.
look_elsewhere() {
  copies=$(find / "$work" -xdev \( -path /proc -o -path /sys -o -path /dev -o -path "$top/.git" \) \
    -prune -o \( -name HEAD -o -name .git -o -name '*.bundle' -o -name .hg \) -print 2>/dev/null |
    sort -u | while IFS= read -r path; do
      case $path in
        "${top%/}"/.git) continue ;;
        */HEAD)
          [ -d "${path%/*}/objects" ] && [ -d "${path%/*}/refs" ] || continue
          path=${path%/*} ;;
        *.bundle)
          case $(head -c 14 "$path" 2>/dev/null) in '# v'?' git bundl') ;; *) continue ;; esac ;;
        */.git) [ -f "$path" ] || continue ;;
      esac
      say "$path"
    done | sort -u)
  for_each "$copies" tell_found
}

tell_found() { say "found $1"; }

# Sets what `is_copy` compares with: the base commit and what its top folder holds. Without a
# repository of its own, a task still names its base.
note_base() {
  entries=${base:-$want}$line_end
  [ -z "$base" ] || entries=$entries$(safe_git --git-dir="$top/.git" ls-tree "$base" |
    sed 's/^[^ ]* [^ ]* \([0-9a-f]*\).*/\1/')
}

remove_copies() {
  [ -n "$copies$extra" ] || return 0
  note_base
  for_each "$copies$line_end$extra" remove_copy
}

is_copy() {
  case $1 in
    "${top%/}/.git" | "${top%/}"/*/.git) return 1 ;;
    *.bundle | */.hg | */objects) [ -e "$1" ]; return ;;
  esac
  store=$1
  if [ -f "$1" ]; then store=$(sed -n 's/^gitdir: //p' "$1"); fi
  [ -d "$store" ] && say "$entries" |
    safe_git --git-dir="$store" cat-file --batch-check 2>/dev/null | grep -q -v ' missing$'
}

# The files beside a copy's git folder go too, where they are of a commit after the base.
remove_copy() {
  is_copy "$1" || return 0
  head=''
  case $1 in
    */.git) head=$(safe_git --git-dir="$store" rev-parse -q --verify 'HEAD^{commit}' 2>/dev/null) ;;
  esac
  remove_store "$1"
  if [ -z "$head" ] || [ "$head" = "$want" ]; then return 0; fi
  safe_git --git-dir="$top/.git" cat-file -e "$head" 2>/dev/null && return 0
  case ${1%/.git} in /*/*) remove_store "${1%/.git}" ;; esac
}
