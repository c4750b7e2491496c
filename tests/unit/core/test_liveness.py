"""A process is distinguished from a later one with its id and from one on another machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from swerl.core import liveness
from swerl.core.liveness import Life, ProcessIdentity, life, this_process


@pytest.fixture(scope="module")
def dead() -> ProcessIdentity:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return replace(this_process(), pid=process.pid)


def test_this_process_lives_and_an_ended_one_does_not(dead: ProcessIdentity) -> None:
    assert life(this_process()) is Life.ALIVE
    assert life(dead) is Life.DEAD


def test_a_later_process_with_the_same_id_is_another_one() -> None:
    me = this_process()
    assert life(replace(me, started=me.started - 1)) is Life.DEAD


def test_a_killed_process_that_no_parent_waited_for_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    its = replace(this_process(), pid=process.pid, started=liveness._state(process.pid)[1])
    assert life(its) is Life.ALIVE
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert life(its) is Life.DEAD
    process.communicate()


def test_a_boot_ends_every_process_of_the_same_machine_only(dead: ProcessIdentity) -> None:
    before = replace(dead, boot="another boot")
    assert life(before) is Life.DEAD
    assert life(replace(before, host="another/machine")) is Life.ELSEWHERE


def test_the_state_of_another_pid_namespace_is_unknown(dead: ProcessIdentity) -> None:
    assert life(replace(dead, place="000000")) is Life.ELSEWHERE


def test_a_start_time_lies_between_boot_and_now() -> None:
    assert liveness.boot_time_s() < liveness.start_time_s(os.getpid()) < time.time()
    with pytest.raises(ProcessLookupError):
        liveness.start_time_s(999_999_999)
