"""The whole report: without walls, on `local` and docker, and with sandboxes that break."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import Limits
from swerl.sandboxes import docker, local
from swerl.sandboxes._local import limits
from tests.attacks import host, kernel, life, network, runner
from tests.attacks.attack import (
    Attack,
    AttackContext,
    AttackFinding,
    AttackOutcome,
    CannotError,
    attack,
    passed,
)
from tests.attacks.runner import AttackReport, Subject

from .weak import WeakBackend

DANGEROUS = {
    "endless-output": "it would fill the host's disk",
    "inode-fill": "it would fill the host's disk with files",
    "counted-by-user": "other programs of the host's user would have no watchers left",
}
"""Attacks that are not tried on a machine without walls, and the reason."""
FAILING_FOR_ALL = {
    "host-loopback", "daemon-sockets", "abstract-sockets", "other-sessions", "environment",
    "host-files",
    "inherited-descriptors", "paths-through-processes", "host-processes", "process-secrets",
    "blows-at-processes", "shared-namespaces", "other-sandboxes", "no-new-privileges",
    "fork-bomb", "memory-bomb", "memory-in-pieces", "disk-fill", "giant-line", "links-out",
    "climbing-paths", "files-that-hang", "giant-file", "odd-names", "stubborn-command",
    "stopped-command", "detached-child", "folder-swap-race",
    "outlives-close", "kills-everything", "lifetime",
    "shared-memory", "system-call-filter",
}  # fmt: skip
FAILING_FOR_ROOT = FAILING_FOR_ALL | {
    "raw-sockets", "network-settings", "known-secrets", "programs-of-the-host",
    "read-only-mounts", "user-identity", "entering-namespaces", "capabilities",
    "device-nodes", "kernel-settings", "sys-files", "mounts", "new-namespaces", "setuid-programs",
    "administration", "clock", "hostname",
}  # fmt: skip
OUTSIDE = {
    "other-hosts",
    "dns",
    "cloud-metadata",
    "known-secrets",
    "keyrings",
    "devices",
    "device-nodes",
}
"""Attacks that depend on something that a machine may lack."""


def results(found: AttackReport) -> dict[str, AttackFinding]:
    return {row.name: row.finding for row in found.rows}


@pytest.fixture
def no_survivors() -> Iterator[None]:
    """Kill what the attacks on a sandbox without walls leave alive."""
    yield
    ours = f"swp{os.getpid():x}x"
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            named = (folder / "comm").read_text().startswith(ours)
            if named or ours.encode() in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
    Path("/tmp/swerl-probe-hit").unlink(missing_ok=True)


async def test_most_attacks_work_in_a_sandbox_without_walls(
    tmp_path: Path, no_survivors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_PATIENCE_S", 3.0)
    attacks = [each for each in runner.all_attacks() if each.name not in DANGEROUS]
    subject = Subject(WeakBackend(), "weak", workdir=str(tmp_path / "work"))
    wanted = FAILING_FOR_ROOT if os.geteuid() == 0 else FAILING_FOR_ALL
    found = results(await runner.attack(subject, attacks))
    missed = [
        p for p in attacks if p.name in wanted and found[p.name].result is not AttackOutcome.FAIL
    ]
    if missed:  # a race may be lost, and a busy machine may be late: those get a second blow
        found |= results(await runner.attack(subject, missed))
    failing = {name for name, finding in found.items() if finding.result is AttackOutcome.FAIL}
    assert wanted - OUTSIDE <= failing, {name: found[name] for name in wanted - failing}
    assert os.geteuid() != 0 or len(failing) > len(attacks) * 0.6


async def test_services_that_say_nothing_do_not_hold_an_attack_up(
    tmp_path: Path, no_survivors: None
) -> None:
    subject = Subject(WeakBackend(), "weak", workdir=str(tmp_path / "work"))
    guess = [each for each in runner.all_attacks() if each.name == "other-sessions"]
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        found = results(await runner.attack(subject, guess))
    assert found["other-sessions"].result is AttackOutcome.FAIL


@pytest.mark.parametrize(
    "isolator",
    ["bwrap", "unshare", pytest.param("auto, a snapshot", marks=pytest.mark.nightly)],
)
async def test_no_attack_works_on_local(
    isolator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isolator == "bwrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    isolator, _, snapshot = isolator.partition(", ")
    backend = local.build(local.Options(isolator=isolator))
    subject = Subject(backend, "local")
    try:
        if snapshot:
            monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
            (tmp_path / "image").mkdir()
            opened = backend.open(f"dir:{tmp_path}/image", Limits(), workdir=subject.workdir)
            async with opened as sandbox:
                subject = replace(subject, image=await sandbox.snapshot())
        found = results(await runner.attack(subject, runner.all_attacks()))
    except SandboxUnavailableError as error:
        pytest.skip(f"{error}: {error.hint}")
    failed = {name: f.seen for name, f in found.items() if f.result is AttackOutcome.FAIL}
    held = set() if limits.find() else {"memory-in-pieces", "processor-hog"}
    assert not failed.keys() - held, failed
    cannot = {name: f.seen for name, f in found.items() if f.result is AttackOutcome.CANNOT}
    may = {"other-hosts", "known-secrets", "shared-memory", "processor-hog", "controlling-terminal"}
    assert cannot.keys() <= may, cannot


WALLS = (network, host, kernel)
"""Topics to try on docker: how it bounds, ends and moves files is the conformance suite's."""


async def test_no_attack_gets_out_of_a_container(dockerd: str, docker_image: str) -> None:
    backend = docker.build(docker.Options(base_url=dockerd))
    parts = [part for topic in WALLS for part in vars(topic).values()]
    attacks = [part for part in parts if isinstance(part, Attack)]
    found = results(await runner.attack(Subject(backend, "docker", docker_image), attacks))
    failed = {name: f.seen for name, f in found.items() if f.result is AttackOutcome.FAIL}
    assert not failed, failed
    assert len([f for f in found.values() if f.result is AttackOutcome.PASS]) > 30


@attack("Says nothing of interest.")
async def quiet(ctx: AttackContext) -> AttackFinding:
    return passed("fine")


@attack("Breaks.")
async def broken(ctx: AttackContext) -> AttackFinding:
    raise ZeroDivisionError


@attack("Lacks what it needs.")
async def lacking(ctx: AttackContext) -> AttackFinding:
    message = "no such tool"
    raise CannotError(message)


@attack("Never ends.", timeout_s=0.05)
async def endless(ctx: AttackContext) -> AttackFinding:
    await ctx.box.run(["sleep", "5"])
    return passed("it ended")


@attack("Loses its sandbox.")
async def losing(ctx: AttackContext) -> AttackFinding:
    message = "it is gone"
    raise SandboxLostError(message)


async def report_of(tmp_path: Path, attacks: Sequence[Attack]) -> AttackReport:
    return await runner.attack(Subject(WeakBackend(), "weak", workdir=str(tmp_path)), attacks)


async def test_a_broken_attack_is_no_pass(tmp_path: Path) -> None:
    found = results(await report_of(tmp_path, [quiet, broken, lacking, endless, losing]))
    assert {name: finding.result.value for name, finding in found.items()} == {
        "quiet": "PASS", "broken": "CANNOT", "lacking": "CANNOT", "endless": "CANNOT",
        "losing": "FAIL",
    }  # fmt: skip
    assert "ZeroDivisionError" in found["broken"].seen
    assert found["lacking"].seen == "no such tool"


async def test_a_sandbox_that_does_not_open_is_no_pass(tmp_path: Path) -> None:
    class OpensOnce(WeakBackend):
        num_opened = 0

        @asynccontextmanager
        async def open(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:  # type: ignore[override]
            self.num_opened += 1
            if self.num_opened > 1:
                message = "no room"
                raise SandboxUnavailableError(message)
            async with super().open(*arguments, **options) as sandbox:
                yield sandbox

    found = await runner.attack(Subject(OpensOnce(), "once", workdir=str(tmp_path)), [quiet])
    assert found.rows[0].finding == AttackFinding(AttackOutcome.CANNOT, "no room")


async def test_the_report_is_kept_with_facts_of_the_machine(tmp_path: Path) -> None:
    found = await report_of(tmp_path, [quiet, lacking])
    body = json.loads(runner.keep(found, tmp_path / "deep" / "sheet.json").read_text())
    assert body["counts"] == {"PASS": 1, "FAIL": 0, "CANNOT": 1}
    assert [row["name"] for row in body["probes"]] == ["quiet", "lacking"]
    assert body["machine"]["kernel"] and body["versions"]["swerl"]


async def test_a_report_goes_to_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_STATE", str(tmp_path / "state"))
    kept = runner.keep(await report_of(tmp_path, [quiet]), None)
    assert kept.parent == tmp_path / "state" / "probes"
    assert kept.name.startswith("weak-")
