"""Runs probes against a backend, a few at once, and keeps what each of them found."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swerl.checks.attacks import _machine
from swerl.checks.attacks._services import new_word
from swerl.checks.attacks.finding import CannotError, Finding, Result, cannot, failed
from swerl.checks.attacks.lab import Box, Ground, Lab
from swerl.checks.attacks.registry import LIMITS, Probe
from swerl.core.chat import Json
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SandboxLostError, SwerlError
from swerl.core.files import disk_errors, write_json
from swerl.core.liveness import BOOT_ID
from swerl.core.secrets import lent, state_dir

_AT_ONCE = 4
_SECRET = "SWERL_PROBE_SECRET_TOKEN"
_SHOWN = 400
_NAMESPACES = "for k in cgroup ipc mnt net pid uts; do echo $k $(readlink /proc/self/ns/$k); done"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the sheet."""

    name: str
    sentence: str
    finding: Finding
    duration_s: float


@dataclass(frozen=True, slots=True)
class Sheet:
    """What all probes found."""

    backend: str
    image: str
    options: Mapping[str, Json]
    """The backend's settings."""
    external: bool
    started_unix_s: float
    duration_s: float
    rows: Sequence[Row]

    @property
    def counts(self) -> dict[Result, int]:
        """How many probes ended in each way."""
        found = Counter(row.finding.result for row in self.rows)
        return {result: found[result] for result in Result}

    def to_json(self) -> dict[str, Json]:
        """Return the sheet with the machine and the versions that it was made on."""
        return {
            "backend": self.backend,
            "image": self.image,
            "options": dict(self.options),
            "external": self.external,
            "started_unix_s": round(self.started_unix_s, 3),
            "duration_s": round(self.duration_s, 3),
            "machine": _machine.describe(),
            "versions": _machine.versions(),
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
    """What is attacked."""

    backend: SandboxBackend
    name: str
    """Kind of sandbox, as users type it."""
    image: str = "host"
    workdir: str = "/testbed"
    options: Mapping[str, Json] = field(default_factory=dict)


async def attack(
    subject: Subject,
    probes: Sequence[Probe],
    *,
    external: bool = False,
    tell: Callable[[Row], None] = lambda _: None,
) -> Sheet:
    """Run the probes and return their sheet, in their order; `tell` hears of each as it ends.

    `external` lets packets leave the machine. Raises SandboxError or ImageError where no sandbox
    opens at all.
    """
    started, clock = time.time(), time.monotonic()
    secret = new_word()
    with lent(_SECRET, secret):
        ground = Ground(
            subject.backend,
            subject.image,
            subject.workdir,
            _machine.look(),
            secret,
            external=external,
        )
        ground = await _scout(ground)
        rows = await _run_all(ground, probes, tell)
    return Sheet(
        subject.name,
        subject.image,
        dict(subject.options),
        external,
        started,
        time.monotonic() - clock,
        rows,
    )


def keep(sheet: Sheet, path: Path | None) -> Path:
    """Write the sheet as JSON, by default to the state folder, and return where it is."""
    if path is None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(sheet.started_unix_s))
        path = state_dir() / "probes" / f"{sheet.backend}-{stamp}.json"
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, sheet.to_json())
    return path


async def _scout(ground: Ground) -> Ground:
    """Look from a first sandbox at what it shares with this machine."""
    async with ground.backend.open(ground.image, LIMITS, workdir=ground.workdir) as sandbox:
        box = Box(sandbox)
        try:
            boot_id = (await box.text(str(BOOT_ID))).strip()
        except CannotError:
            boot_id = ground.machine.boot_id  # the stricter of the two guesses
        try:
            done = await box.sh(_NAMESPACES)
        except CannotError:
            return replace(ground, own_kernel=boot_id != ground.machine.boot_id)
        pairs = [line.split() for line in done.stdout.decode().splitlines()]
        found = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    return replace(ground, own_kernel=boot_id != ground.machine.boot_id, namespaces=found or None)


async def _run_all(
    ground: Ground, probes: Sequence[Probe], tell: Callable[[Row], None]
) -> list[Row]:
    """Run a few at once, and then one by one those that measure."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(probe: Probe) -> Row:
        async with slots:
            row = await _run(ground, probe)
        tell(row)
        return row

    async with asyncio.TaskGroup() as group:
        tasks = {p.name: group.create_task(one(p)) for p in probes if not p.alone}
    rows = {name: task.result() for name, task in tasks.items()}
    for probe in probes:
        if probe.alone:
            rows[probe.name] = await one(probe)
    return [rows[probe.name] for probe in probes]


async def _run(ground: Ground, probe: Probe) -> Row:
    started = time.monotonic()
    finding = await _try(ground, probe)
    seen = " ".join(finding.seen.split())[:_SHOWN]
    finding = Finding(finding.result, seen)
    return Row(probe.name, probe.sentence, finding, time.monotonic() - started)


async def _try(ground: Ground, probe: Probe) -> Finding:
    """Run one probe in a sandbox of its own; whatever happens becomes a finding."""
    try:
        async with (
            asyncio.timeout(probe.timeout_s),
            ground.backend.open(ground.image, probe.limits, workdir=ground.workdir) as sandbox,
        ):
            return await probe.attack(Lab(ground, Box(sandbox), probe.limits))
    except SandboxLostError as error:
        return failed(f"the sandbox was lost: {error}")
    except TimeoutError:
        return cannot(f"it did not come to an end in {probe.timeout_s:.0f} s")
    except SwerlError as error:
        return cannot(str(error))
    except Exception as error:  # noqa: BLE001  # the boundary: a broken probe is no pass
        return cannot(f"the probe broke: {error!r}")
