"""A process is told from another one with the same id, and from one on another machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

from swerl.core.sandbox import new_name
from swerl.sandboxes.ledger import owner
from swerl.sandboxes.ledger.owner import Life, Owner


def test_this_process_lives_and_an_ended_one_does_not(dead: Owner) -> None:
    assert owner.life(owner.current()) is Life.ALIVE
    assert owner.life(dead) is Life.DEAD


def test_a_later_process_with_the_same_id_is_another_one() -> None:
    me = owner.current()
    assert owner.life(replace(me, started=me.started - 1)) is Life.DEAD


def test_a_killed_process_that_nobody_waited_for_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    its = replace(owner.current(), pid=process.pid, started=owner._status(process.pid)[1])
    assert owner.life(its) is Life.ALIVE
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert owner.life(its) is Life.DEAD
    process.communicate()


def test_a_boot_ends_every_process_of_the_same_machine_only(dead: Owner) -> None:
    before = replace(dead, boot="another boot")
    assert owner.life(before) is Life.DEAD
    assert owner.life(replace(before, host="another/machine")) is Life.ELSEWHERE


def test_another_pid_namespace_cannot_be_judged(dead: Owner) -> None:
    assert owner.life(replace(dead, place="000000")) is Life.ELSEWHERE


def test_a_name_tells_its_owner(dead: Owner) -> None:
    name = new_name()
    of_dead = name.replace(str(os.getpid()), str(dead.pid), 1)
    assert owner.pid_of(name) == os.getpid()
    assert owner.life_by_name(name) is Life.ALIVE
    assert owner.life_by_name(of_dead) is Life.DEAD
    assert owner.life_by_name(f"swerl-{dead.pid}-000000{name[-10:]}") is Life.ELSEWHERE
    assert owner.life_by_name("swerl-dockerd") is Life.ELSEWHERE


def test_a_sandbox_older_than_the_process_with_its_owners_id_has_no_owner() -> None:
    assert owner.life_by_name(new_name(), time.time()) is Life.ALIVE
    assert owner.life_by_name(new_name(), 1000.0) is Life.DEAD
