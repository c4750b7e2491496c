"""`swerl images plan | mirror`: the cost of images, and copies of them in another registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from swerl.cli._images import (
    DockerConfigOption,
    RewritesOption,
    failures,
    read_rewrites,
    show_failures,
    shown_bytes,
)
from swerl.cli._options import JsonOption, tasks_in
from swerl.cli._output import console, counted, print_json, simple_table
from swerl.cli._run import progress_bar, run
from swerl.core.errors import InputError
from swerl.core.image_reference import is_local, parse_target
from swerl.core.task import write_tasks
from swerl.images import plan as planning
from swerl.images.http import RegistryOptions, default_config
from swerl.images.mirror import MirrorOptions, MirrorReport, Way, mirror, rewrite
from swerl.images.plan import ImagePlan
from swerl.images.store import default_store

_MIB = 2**20


def plan(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    *,
    rewrites: RewritesOption = None,
    mbit: Annotated[float, typer.Option(min=0.001, help="Bandwidth in Mbit/s.")] = 1000.0,
    workers: Annotated[int, typer.Option(min=1, help="Manifests at the same time.")] = 8,
    docker_config: DockerConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add up layers, bytes, pulls and time of a task file's images; reads only manifests."""
    options = RegistryOptions(
        workers=workers,
        rewrites=read_rewrites(rewrites),
        docker_config=docker_config or default_config(),
    )
    images = list(dict.fromkeys(task.image for task in tasks_in(tasks)))
    with progress_bar("manifests", sum(not is_local(image) for image in images)) as advance:
        job = planning.plan(images, default_store(), options=options, on_done=lambda _: advance())
        made = run(job, after="manifests that were read are kept")
    if as_json:
        print_json(_figures(made, mbit))
    else:
        console().print(_table(made, mbit))
    show_failures((image.image, image.error) for image in made.failed if image.error)
    if not as_json:
        verb = "pull" if len(made.failed) < len(made.images) else "plan"
        again = "" if verb == "pull" else " again, once a registry answers"
        console().print(f"next: swerl images {verb} {tasks}{again}", soft_wrap=True)
    if made.failed:
        raise typer.Exit(1)


def _table(made: ImagePlan, mbit: float) -> Table:
    stored = sum(image.is_stored for image in made.images)
    table = simple_table("", "number", "MiB", numbers={"number", "MiB"})
    images = len(made.images)
    alone = sum(image.num_bytes for image in made.images)
    table.add_row("images in registries", f"{images:,}", f"{alone / _MIB:,.1f}")
    table.add_row("  ready on this machine", f"{stored:,}", "")
    table.add_row("  could not be read", f"{len(made.failed):,}", "")
    table.add_row("images of this machine", f"{made.num_local:,}", "")
    table.add_row("blobs, each once", f"{len(made.blobs):,}", f"{made.unique_bytes / _MIB:,.1f}")
    table.add_row("  saved by sharing", "", f"{made.shared_bytes / _MIB:,.1f}")
    table.add_row("to fetch", f"{len(made.missing):,}", f"{made.missing_bytes / _MIB:,.1f}")
    table.add_row(f"  at {mbit:g} Mbit/s", _time(made.transfer_s(mbit)), "")
    for registry in _registries(made):
        table.add_row(f"pulls from {registry}", f"{made.num_pulls(registry):,}", "")
        if quota := made.quotas.get(registry):
            allowed = f"{quota.remaining} of {quota.limit} left in {_time(quota.window_s)}"
            table.add_row("  its quota", allowed, "")
            table.add_row("  which takes", _time(made.quota_s(registry)), "")
    return table


def _figures(made: ImagePlan, mbit: float) -> dict[str, Any]:
    return {
        "num_images": len(made.images),
        "num_stored": sum(image.is_stored for image in made.images),
        "num_local": made.num_local,
        "num_blobs": len(made.blobs),
        "unique_bytes": made.unique_bytes,
        "shared_bytes": made.shared_bytes,
        "num_missing_blobs": len(made.missing),
        "missing_bytes": made.missing_bytes,
        "mbit_s": mbit,
        "transfer_s": made.transfer_s(mbit),
        "registries": {
            name: {
                "num_pulls": made.num_pulls(name),
                "quota": made.quotas.get(name),
                "quota_s": made.quota_s(name),
            }
            for name in _registries(made)
        },
        "images": {
            image.image: {
                "digest": image.digest,
                "num_bytes": image.num_bytes,
                "is_stored": image.is_stored,
                "error": str(image.error) if image.error else None,
            }
            for image in made.images
        },
    }


def _registries(made: ImagePlan) -> list[str]:
    return sorted({image.registry for image in made.images if image.registry})


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def mirror_images(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    to: Annotated[str, typer.Option(metavar="HOST:PORT/PREFIX", help="Destination registry.")],
    *,
    rewrites: RewritesOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Images and blobs at the same time.")] = 4,
    platform: Annotated[
        str, typer.Option(metavar="OS/ARCH", help="Platform to keep of multi-platform images.")
    ] = "linux/amd64",
    lock: Annotated[
        Path | None, typer.Option(help="Lock file of digests; TASKS.images.json by default.")
    ] = None,
    tasks_out: Annotated[
        Path | None, typer.Option(help="Write the tasks again with the mirrored images by digest.")
    ] = None,
    docker_config: DockerConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy the images of a task file to another registry, by digest; resumes if interrupted."""
    options = MirrorOptions(
        workers=workers,
        rewrites=read_rewrites(rewrites),
        platform=_platform(platform),
        docker_config=docker_config or default_config(),
    )
    lock = lock or tasks.with_suffix(".images.json")
    found = tasks_in(tasks)
    images = list(dict.fromkeys(task.image for task in found))
    with progress_bar("images", sum(not is_local(image) for image in images)) as advance:
        job = mirror(images, parse_target(to), lock, options=options, on_done=lambda _: advance())
        report = run(job, after="the same command skips what is there already")
    _show(report, lock)
    if as_json:
        shown = {
            "num_images": len(report.images) - len(report.failed),
            "num_local": report.num_local,
            "moved_bytes": report.moved_bytes,
            "failed": failures((each.image, each.error) for each in report.failed),
        }
        print_json({**shown, "lock": lock, "tasks": None if report.failed else tasks_out})
    if report.failed:
        raise typer.Exit(1)
    if tasks_out:
        write_tasks(tasks_out, rewrite(found, lock))
        text = f"tasks:   {tasks_out}\nnext: set tasks.source to it in a recipe"
        console().print(text, soft_wrap=True)


def _platform(text: str) -> tuple[str, str]:
    system, slash, architecture = text.partition("/")
    if not (system and slash and architecture):
        raise InputError(
            f"--platform {text!r} is not OS/ARCH", hint="for example --platform linux/arm64"
        )
    return system, architecture


def _show(report: MirrorReport, lock: Path) -> None:
    show_failures((done.image, done.error) for done in report.failed if done.error)
    ways = "blobs: " + ", ".join(f"{report.num_blobs(way)} {way}" for way in Way)
    unchanged = sum(1 for done in report.images if done.pinned and not done.blobs)
    console().print(
        f"{counted(len(report.images) - len(report.failed), 'image')} mirrored "
        f"({unchanged} already there), {len(report.failed)} failed, {report.num_local} local; "
        f"{ways}; {shown_bytes(report.moved_bytes)} moved",
        soft_wrap=True,
    )
    console().print(f"digests: {lock}", soft_wrap=True)
    if report.failed:
        console().print("next: run the same command again to retry the failed images")
