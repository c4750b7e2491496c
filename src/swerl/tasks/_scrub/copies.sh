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

for_each() {
  old_ifs=$IFS IFS=$line_end
  set -f
  for each in $1; do IFS=$old_ifs; "$2" "$each"; IFS=$line_end; done
  set +f
  IFS=$old_ifs
}

remove_copies() {
  if [ "$look" != 1 ]; then copies=$(say "$orders" | sed -n 's/^copy //p'); fi
  copies=$copies$line_end$extra
  entries=
  if [ -n "$base" ]; then
    entries=$(safe_git --git-dir="$top/.git" ls-tree "$base" | sed 's/^[^ ]* [^ ]* \([0-9a-f]*\).*/\1/')
  fi
  for_each "$copies" remove_copy
}

# A repository is a copy where it holds the base commit or anything of its top folder.
remove_copy() {
  copy=$1
  [ -e "$copy" ] || return
  case $copy in
    "${top%/}/.git" | "${top%/}"/*/.git) return ;;
    *.bundle | */.hg | */objects) remove_store "$copy"; return ;;
  esac
  store=$copy
  if [ -f "$copy" ]; then store=$(sed -n 's/^gitdir: //p' "$copy"); fi
  shared=$(say "$base$line_end$entries" |
    safe_git --git-dir="$store" cat-file --batch-check 2>/dev/null | grep -v -c ' missing$')
  if [ -d "$store" ] && [ "${shared:-0}" -eq 0 ]; then return; fi
  if [ -f "$copy" ] && [ ! -d "$store" ]; then return; fi
  head=$(safe_git --git-dir="$store" rev-parse -q --verify 'HEAD^{commit}' 2>/dev/null)
  remove_store "$copy"
  folder=${copy%/.git}
  case $copy in */.git) ;; *) return ;; esac
  if [ -n "$head" ] && ! safe_git --git-dir="$top/.git" cat-file -e "$head" 2>/dev/null; then
    case $folder in /*/*) remove_store "$folder" ;; esac
  fi
}
