# The object store: only what the base, its past and the index need.

# Whether every object is one that the base, its past or the index needs.
holds_no_more() {
  [ -n "$sha" ] || return 1
  odd=$(find "$dir/objects" ! -type d | grep -v -E \
    '/objects/([0-9a-f]{2}/([0-9a-f]{38}|[0-9a-f]{62})|pack/pack-[0-9a-f]+\.(pack|idx|rev))$')
  [ -z "$odd" ] || return 1
  for pack in "$dir"/objects/pack/*.pack; do
    [ ! -e "$pack" ] || [ -e "${pack%.pack}.idx" ] || return 1
  done
  needed=$(repository rev-list --objects --indexed-objects "$sha" 2>/dev/null | wc -l)
  [ "$needed" -gt 0 ] && [ "$needed" -eq "$num_objects" ] && only_own_shallow
}

only_own_shallow() {
  [ -f "$dir/shallow" ] || return 0
  while read -r commit; do
    repository merge-base --is-ancestor "$commit" "$sha" 2>/dev/null || return 1
  done <"$dir/shallow"
}

rebuild_objects() {
  changed=1
  if [ -f "$dir/objects/info/alternates" ]; then note_alternates; fi
  fresh=$dir/objects.new
  rm -rf "$fresh"
  mkdir -p "$fresh/pack" "$fresh/info" || foreign "cannot write $dir"
  if [ "$kept" = none ]; then say "$sha" >"$dir/shallow"; fi
  if ! pack_needed; then
    # A past with holes cannot be kept; the base itself must be whole.
    [ "$kept" = full ] && [ -n "$parents" ] || lost
    kept=none
    say "$sha" >"$dir/shallow"
    pack_needed || lost
  fi
  rm -rf "$dir/objects" || foreign "cannot remove $dir/objects"
  mv "$fresh" "$dir/objects" || broken "cannot replace $dir/objects"
  if [ -f "$dir/shallow" ]; then keep_own_shallow; fi
}

lost() {
  case $problem in
    *[Nn]'o space left'* | *'ut of diskspace'* | *'quota exceeded'* | *'write error'*)
      say "no space left for the objects of the base commit" >&2
      exit 95 ;;
  esac
  broken "objects of the base commit are lost: $problem"
}

# Stores that this repository borrowed from are copies of it.
note_alternates() {
  while read -r path; do
    case $path in /*) ;; *) path=$dir/objects/$path ;; esac
    path=$(cd -P -- "$path" 2>/dev/null && pwd -P) || continue
    if [ -f "${path%/objects}/HEAD" ]; then path=${path%/objects}; fi
    extra=$extra$path$line_end
  done <"$dir/objects/info/alternates"
}

pack_needed() {
  missing=
  if [ -n "$partial" ]; then missing=--missing=allow-any; fi
  problem=$(printf '%s' "${sha:+$sha$line_end}" |
    repository -c pack.compression=1 -c pack.windowMemory=64m -c pack.threads=1 \
      pack-objects --quiet --revs --indexed-objects --delta-base-offset --window=0 --non-empty \
      $missing "$fresh/pack/pack" 2>&1 >/dev/null)
}

# `shallow` may name commits of other branches; only those in the store are ours.
keep_own_shallow() {
  repository cat-file --batch-check='%(objectname) %(objecttype)' <"$dir/shallow" |
    sed -n 's/ commit$//p' >"$dir/shallow.own"
  rm -f "$dir/shallow"
  if [ -s "$dir/shallow.own" ]; then mv "$dir/shallow.own" "$dir/shallow"
  else rm -f "$dir/shallow.own"
  fi
}

# The index remembers both sides of conflicts that were resolved.
forget_conflicts() {
  grep -q REUC "$dir/index" 2>/dev/null || return 0
  repository update-index --clear-resolve-undo 2>/dev/null || foreign "cannot write $dir/index"
  rebuild=1
}

# A setup may stage the tests that it brings. A blind run swaps values in their files alone, so that
# the index would tell which values are real.
unstage_tests() {
  [ "$part" = repository ] && [ -n "$sha" ] || return 0
  ! repository diff-index --cached --quiet "$sha" -- 2>/dev/null || return 0
  repository read-tree -m "$sha" 2>/dev/null || foreign "cannot write $dir/index"
  rebuild=1
}

# Solved files may be staged, where the solution was committed or tried and the files were put back;
# and a past that holds them (a reverted fix, a planted bug) is no past to keep.
drop_solved() {
  [ -n "$solved" ] && [ -n "$base" ] || return 0
  tree=$top dir=$top/.git partial='' sha=$base rebuild=''
  find_solved
  [ -n "$known" ] || return 0
  for_each "$(repository -c core.quotePath=false ls-files -s | grep -F "$known")" unstage
  if [ -n "$rebuild" ]; then
    rebuild_objects
    find_solved
  fi
  if [ -n "$parents" ] && [ "$kept" = full ]; then
    own=$(repository ls-tree -r "$base"; repository ls-files -s)
    for_each "$known" cut_past
    if [ "$kept" = none ]; then rebuild_objects; fi
  fi
  [ -n "$rebuild" ] || return 0
  write_tags
  give_back
  say "history $kept"
}

find_solved() {
  known=$(say "$solved" | repository cat-file --batch-check 2>/dev/null | sed -n 's/ blob .*//p')
}

unstage() {
  path=${1#*"$tab"} blob=${1#* } blob=${blob%% *}
  case $(repository ls-tree "$sha" -- "$path") in *"$blob"*) return ;; esac
  [ "$(repository hash-object --no-filters -- "$tree/$path" 2>/dev/null)" != "$blob" ] || return 0
  repository --literal-pathspecs reset -q "$sha" -- "$path" 2>/dev/null ||
    foreign "cannot write $dir/index"
  rebuild=1
}

cut_past() {
  case $own in *"$1"*) ;; *) kept=none rebuild=1 ;; esac
}
