# Files that give the solution away, and what users configure for git.

# What the machine and its users configure for git may run programs and hold credentials, too.
clean_user_settings() { for_each "$(user_settings)" clean_user_file; }

clean_user_file() {
  names=$(git config --no-includes -f "$1" --name-only --list 2>/dev/null)
  file=$1
  for_each "$names" clean_user_setting
}

clean_user_setting() {
  is_safe_user_setting "$1" && return
  git config -f "$file" --unset-all "$1" 2>/dev/null
  case $? in
    0) changed=1 ;;
    5) ;; # there were two of it, and both are gone
    *) deny "$file" ;;
  esac
}

remove_hidden() {
  folder=$(cd -P -- "$work" && pwd -P)
  prefix=${folder#"$top"} prefix=${prefix#/} prefix=${prefix:+$prefix/}
  cd -- "$top" || exit 93
  old_ifs=$IFS IFS=$line_end
  for path in $hidden; do remove_outside "$path"; done
  for path in $names_inside; do remove_inside "$path"; done
  IFS=$old_ifs
  for_each "$given" remove_outside
  for_each "$tests" put_back
}

# The list of patterns was spread over the files already, as it came unquoted.
remove_outside() {
  [ -e "$1" ] || [ -L "$1" ] || return 0
  case "$top/" in "$1"/* | "${1%/}"/*) return 0 ;; esac
  case $1 in
    "${top%/}"/*) remove_inside "${1#"${top%/}"/}" ;;
    *) remove "$1" ;;
  esac
}

remove() {
  if rm -rf -- "$1" 2>/dev/null; then say "removed $1"; else deny "$1"; fi
}

is_of_base() {
  [ -n "$base" ] && [ -n "$(safe_git --git-dir="$top/.git" ls-tree -r "$base" -- "$1" | head -n 1)" ]
}

remove_inside() {
  [ -e "$1" ] || [ -L "$1" ] || return 0
  is_of_base "$1" || remove "${top%/}/$1"
}

# A hidden test goes; one that the base has too stands as the base has it.
put_back() {
  path=$prefix$1 name=${1##*/} folder=.
  case $path in */*) folder=${path%/*} ;; esac
  for file in "$folder/__pycache__/${name%.*}".*.pyc; do
    [ ! -e "$file" ] || { rm -f -- "$file"; changed=1; }
  done
  if [ -e "$path" ] || [ -L "$path" ]; then :; else return 0; fi
  if ! is_of_base "$path"; then
    [ -z "$base" ] || safe_git -C "$top" rm -q --cached --ignore-unmatch -- "$path" 2>/dev/null
    remove "${top%/}/$path"
  elif ! safe_git -C "$top" diff --quiet --no-ext-diff --no-textconv "$base" -- "$path" 2>/dev/null
  then
    if safe_git -C "$top" checkout -q "$base" -- "$path" 2>/dev/null
    then say "removed changes of $top/$path"
    else deny "$top/$path"
    fi
  fi
}

remove_left_over() { for_each "$inside" remove_one_left_over; }

remove_one_left_over() {
  case $1 in */.git) ;; *) remove_inside "${1#"${top%/}"/}" ;; esac
}

# Python reads these no more, but they hold the code of another commit. There may be thousands.
remove_stale_compiled() {
  stale=$(stale_compiled)
  [ -n "$stale" ] || return 0
  cd -- "$top" || exit 93
  if say "$stale" | tr '\n' '\0' | xargs -0 rm -f -- 2>/dev/null
  then changed=1
  else deny "compiled files in $top"
  fi
}

remove_store() {
  case "$top/" in "$1"/*) return ;; esac
  case "$dir/" in "$1"/*) return ;; esac
  [ -e "$1" ] || [ -L "$1" ] || return
  remove "$1"
}
