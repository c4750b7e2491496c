# Removes the future from the repository of a task's image.
#
#   sh -c SCRIPT hide_future WORKDIR BASE HISTORY OBJECTS KIB LOOK PART <input
#
# PART is `files`, `repository` or `all`. The input is lines: `hidden GLOB` outside the work tree,
# `inside GLOB` and `test PATH` relative to it, `given PATH` found by vetting, `copy PATH` found by
# an earlier run, `solved BLOB` ids of the files as the solution leaves them. Prints lines:
# `base SHA`, `history KIND`, `changed`, `removed PATH`, `found PATH`, `borrows` if copies may not be
# removed yet, and `denied PATH` for a path that only another user can change. Exit codes: 93 broken
# repository, 94 stopped midway by a file of another user, 95 no space, 0 done.
#
# The repository's settings are reduced to harmless ones before anything else.
tag_format='%(if)%(*objectname)%(then)%(*objectname)%(else)%(objectname)%(end) %(refname)'
history=$3 limit=$4 limit_kib=$5 look=$6 part=$7

main() {
  changed='' extra='' base='' dir='' nested_base='' compiled=''
  read_input
  find_top
  if [ -n "$top" ]; then
    [ "$part" = repository ] || find_inside
    if [ "$part" = files ]; then find_own_base
    else hide_in_repository "$top" "$want" "$history"
    fi
    base=$sha
    say "base $base"
    if [ "$part" != files ] && [ -n "$kept" ]; then
      say "history $kept"
      drop_solved
    fi
  else
    # Repositories below the workdir are no submodules: each may hold the task's own past.
    top=$(cd -P -- "$work" && pwd -P) inside='' nested_base=$want
    if [ "$part" != repository ] && [ "$top" != / ]; then find_inside; fi
  fi
  if [ "$part" = repository ]; then
    # The first part left the copies that this repository borrowed from.
    [ -z "$extra" ] || look=1
  else
    clean_user_settings
    remove_hidden
    remove_left_over
    remove_stale_compiled
  fi
  note_base
  if [ "$look" = 1 ]; then look_elsewhere; fi
  remove_copies
  [ -z "$changed" ] || say changed
}

# Sets `sha` without a change: the setup of the tests still needs the whole repository.
find_own_base() {
  tree=$top dir=$top/.git kept=''
  find_base "$want"
  if [ -L "$dir" ] || [ -f "$dir" ] || [ -f "$dir/objects/info/alternates" ]; then
    look=0 copies=''
    say borrows
  fi
}

# Each kind's values, a line each.
read_input() {
  hidden='' names_inside='' tests='' copies='' solved='' given=''
  while IFS= read -r line; do
    value=${line#* }$line_end
    case $line in
      'hidden '*) hidden=$hidden$value ;;
      'inside '*) names_inside=$names_inside$value ;;
      'given '*) given=$given$value ;;
      'test '*) tests=$tests$value ;;
      'copy '*) copies=$copies$value ;;
      'solved '*) solved=$solved$value ;;
    esac
  done
}

# Repositories inside the work tree lose their future at once; files are checked later.
find_inside() {
  walk
  # Inner repositories come first: the git folder of an outer one may hold theirs.
  [ -z "$inside" ] || inside=$(say "$inside" | sort -r)
  for_each "$inside" hide_in_nested
}
