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


@pytest.fixture(scope="session")
def dead() -> ProcessIdentity:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return replace(this_process(), pid=process.pid)


def test_this_process_lives_and_another_one_with_its_id_does_not() -> None:
    me = this_process()
    assert life(me) is Life.ALIVE
    assert life(replace(me, started=me.started - 1)) is Life.DEAD


def test_a_killed_process_that_no_parent_waited_for_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    its = replace(this_process(), pid=process.pid, started=liveness._state(process.pid)[1])
    assert life(its) is Life.ALIVE
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert life(its) is Life.DEAD
    process.communicate()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Life.DEAD),
        ({"boot": "another boot"}, Life.DEAD),
        ({"boot": "another boot", "host": "another/machine"}, Life.ELSEWHERE),
        ({"place": "000000"}, Life.ELSEWHERE),
    ],
    ids=["ended", "before a boot", "on another machine", "in another pid namespace"],
)
def test_only_a_process_of_this_machine_is_known_to_be_dead(
    dead: ProcessIdentity, changes: dict[str, str], expected: Life
) -> None:
    assert life(replace(dead, **changes)) is expected


def test_a_system_without_proc_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_state", lambda _: ("", 0))
    assert life(this_process()) is Life.ELSEWHERE


def test_a_start_time_lies_between_boot_and_now() -> None:
    assert liveness.boot_time_s() < liveness.start_time_s(os.getpid()) < time.time()
    with pytest.raises(ProcessLookupError):
        liveness.start_time_s(999_999_999)
