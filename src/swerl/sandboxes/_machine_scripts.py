"""Shell programs that run inside a container: init process, signaller, and the shell of a command.

They need a POSIX `sh` and nothing else. The signaller uses only shell built-ins, so it can end a
fork bomb that has used up the process limit.

A command's processes carry a mark: the soft RLIMIT_LOCKS. Linux no longer enforces this limit but
still copies it to every child, also to one in its own session. A process can lower its mark and
never raise it, and each new command has a lower mark. So no process can take the mark of an earlier
command. A process with a mark that was never given out is killed with the next killed command.
"""

from __future__ import annotations

import shlex

SIGNALLER = r"""
belongs() {
    limit=
    while read -r one two three limit rest; do
        case "$one $two $three" in "Max file locks") break ;; esac
        limit=
    done < "/proc/$1/limits"
    case $limit in
        "$mark") return 0 ;;
        "" | "$own" | *[!0-9]*) return 1 ;;
    esac
    [ "$signal" = KILL ] && { [ "$limit" -lt "$low" ] || [ "$limit" -gt "$high" ]; }
}
state_of() {
    state=X
    while read -r name state rest; do
        [ "$name" = State: ] && return
        state=X
    done < "/proc/$1/status"
}
sweep() {
    found=0
    for folder in /proc/[0-9]*; do
        pid=${folder#/proc/}
        [ "$pid" = 1 ] || [ "$pid" = $$ ] && continue
        belongs "$pid" || continue
        state_of "$pid"
        case $2 in *$state*) continue ;; esac
        kill -s "$1" "$pid" && found=1
    done
}
own=$(ulimit -S -w || ulimit -S -x)
[ -d "$1" ] && workdir=yes || workdir=no
user=$(id -u) && group=$(id -g) || exit 4
name=$(id -un)
echo "ready $user $group ${name:-$user} $workdir"
while read -r number signal mark low high; do
    if [ "$signal" = KILL ]; then
        rounds=0
        sweep STOP TtXZ
        while [ "$found" = 1 ] && [ "$rounds" -lt 500 ]; do
            rounds=$((rounds + 1))
            sweep STOP TtXZ
        done
    fi
    sweep "$signal" XZ
    echo "done $number"
done
exit 3
"""
"""Reads requests `<number> <signal> <mark> <lowest given> <highest given>`, one per line.

For KILL all processes are stopped before the first is killed: a stopped process still counts toward
the process limit, so no new one can start. The exit code is 3 at the end of its input, and 4 if it
cannot start.
"""

FIRST = f"""
stood=1
[ -z "$2" ] || {{
    stood=
    exec 3<&0 </dev/null 2>/dev/null
    ( exec 3<&- >/dev/null; sleep "$2"; kill -s USR2 1 ) &
}}
trap 'trap - EXIT; exit' USR2
trap 'exec sh -c "$1" swerl "$1" "" "$3"' EXIT
while :; do
    sh -c {shlex.quote(SIGNALLER)} swerl-signaller "$3" <&3 3<&- &
    wait $!
    case $?$stood in 3*|4) trap - EXIT; exit ;; esac
    stood=1
done
"""
"""Runs the signaller and reaps orphans. Arguments: this text, the lifetime in seconds, the workdir.

No process inside can kill the init process. It ends when the controller closes its input, and the
container ends with it. At the process limit no signaller can start and the shell would exit; so it
restarts itself, without the lifetime, until one can.
"""

COMMAND = r"""
token=$1 mark=$2 folder=$3
shift 3
exec 3>&1 4>&2 2>/dev/null
if [ $# = 0 ]; then
    echo "swerl: no program to run" >&4
    code=126
elif cd -P "$folder"; then
    (
        ulimit -w "$mark" || ulimit -x "$mark"
        printf '\000%srun' "$token" >&3
        exec 2>&4 3>&- 4>&-
        exec "$@"
    )
    code=$?
else
    echo "swerl: $folder: no such folder, or no permission to enter it" >&4
    code=126
fi
printf '\000%s%03d\000%send' "$token" "$code" "$token" >&3
printf '\000%send' "$token" >&4
exit "$code"
"""
"""Runs a command with its mark, and exits with its code. Arguments: token, mark, folder, command.

It prints a token and `run` on standard output before the command starts, and at its end a token and
its code in three digits, and a token and `end` on both streams. So a daemon that the command left
behind, and that still holds a stream, delays nothing. The command could print the token itself; the
provider is therefore asked for the end.
"""

READ = r"""
[ -e "$1" ] || [ -L "$1" ] || exit 2
[ -e "$1" ] || exit 2
[ ! -d "$1" ] || exit 3
[ -f "$1" ] || { echo "it is not a plain file" >&2; exit 1; }
exec cat <"$1"
"""
"""Prints a file; the exit code is 2 if there is none, and 3 if it is a folder."""

WRITE = r"""
case $1 in */*) folder=${1%/*} ;; *) folder= ;; esac
[ ! -d "$1" ] || exit 3
[ -z "$folder" ] || [ -d "$folder" ] || mkdir -p -- "$folder" || exit 1
[ -e "$1" ] && [ ! -f "$1" ] && { echo "it is not a plain file" >&2; exit 1; }
cat >"$1"
"""
"""Writes its input to a file, and creates its parents; the exit code is 3 if it is a folder."""
