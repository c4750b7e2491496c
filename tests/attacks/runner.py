"""Run attacks against a backend, a few at once, and report each finding."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swerl.core.chat import Json
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SandboxLostError, SwerlError, unknown
from swerl.core.files import disk_errors, write_json
from swerl.core.jobs import run_jobs
from swerl.core.liveness import BOOT_ID
from swerl.core.secrets import lent, state_dir
from tests.attacks import files, gateway, host, kernel, life, network, resources
from tests.attacks._targets import new_word
from tests.attacks.attack import (
    LIMITS,
    Attack,
    AttackContext,
    AttackFinding,
    AttackOutcome,
    CannotError,
    OpenSandbox,
    Target,
    cannot,
    failed,
    host_facts,
    machine_facts,
    versions,
)

_AT_ONCE = 4
_SECRET = "SWERL_PROBE_SECRET_TOKEN"
_SHOWN = 400
_NAMESPACES = "for k in cgroup ipc mnt net pid uts; do echo $k $(readlink /proc/self/ns/$k); done"


@dataclass(frozen=True, slots=True)
class AttackResult:
    name: str
    sentence: str
    finding: AttackFinding
    duration_s: float


@dataclass(frozen=True, slots=True)
class AttackReport:
    """Results of all attacks, with the attacked backend."""

    backend: str
    image: str
    options: Mapping[str, Json]
    """The backend's settings."""
    external: bool
    started_unix_s: float
    duration_s: float
    rows: Sequence[AttackResult]

    @property
    def counts(self) -> dict[AttackOutcome, int]:
        found = Counter(row.finding.result for row in self.rows)
        return {result: found[result] for result in AttackOutcome}

    def to_json(self) -> dict[str, Json]:
        """Return the report with facts of this machine and versions."""
        return {
            "backend": self.backend,
            "image": self.image,
            "options": dict(self.options),
            "external": self.external,
            "started_unix_s": round(self.started_unix_s, 3),
            "duration_s": round(self.duration_s, 3),
            "machine": machine_facts(),
            "versions": versions(),
            "counts": {result.value: count for result, count in self.counts.items()},
            "probes": [
                {
                    "name": row.name,
                    "tries": row.sentence,
                    "result": row.finding.result.value,
                    "seen": row.finding.seen,
                    "duration_s": round(row.duration_s, 3),
                }
                for row in self.rows
            ],
        }


@dataclass(frozen=True, slots=True)
class Subject:
    """The attacked backend and image."""

    backend: SandboxBackend
    name: str
    """Type of sandbox, as in `sandbox.type`."""
    image: str = "host"
    workdir: str = "/testbed"
    options: Mapping[str, Json] = field(default_factory=dict)


async def attack(
    subject: Subject,
    attacks: Sequence[Attack],
    *,
    external: bool = False,
    on_result: Callable[[AttackResult], None] = lambda _: None,
) -> AttackReport:
    """Run the attacks and report them in their order; call `on_result` after each attack.

    `external` lets packets leave the machine. Raises SandboxError or ImageError if the first
    sandbox does not open.
    """
    started, clock = time.time(), time.monotonic()
    secret = new_word()
    with lent(_SECRET, secret):
        target = Target(
            subject.backend,
            subject.image,
            subject.workdir,
            host_facts(),
            secret,
            external=external,
        )
        target = await _scout(target)
        rows = await _run_all(target, attacks, on_result)
    return AttackReport(
        subject.name,
        subject.image,
        dict(subject.options),
        external,
        started,
        time.monotonic() - clock,
        rows,
    )


def keep(report: AttackReport, path: Path | None) -> Path:
    """Write the report as JSON, by default to the state folder, and return the path."""
    if path is None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(report.started_unix_s))
        path = state_dir() / "probes" / f"{report.backend}-{stamp}.json"
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report.to_json())
    return path


async def _scout(target: Target) -> Target:
    """Open a first sandbox and read its kernel and namespaces."""
    async with target.backend.open(target.image, LIMITS, workdir=target.workdir) as sandbox:
        box = OpenSandbox(sandbox)
        try:
            boot_id = (await box.text(str(BOOT_ID))).strip()
        except CannotError:
            boot_id = target.machine.boot_id  # unknown: assume a shared kernel, the stricter case
        try:
            done = await box.sh(_NAMESPACES)
        except CannotError:
            return replace(target, own_kernel=boot_id != target.machine.boot_id)
        pairs = [line.split() for line in done.stdout.decode().splitlines()]
        found = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    return replace(target, own_kernel=boot_id != target.machine.boot_id, namespaces=found or None)


async def _run_all(
    target: Target, attacks: Sequence[Attack], on_result: Callable[[AttackResult], None]
) -> list[AttackResult]:
    """Run most attacks a few at once, then each `alone` attack by itself."""

    async def one(attack: Attack) -> AttackResult:
        return await _run(target, attack)

    together = [attack for attack in attacks if not attack.alone]
    alone = [attack for attack in attacks if attack.alone]
    rows = await run_jobs(together, one, limit=_AT_ONCE, on_done=on_result)
    rows += await run_jobs(alone, one, limit=1, on_done=on_result)
    by_name = {row.name: row for row in rows}
    return [by_name[attack.name] for attack in attacks]


async def _run(target: Target, attack: Attack) -> AttackResult:
    started = time.monotonic()
    finding = await _try(target, attack)
    seen = " ".join(finding.seen.split())[:_SHOWN]
    finding = AttackFinding(finding.result, seen)
    return AttackResult(attack.name, attack.sentence, finding, time.monotonic() - started)


async def _try(target: Target, attack: Attack) -> AttackFinding:
    """Run one attack in a new sandbox; turn every error into a finding."""
    try:
        async with (
            asyncio.timeout(attack.timeout_s),
            target.backend.open(target.image, attack.limits, workdir=target.workdir) as sandbox,
        ):
            return await attack.run(AttackContext(target, OpenSandbox(sandbox), attack.limits))
    except SandboxLostError as error:
        return failed(f"the sandbox was lost: {error}")
    except TimeoutError:
        return cannot(f"it did not end within {attack.timeout_s:.0f} s")
    except SwerlError as error:
        return cannot(str(error))
    except Exception as error:  # noqa: BLE001  # the boundary: a broken attack is no pass
        return cannot(f"the attack raised {error!r}")


_TOPICS = (network, gateway, host, kernel, resources, files, life)


def all_attacks() -> list[Attack]:
    return [part for topic in _TOPICS for part in vars(topic).values() if isinstance(part, Attack)]


def choose(names: Sequence[str]) -> list[Attack]:
    """Return the attacks with these names; all without names. Raises UnknownNameError."""
    attacks = {attack.name: attack for attack in all_attacks()}
    for name in names:
        if name not in attacks:
            raise unknown("attack", name, attacks)
    return [attack for name, attack in attacks.items() if not names or name in names]
