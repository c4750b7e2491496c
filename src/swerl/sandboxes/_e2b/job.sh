# One command's life in the sandbox, for any bash from 4.0 on and the usual small tools.
#
# The controller sets the variables and `eval`s this text, so that no command line contains it.
# `launch` starts a supervisor in its own session, once, and prints the command's output in base64:
# standard output on 1, standard error on 2. Called again it only prints, from the given offsets, so
# a broken stream loses nothing. Text before a line `=` comes from a shell profile. The last line is
# `x <exit code> <1 if stopped> <bytes of output> <bytes of errors>`.
#
#   step      launch, signal, stop or tidy      d      folder of this command
#   argv      the command                       given  its environment beyond the image's
#   cwd       its working directory             limit  seconds until it is stopped, or empty
#   cap_kib   KiB kept of a stream, 0 for all   live   1 to print output live and accept input
#   input     base64 of its input, or empty     file   a file with its input, or empty
#   offsets   bytes of each already printed     stale  folders of ended commands
#   number    the signal to send

tidy() { [ ${#stale[@]} -eq 0 ] || rm -rf -- "${stale[@]}"; }

say_no() { printf '\n=\n! %s\n' "$1"; exit 0; }

launch() {
  tidy
  if mkdir -m 700 -- "$d" 2>/dev/null; then
    { prepare && begin; } || { rm -rf -- "$d"; say_no 'there is no space for a command in /tmp'; }
  fi
  [ -p "$d/tick" ] || say_no 'there is no space for a command in /tmp'
  exec 9<>"$d/tick"
  show
}

prepare() {
  mkfifo "$d/1" "$d/2" "$d/tick" "$d/never" && : >"$d/1.data" && : >"$d/2.data" || return
  if [ -n "$live" ]; then mkfifo "$d/0"
  elif [ -n "$file" ]; then mv -- "$file" "$d/0"
  elif [ -n "$input" ]; then printf %s "$input" | base64 -d >"$d/0"
  else ln -s /dev/null "$d/0"; fi
}

begin() {
  find_reaper
  SWERL_STEP=supervise "${reaper[@]}" bash -c 'eval "$SWERL_JOB"' </dev/null >/dev/null 2>&1 &
  [ -z "$live" ] || { exec 8<&0; take_input <&8 >"$d/0" 2>/dev/null & }
}

# The supervisor adopts the command's orphans (subreaper), so that it finds them all, and resets the
# signals that a shell ignores in background processes. Bash itself can do neither.
find_reaper() {
  local prctl= setsid=
  case $HOSTTYPE in
    x86_64) prctl=157 setsid=112 ;;
    aarch64 | riscv64) prctl=167 setsid=157 ;;
  esac
  if [ -n "$prctl" ] && command -v perl >/dev/null 2>&1; then
    reaper=(perl -e '$SIG{$_} = "DEFAULT" for qw(INT QUIT);
syscall(0+shift, 36, 1, 0, 0, 0); syscall(0+shift); exec {$ARGV[0]} @ARGV' "$prctl" "$setsid")
  elif command -v python3 >/dev/null 2>&1; then
    reaper=(python3 -I -S -c 'import ctypes, os, signal, sys
for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(each, signal.SIG_DFL)
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); os.setsid(); os.execvp(sys.argv[1], sys.argv[1:])')
  elif command -v setsid >/dev/null 2>&1; then reaper=(setsid)
  else reaper=(); fi
}

# Each piece of input is its length in base64 on a line, then the base64; `.` ends it.
take_input() {
  local length
  while read -r length && [ "$length" != . ]; do
    dd bs="$length" count=1 iflag=fullblock 2>/dev/null | base64 -d
  done
}

supervise() {
  exec 9<>"$d/tick" 7<>"$d/never"
  set -m # so that the command ignores no signal
  stopped=0 watch=
  trap 'stopped=1' TERM
  read_environment
  spool 1 9>&- & spools=$!
  spool 2 9>&- & spools="$spools $!"
  if [ -n "$limit" ]; then # without a new process: the process limit may be reached later
    { read -r -t "$limit" -u 7; while kill -TERM $$; do read -r -t 0.2 -u 7; done; } 9>&- &
    watch=$!
  fi
  spared="$spools $watch"
  run_command <"$d/0" >"$d/1" 2>"$d/2" 9>&- 7>&- &
  child=$!
  set +m # or else `wait` returns for a command that is merely stopped
  echo "$$ $child $spared" >"$d/pids"
  until wait "$child"; code=$?; [ $stopped = 1 ] || ! kill -0 "$child" 2>/dev/null; do :; done
  [ $stopped = 0 ] || { kill_tree; wait "$child"; code=$?; }
  [ -z "$watch" ] || kill -KILL "$watch" 2>/dev/null
  linger
  ln -s "$code.$stopped" "$d/exit"
  echo >&9
  [ -n "$live" ] || exit 0
  until [ $stopped = 1 ]; do
    read -r -t 3600 -u 7 9>&- & watch=$! # because only `wait` lets a signal in
    spared="$spared $watch"
    wait "$watch"
    kill -KILL "$watch" 2>/dev/null
  done
  kill_tree
}

# The environment that the provider started the controller's shell with, before any profile ran.
read_environment() {
  local each
  vars=()
  while IFS= read -r -d '' each; do
    case $each in SWERL_* | _=*) ;; *) vars+=("$each") ;; esac
  done <"/proc/$PPID/environ"
}

run_command() {
  trap - TERM
  cd -- "$cwd" 2>/dev/null || { echo "swerl: cannot run in the folder $cwd" >&2; exit 126; }
  case ${argv[0]} in *=*) argv=(sh -c 'exec "$@"' sh "${argv[@]}") ;; esac
  : >"$d/begun"
  exec env -i "${vars[@]}" "${given[@]}" "${argv[@]}"
}

# One process that keeps the output up to the cap and reads the rest.
spool() {
  [ "$cap_kib" = 0 ] || { trap '' XFSZ; ulimit -f "$cap_kib"; }
  exec tee -- "$d/$1.data" >/dev/null
} <"$d/$1" 2>/dev/null

# Wait until all output is kept. A process that the command left behind may still hold its output, so
# a sleeping spool is enough: it sleeps only if there is nothing to read.
linger() {
  local each turn idle=0
  for ((turn = 0; turn < 1000 && idle < 3; turn++)); do
    idle=$((idle + 1))
    for each in $spools; do
      sleeps "$each" || idle=0
    done
    kill -0 ${spools% *} 2>/dev/null || kill -0 ${spools#* } 2>/dev/null || return
    read -r -t 0.01 -u 7
  done
}

sleeps() {
  local line
  { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 0
  case $line in *'(tee) S '* | *' Z '*) ;; *) return 1 ;; esac
}

# An ended process keeps its pid (as a zombie) until its parent waits for it.
lives() {
  local line
  { read -r line <"/proc/$1/stat"; } 2>/dev/null && [[ $line != *') Z '* ]]
}

pause() { read -r -t "$1" -u 9; }

# Put every process below $1 into `below`, except the spared ones. Starts no process, because the
# process limit may be reached.
find_below() {
  local root=$1 file line pid kid todo next
  local -A kids=()
  for file in /proc/[0-9]*/stat; do
    line=
    { IFS= read -r -d '' line <"$file"; } 2>/dev/null
    [ -n "$line" ] || continue
    pid=${file#/proc/} pid=${pid%/stat}
    set -- ${line##*) }
    [ "$1" = Z ] || kids[$2]+=" $pid"
  done
  below=() todo=("$root")
  while [ ${#todo[@]} -gt 0 ]; do
    next=()
    for pid in "${todo[@]}"; do
      for kid in ${kids[$pid]}; do
        case " $spared " in *" $kid "*) ;; *) next+=("$kid") ;; esac
      done
    done
    below+=("${next[@]}") todo=("${next[@]}")
  done
}

kill_tree() {
  local since=$SECONDS
  while find_below $$; [ ${#below[@]} -gt 0 ] && [ $((SECONDS - since)) -lt 8 ]; do
    kill -STOP "${below[@]}" 2>/dev/null
    kill -KILL "${below[@]}" 2>/dev/null
  done
}

show() {
  local out=${offsets[0]} err=${offsets[1]} code
  printf '\n=\n'
  printf '\n=\n' >&2
  if [ -n "$live" ] && [ ! -L "$d/exit" ]; then
    set -m
    tail --version >/dev/null 2>&1 && quick=(-s 0.02) || quick=()
    follow 1 "$out" 9>&- & out=$!
    follow 2 "$err" >&2 9>&- & err=$!
    wait_for_end
    pause 0.03
    kill -KILL -- "-$out" "-$err" 2>/dev/null
    wait "$out" "$err" 2>/dev/null
    printf '\n'
    printf '\n' >&2
  else
    wait_for_end
    dump 1 "$out"
    dump 2 "$err" >&2
  fi 2>&2
  code=$(readlink "$d/exit") || code=137.0 # the supervisor was killed
  printf 'x %s %s\n' "${code%.*} ${code#*.}" "$(echo $(stat -L -c %s "$d/1.data" "$d/2.data"))"
}

wait_for_end() {
  local supervisor=
  until [ -L "$d/exit" ]; do
    pause 0.5
    [ -n "$supervisor" ] || read -r supervisor _ <"$d/pids"
    [ -z "$supervisor" ] || lives "$supervisor" || break
  done 2>/dev/null
}

follow() {
  local line
  tail "${quick[@]}" -c "+$(($2 + 1))" -f -- "$d/$1.data" 2>/dev/null |
    while line=$(dd bs=49152 count=1 2>/dev/null | base64 -w 0); [ -n "$line" ]; do
      printf '%s\n' "$line"
    done
}

dump() {
  [ ! -s "$d/$1.data" ] || { tail -c "+$(($2 + 1))" -- "$d/$1.data" | base64 -w 65532; echo; }
}

# Find the supervisor, which may be about to start; fail if it has ended.
find_supervisor() {
  local turn
  [ -p "$d/never" ] && exec 7<>"$d/never" || return
  for ((turn = 0; turn < 500; turn++)); do
    read -r supervisor child spared 2>/dev/null <"$d/pids" && lives "$supervisor" && return
    [ ! -L "$d/exit" ] || return
    read -r -t 0.01 -u 7
  done
  return 1
}

# A shell that is about to become the command would swallow the signal.
signal() {
  local turn=0
  find_supervisor || return
  until [ -e "$d/begun" ] && [ ! "/proc/$child/exe" -ef "/proc/$supervisor/exe" ]; do
    [ $((turn += 1)) -le 20 ] || break # the command is itself a bash
    read -r -t 0.01 -u 7
  done
  find_below "$supervisor"
  [ ${#below[@]} -eq 0 ] || kill "-$number" "${below[@]}" 2>/dev/null
}

stop() {
  local since=$SECONDS turn=0
  ! mkdir -- "$d" 2>/dev/null || return # and a later launch finds its folder taken
  find_supervisor || return
  while lives "$supervisor"; do # repeatedly, because bash misses a signal just before `wait`
    [ $((turn % 10)) -gt 0 ] || kill -TERM "$supervisor" 2>/dev/null
    kill -CONT "$supervisor" 2>/dev/null # its command may have stopped it
    [ $((SECONDS - since)) -lt 9 ] || say_no 'a command cannot be killed'
    turn=$((turn + 1))
    read -r -t 0.01 -u 7
  done
}

case ${SWERL_STEP:-$step} in
  launch) launch ;;
  supervise) supervise ;;
  signal) signal; echo ok ;;
  stop) stop; echo ok ;;
  tidy) tidy; echo ok ;;
esac
