# One repository: its settings, its base commit, its references.

# What is left of a repository that cannot be read has no use, yet may hold objects.
hide_in_nested() {
  case $1 in */.git) ;; *) return 0 ;; esac
  (hide_in_repository "${1%/.git}" "$nested_base" none; [ -z "$changed$extra" ] || say changed) 2>/dev/null
  case $? in
    0) ;;
    94) deny "$1" ;;
    *) remove_store "$1" ;;
  esac
}

# Sets `sha` to the base commit and `kept` to what is left of the past.
hide_in_repository() {
  tree=$1 dir=$1/.git rebuild=''
  if [ ! -w "$tree" ] || [ ! -w "$dir" ]; then
    deny "$dir"
    kept=''
    find_base "$2"
    return
  fi
  owners=$(stat -c %u:%g "$dir" "$home" 2>/dev/null) || owners=
  owner=${owners%%"$line_end"*}
  if [ -L "$dir" ] || [ -f "$dir" ]; then bring_home; fi
  [ -d "$dir" ] && [ -f "$dir/HEAD" ] && [ -d "$dir/objects" ] || broken "$dir is no repository"
  find_base "$2"
  note_tags
  clean_settings
  choose_history "$3"
  remove_clutter
  forget_conflicts
  unstage_tests
  write_refs
  if [ "$kept" = full ] && [ -z "$rebuild" ] && holds_no_more; then :; else rebuild_objects; fi
  write_tags
  give_back
}

# What was written here belongs to whoever runs this script.
give_back() { [ "$owner" = "${owners#*"$line_end"}" ] || chown -R "$owner" "$dir" 2>/dev/null; }

# A linked git folder (a worktree's, a submodule's, a symbolic link) moves into its work tree.
bring_home() {
  if [ -L "$dir" ]; then
    real=$(readlink -f "$dir")
  else
    real=$(sed -n 's/^gitdir: //p' "$dir")
    case $real in /*) ;; *) real=$tree/$real ;; esac
  fi
  [ -d "$real" ] || broken "$dir points at $real, which is not there"
  common=$real
  if [ -f "$real/commondir" ]; then
    common=$(cat "$real/commondir")
    case $common in /*) ;; *) common=$real/$common ;; esac
  fi
  real=$(cd -P -- "$real" && pwd -P) && common=$(cd -P -- "$common" 2>/dev/null && pwd -P) ||
    broken "$dir points at a repository that is not there"
  extra=$extra$common$line_end
  head=$(safe_git --git-dir="$real" rev-parse -q --verify 'HEAD^{commit}' 2>/dev/null) ||
    broken "HEAD of $tree does not resolve"
  rm -f "$dir" && mkdir -p "$dir/objects/info" "$dir/refs/heads" "$dir/info" ||
    foreign "cannot write $tree"
  for name in config shallow packed-refs info/exclude info/sparse-checkout info/attributes; do
    [ ! -f "$common/$name" ] || cp -p "$common/$name" "$dir/$name"
  done
  for name in index HEAD config.worktree info/sparse-checkout; do
    [ ! -f "$real/$name" ] || cp -p "$real/$name" "$dir/$name"
  done
  cp -p "$real"/sharedindex.* "$dir/" 2>/dev/null
  branch=$(sed -n 's/^ref: //p' "$dir/HEAD")
  if [ -n "$branch" ]; then
    mkdir -p "$dir/${branch%/*}" && say "$head" >"$dir/$branch"
  fi
  say "$common/objects" >"$dir/objects/info/alternates"
  rebuild=1 changed=1
}

repository() { safe_git --git-dir="$dir" --work-tree="$tree" "$@"; }

# Settings that run programs, name other places or other files are unknown here, and go.
clean_settings() {
  dirty='' partial='' lines=''
  names=$(git config --no-includes -f "$dir/config" --name-only --list 2>/dev/null) ||
    { [ ! -s "$dir/config" ] || broken "$dir/config cannot be read"; }
  if [ -f "$dir/config.worktree" ]; then dirty=1; fi
  old_ifs=$IFS IFS=$line_end
  set -f
  for name in $names; do
    case $name in *.promisor | extensions.partialclone) partial=1 ;; esac
    is_safe_setting "$name" || { dirty=1; continue; }
    lines=$lines$name$line_end
  done
  if [ -n "$dirty" ]; then
    changed=1
    rm -f "$dir/config.clean"
    for name in $lines; do
      value=$(git config --no-includes -f "$dir/config" --get "$name")
      [ "$name" != core.bare ] || value=false
      git config -f "$dir/config.clean" "$name" "$value"
    done
    if [ -f "$dir/config.worktree" ]; then
      for name in core.sparsecheckout core.sparsecheckoutcone index.sparse; do
        value=$(git config --no-includes -f "$dir/config.worktree" --get "$name") &&
          git config -f "$dir/config.clean" "$name" "$value"
      done
      rm -f "$dir/config.worktree"
    fi
    : >>"$dir/config.clean"
    mv -f "$dir/config.clean" "$dir/config" || foreign "cannot write $dir/config"
  fi
  set +f
  IFS=$old_ifs
}

# Sets `sha`, the commit that HEAD shall stand at, and `parents`, its own.
find_base() {
  branch=$(repository symbolic-ref -q HEAD) || branch=
  if line=$(repository rev-list --parents -n 1 HEAD 2>/dev/null); then
    sha=${line%% *} full=$1
    if [ -n "$full" ] && [ "$full" != "$sha" ]; then
      full=$(repository rev-parse -q --verify "$full^{commit}" 2>/dev/null) || full=$sha
      if [ "$full" != "$sha" ] && repository merge-base --is-ancestor "$full" "$sha" 2>/dev/null
      then line=$(repository rev-list --parents -n 1 "$full") sha=$full rebuild=1
      fi
    fi
    parents=${line#"$sha"}
  elif [ -z "$branch" ] || [ -e "$dir/$branch" ] ||
    grep -q " $branch\$" "$dir/packed-refs" 2>/dev/null
  then broken "HEAD of $tree does not resolve to a commit"
  else sha='' parents=''
  fi
}

# Tags of the past tell a project its own version. Each becomes the name of its commit: the text of
# an annotated one may have been written later.
note_tags() {
  tags=''
  for path in "$dir/packed-refs" "$dir"/refs/tags/*; do
    [ -n "$sha" ] && [ -e "$path" ] || continue
    tags=$(repository for-each-ref --merged="$sha" refs/tags 2>/dev/null --format="$tag_format")
    return
  done
}

write_tags() {
  own=''
  if [ -n "$tags" ]; then
    held=$(say "$tags" | cut -d ' ' -f 1 |
      repository cat-file --batch-check='%(objectname) %(objecttype)')
    for_each "$tags" keep_tag
  fi
  if [ -z "$own" ]; then
    [ ! -f "$dir/packed-refs" ] || { rm -f "$dir/packed-refs"; changed=1; }
  elif [ "$own" != "$(cat "$dir/packed-refs" 2>/dev/null)$line_end" ]; then
    printf '%s' "$own" >"$dir/packed-refs"
    changed=1
  fi
}

keep_tag() {
  case $held in *"${1%% *} commit"*) own=$own$1$line_end ;; esac
}

choose_history() {
  kept=$1
  for path in "$dir"/objects/pack/*.promisor; do [ ! -e "$path" ] || partial=1; done
  counted=$(count_objects)
  num_objects=${counted% *} size_kib=${counted#* }
  if [ "$kept" = auto ]; then
    kept=full
    if [ -n "$partial" ] || [ "$num_objects" -gt "$limit" ] || [ "$size_kib" -gt "$limit_kib" ]
    then kept=none
    fi
  fi
  # A commit without parents has no past to hide, and one that is cut off already has none left.
  if [ -z "$parents" ]; then kept=full; fi
}

# Prints how many objects there are, and their KiB.
count_objects() {
  repository count-objects -v | {
    total=0 kib=0
    while read -r name number; do
      case $name in
        count: | in-pack:) total=$((total + number)) ;;
        size: | size-pack:) kib=$((kib + number)) ;;
      esac
    done
    say "$total $kib"
  }
}

# All that is no object, no setting, no index and no list of ignored files goes.
remove_clutter() {
  for path in "$dir"/worktrees/*/gitdir; do
    [ ! -f "$path" ] || remove_work_tree "$(cat "$path")"
  done
  # Where the past stays as it is, `shallow` says where it begins.
  for path in "$dir"/* "$dir"/.[!.]*; do
    case ${path##*/} in
      HEAD | config | index | sharedindex.* | objects | refs | packed-refs | shallow) continue ;;
      info)
        for file in "$path"/* "$path"/.[!.]*; do
          case ${file##*/} in
            exclude | sparse-checkout | attributes) ;;
            *) [ ! -e "$file" ] || { rm -rf "$file"; changed=1; } ;;
          esac
        done
        continue ;;
    esac
    [ -e "$path" ] || [ -L "$path" ] || continue
    rm -rf "$path" || foreign "cannot remove $path"
    changed=1
  done
  if [ -e "$dir/objects/info/alternates" ]; then rebuild=1; fi
}

# A second work tree of this repository holds other commits' files.
remove_work_tree() {
  case $1 in
    "$tree"/.git | "$tree/") ;;
    /*/*/.git | /*/.git) remove_store "${1%/.git}" ;;
  esac
}

write_refs() {
  name=${branch#refs/heads/}
  case $name in
    '' | main | master | trunk | dev | devel | develop | development | default | stable | next) ;;
    *[!0-9.xvV_-]*) branch=refs/heads/main ;;
    *) case $name in *[0-9]*.*) ;; *) branch=refs/heads/main ;; esac ;;
  esac
  others=$(find "$dir/refs" ! -type d ! -path "$dir/$branch" 2>/dev/null)
  read -r head <"$dir/HEAD"
  read -r tip 2>/dev/null <"$dir/${branch:-HEAD}" || tip=''
  if [ -z "$others" ] && [ "$head" = "${branch:+ref: }${branch:-$sha}" ] && [ "$tip" = "$sha" ]
  then return
  fi
  changed=1
  rm -rf "$dir/refs" || foreign "cannot write $dir/refs"
  mkdir -p "$dir/refs/heads" "$dir/refs/tags"
  rm -f "$dir/HEAD"
  if [ -z "$branch" ]; then
    say "$sha" >"$dir/HEAD"
  else
    say "ref: $branch" >"$dir/HEAD"
    [ -z "$sha" ] || { mkdir -p "$dir/${branch%/*}" && say "$sha" >"$dir/$branch"; }
  fi
}
