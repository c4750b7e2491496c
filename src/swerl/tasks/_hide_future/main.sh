# Brings the repository of a task's image to a state without a future.
#
#   sh -c SCRIPT scrub WORKDIR BASE HISTORY OBJECTS KIB LOOK <orders
#
# Orders are lines: `hidden GLOB` outside the work tree, `inside GLOB` and `test PATH` relative to
# it, `copy PATH` found by an earlier look, `solved BLOB` ids of the files as the solution leaves
# them. Says lines: `base SHA`, `history KIND`, `changed`, `removed PATH`, `found PATH`, and
# `denied PATH` for what only another user may change. Exit codes: 93 the repository is broken,
# 94 stopped midway by what another user owns, 95 no space, 0 done.
#
# The repository's settings are reduced to harmless ones before anything else.
tag_format='%(if)%(*objectname)%(then)%(*objectname)%(else)%(objectname)%(end) %(refname)'
history=$3 limit=$4 limit_kib=$5 look=$6

main() {
  changed='' extra='' base='' dir='' nested_base='' compiled=''
  read_orders
  find_top
  if [ -n "$top" ]; then
    find_inside
    scrub_repository "$top" "$want" "$history"
    base=$sha
    say "base $base"
    if [ -n "$kept" ]; then
      say "history $kept"
      drop_solved
    fi
  else
    # Repositories below the workdir are no submodules: each may hold the task's own past.
    top=$(cd -P -- "$work" && pwd -P) inside='' nested_base=$want
    if [ "$top" != / ]; then find_inside; fi
  fi
  clean_user_settings
  remove_hidden
  remove_left_over
  remove_stale_compiled
  if [ "$look" = 1 ]; then look_elsewhere; fi
  remove_copies
  [ -z "$changed" ] || say changed
}

# Each kind's values, a line each.
read_orders() {
  hidden='' names_inside='' tests='' copies='' solved=''
  while IFS= read -r order; do
    value=${order#* }$line_end
    case $order in
      'hidden '*) hidden=$hidden$value ;;
      'inside '*) names_inside=$names_inside$value ;;
      'test '*) tests=$tests$value ;;
      'copy '*) copies=$copies$value ;;
      'solved '*) solved=$solved$value ;;
    esac
  done
}

# Repositories inside the work tree are scrubbed at once, files are judged later.
find_inside() {
  walk
  # Inner repositories come first: the git folder of an outer one may hold theirs.
  [ -z "$inside" ] || inside=$(say "$inside" | sort -r)
  for_each "$inside" scrub_nested
}
