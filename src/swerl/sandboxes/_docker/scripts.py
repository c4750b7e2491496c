"""What runs inside a container: its first process, the keeper, and the frame around a command.

They take a POSIX `sh` and nothing else. The keeper uses only what is built into the shell, so that
it can end a fork bomb that leaves no room for another process.

A command's processes carry a mark: its RLIMIT_LOCKS, which Linux no longer enforces but still
hands down to every child, whatever session it moves to. A process can lower its mark and never
raise it, and marks go down from command to command. So none can take the mark of an earlier
command, and whoever wears a mark that was never given is killed with the next command that is.
"""

from __future__ import annotations

import shlex

KEEPER = r"""
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
"""Takes orders `<number> <signal> <mark> <lowest given> <highest given>`, one a line.

For KILL all are stopped before one is killed: a stopped process keeps its place under the process
limit, so that nothing new can take it. It ends with code 3 at the end of its input, and with 4
where it cannot begin.
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
    sh -c {shlex.quote(KEEPER)} swerl-keeper "$3" <&3 3<&- &
    wait $!
    case $?$stood in 3*|4) trap - EXIT; exit ;; esac
    stood=1
done
"""
"""Runs the keeper and reaps orphans; arguments: this text, the seconds after which all is over,
the workdir.

No process inside can kill the first one. It ends when the controller lets go of its input, and
everything in the container ends with it. Where there is no room for a keeper the shell would end,
too; so it begins anew in its place, without the seconds, until there is.
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
    echo "swerl: $folder: no such folder, or it may not be entered" >&4
    code=126
fi
printf '\000%send' "$token" >&3
printf '\000%send' "$token" >&4
exit "$code"
"""
"""Runs a command, ends both of its streams with a token and `end`, and exits as the command did.

A token and `run` on standard output say that it begins and wears its mark. Who still holds a
stream at its end, such as a daemon that the command left, holds up nobody. The command can read
the token and print it; so that is only a hint to ask the daemon. Arguments: token, mark, folder,
the command.
"""

READ = r"""
[ -e "$1" ] || [ -L "$1" ] || exit 2
[ -e "$1" ] || exit 2
[ -f "$1" ] || { echo "it is not a plain file" >&2; exit 1; }
exec cat <"$1"
"""
"""Prints a file; ends with 2 where there is none."""

WRITE = r"""
case $1 in */*) folder=${1%/*} ;; *) folder= ;; esac
[ -z "$folder" ] || [ -d "$folder" ] || mkdir -p -- "$folder" || exit 1
[ -e "$1" ] && [ ! -f "$1" ] && { echo "it is not a plain file" >&2; exit 1; }
exec cat >"$1"
"""
"""Writes its input to a file, making its parents."""
