# Files that give the solution away, and what users configure for git.

# What the machine and its users configure for git may run programs and hold credentials, too.
clean_user_settings() {
  for file in /etc/gitconfig /root/.gitconfig /root/.config/git/config \
    /home/*/.gitconfig /home/*/.config/git/config; do
    [ -s "$file" ] && [ -r "$file" ] || continue
    git config --no-includes -f "$file" --name-only --list 2>/dev/null | sort -u |
      while read -r name; do
        case $name in
          user.* | safe.* | init.* | gc.* | color.* | advice.* | pull.* | push.* | status.* | \
          core.autocrlf | core.eol | core.filemode | core.quotepath | core.symlinks | \
          maintenance.* | http.version) ;;
          *) git config -f "$file" --unset-all "$name" 2>/dev/null && say changed ;;
        esac
      done
  done
}

remove_hidden() {
  old_ifs=$IFS IFS=$line_end
  for pattern in $(set -f; say "$orders" | sed -n 's/^hidden //p'); do
    remove_outside "$pattern"
  done
  cd -- "$top" || exit 93
  set -f
  for order in $orders; do
    case $order in
      'inside '*) set +f; for path in ${order#inside }; do remove_inside "$path"; done; set -f ;;
      'test '*) put_back "${order#test }" ;;
    esac
  done
  set +f
  IFS=$old_ifs
}

# The pattern was spread over the files already, as it came unquoted.
remove_outside() {
  [ -e "$1" ] || [ -L "$1" ] || return 0
  case "$top/" in "$1"/* | "${1%/}"/*) return 0 ;; esac
  rm -rf "$1" 2>/dev/null || foreign "cannot remove $1"
  say "removed $1"
}

is_of_base() {
  [ -n "$base" ] && [ -n "$(safe_git --git-dir="$top/.git" ls-tree -r "$base" -- "$1" | head -n 1)" ]
}

remove_inside() {
  [ -e "$1" ] || [ -L "$1" ] || return 0
  is_of_base "$1" && return 0
  rm -rf -- "$1" 2>/dev/null || foreign "cannot remove $top/$1"
  say "removed $top/$1"
}

# A hidden test goes; one that the base has too stands as the base has it.
put_back() {
  set +f
  name=${1##*/} folder=.
  case $1 in */*) folder=${1%/*} ;; esac
  rm -f -- "$folder/__pycache__/${name%.*}".*.pyc
  set -f
  if [ -e "$1" ] || [ -L "$1" ]; then :; else return 0; fi
  if is_of_base "$1"; then
    if safe_git -C "$top" diff --quiet --no-ext-diff --no-textconv "$base" -- "$1" 2>/dev/null
    then return 0
    fi
    safe_git -C "$top" checkout -q "$base" -- "$1" || broken "cannot restore $top/$1"
    say "removed changes of $top/$1"
  else
    if [ -n "$base" ]; then safe_git -C "$top" rm -q --cached --ignore-unmatch -- "$1"; fi
    rm -rf -- "$1" || foreign "cannot remove $top/$1"
    say "removed $top/$1"
  fi
}

remove_left_over() {
  old_ifs=$IFS IFS=$line_end
  set -f
  for path in $inside; do
    case $path in
      */.git) ;;
      *) remove_inside "${path#"${top%/}"/}" ;;
    esac
  done
  set +f
  IFS=$old_ifs
}

remove_store() {
  case "$top/" in "$1"/*) return ;; esac
  case "$dir/" in "$1"/*) return ;; esac
  [ -e "$1" ] || [ -L "$1" ] || return
  rm -rf "$1" 2>/dev/null || foreign "cannot remove $1"
  say "removed $1"
}
