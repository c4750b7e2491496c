# Files that give the solution away, and what users configure for git.

# What the machine and its users configure for git may run programs and hold credentials, too.
clean_user_settings() { for_each "$(user_settings)" clean_user_file; }

clean_user_file() {
  names=$(git config --no-includes -f "$1" --name-only --list 2>/dev/null | sort -u)
  file=$1
  for_each "$names" clean_user_setting
}

clean_user_setting() {
  is_safe_user_setting "$1" && return
  git config -f "$file" --unset-all "$1" 2>/dev/null || foreign "cannot write $file"
  changed=1
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

remove_left_over() { for_each "$inside" remove_one_left_over; }

remove_one_left_over() {
  case $1 in */.git) ;; *) remove_inside "${1#"${top%/}"/}" ;; esac
}

remove_store() {
  case "$top/" in "$1"/*) return ;; esac
  case "$dir/" in "$1"/*) return ;; esac
  [ -e "$1" ] || [ -L "$1" ] || return
  rm -rf "$1" 2>/dev/null || foreign "cannot remove $1"
  say "removed $1"
}
