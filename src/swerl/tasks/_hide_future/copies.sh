# Other repositories on the machine, and what they share with this one.
#
# `sha` and `solved` are known. A copy is a repository, an object store, a pack, a bundle or an archive
# of one of these.

# Sets `copies` to those on the machine, but for the repository at `top`, and prints them.
look_elsewhere() {
  copies=''
  for_each "$(find / "$work" /dev/shm -xdev \
    \( -path /proc -o -path /sys -o -path /dev -o -path "$top/.git" \) -prune -o \
    \( -name HEAD -o -name .git -o -name '*.bundle' -o -name .hg -o -path '*/objects/pack' \
    -o -name '*.pack' -o -name '*.tar' -o -name '*.tar.*' -o -name '*.tgz' -o -name '*.zip' \) \
    -print 2>/dev/null | sort -u | name_stores | sort -u)" note_copy
}

# Reads the paths of telling files, and prints the store that each belongs to.
name_stores() {
  while IFS= read -r path; do
    case $path in
      "${top%/}"/.git) continue ;;
      */HEAD)
        [ -d "${path%/*}/objects" ] && [ -d "${path%/*}/refs" ] || continue
        path=${path%/*} ;;
      */objects/pack)
        path=${path%/pack}
        if [ -f "${path%/*}/HEAD" ]; then continue; fi ;;
      */objects/pack/*.pack) continue ;;
      *.pack) case $(head -c 4 "$path" 2>/dev/null) in PACK) ;; *) continue ;; esac ;;
      *.bundle)
        case $(head -c 14 "$path" 2>/dev/null) in '# v'?' git bundl') ;; *) continue ;; esac ;;
      */.git) [ -f "$path" ] || continue ;;
    esac
    say "$path"
  done
}

note_copy() {
  is_copy "$1" || return 0
  copies=$copies$1$line_end
  say "found $1"
}

# Sets what `is_copy` compares with: the base commit, what its top folder holds, and the files that
# the solution leaves. Without a repository of its own, a task still names its base.
note_base() {
  entries=${base:-$want}$line_end$solved
  # Every project has the empty file.
  [ -z "$base" ] || entries=$entries$(safe_git --git-dir="$top/.git" ls-tree "$base" |
    sed -e 's/^[^ ]* [^ ]* \([0-9a-f]*\).*/\1/' -e /^e69de29bb2d1d6434b8b29ae775ad8c2e48c5391$/d)
}

remove_copies() { for_each "$copies$extra" remove_copy; }

is_copy() {
  store=$1
  case $line_end$extra in *"$line_end$1$line_end"*) [ -e "$1" ]; return ;; esac
  case $1 in
    "${top%/}/.git" | "${top%/}"/*/.git) return 1 ;;
    *.bundle | */.hg) [ -e "$1" ]; return ;;
    *.zip) grep -q -a -e '\.git/HEAD' -e 'objects/pack/pack-' "$1" 2>/dev/null; return ;;
    *.tar | *.tar.* | *.tgz)
      [ -f "$1" ] && tar -tf "$1" 2>/dev/null | grep -q -e '\.git/HEAD$' -e 'objects/pack/pack-'
      return ;;
    *.pack) is_copied_pack "$1"; return ;;
    */objects) is_copied_store "$1"; return ;;
  esac
  if [ -f "$1" ]; then store=$(sed -n 's/^gitdir: //p' "$1"); fi
  [ -d "$store" ] && has_entries --git-dir="$store"
}

has_entries() {
  say "$entries" | safe_git "$@" cat-file --batch-check 2>/dev/null | grep -q -v ' missing$'
}

# Objects without a repository are read through an empty one.
is_copied_store() {
  [ -d "$1" ] && make_empty && say "$1" >"$home/empty/objects/info/alternates" &&
    has_entries --git-dir="$home/empty"
}

# A pack may build on objects of the base, so it is indexed beside them.
is_copied_pack() {
  [ -f "$1" ] && make_empty || return 1
  if [ -n "$base" ]; then say "$top/.git/objects" >"$home/empty/objects/info/alternates"; fi
  safe_git --git-dir="$home/empty" index-pack --fix-thin --stdin <"$1" >/dev/null 2>&1 || return 1
  rm -f "$home/empty/objects/info/alternates"
  has_entries --git-dir="$home/empty"
}

make_empty() {
  rm -rf "$home/empty"
  safe_git init -q --bare --template= "$home/empty" 2>/dev/null && mkdir -p "$home/empty/objects/info"
}

# The files beside a copy's git folder go too, where they are of a commit after the base.
remove_copy() {
  is_copy "$1" || return 0
  head=''
  case $1 in
    */.git) head=$(safe_git --git-dir="$store" rev-parse -q --verify 'HEAD^{commit}' 2>/dev/null) ;;
    "${top%/}"/*) [ -d "$1" ] || { remove_inside "${1#"${top%/}"/}"; return; } ;;
  esac
  remove_store "$1"
  if [ -z "$head" ] || [ "$head" = "$want" ]; then return 0; fi
  safe_git --git-dir="$top/.git" cat-file -e "$head" 2>/dev/null && return 0
  case ${1%/.git} in /*/*) remove_store "${1%/.git}" ;; esac
}
