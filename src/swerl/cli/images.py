"""`swerl images`: wires its commands; `mirror` is here, the others have files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swerl.cli import images_bake, images_build, images_plan, images_pull, images_store
from swerl.cli._images import DockerConfigOption, RewritesOption

if TYPE_CHECKING:
    from swerl.core.task import Task
    from swerl.images.mirror import Mirrored, MirrorOptions, Report

app = typer.Typer(no_args_is_help=True, help="Plan, fetch, check and build task images.")


app.command("build")(images_build.build)
app.command("bake")(images_bake.bake)
app.command("plan")(images_plan.plan)
app.command("pull")(images_pull.pull)
app.command("import")(images_pull.import_image)
app.command("ls")(images_store.ls)
app.command("verify")(images_store.verify)
app.command("gc")(images_store.gc)


@app.callback()
def _images() -> None:
    """Plan, fetch, check and build task images."""


@app.command("mirror")
def mirror_images(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    to: Annotated[str, typer.Option(metavar="HOST:PORT/PREFIX", help="Where images go.")],
    *,
    rewrites: RewritesOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Images and blobs at once.")] = 4,
    platform: Annotated[
        str, typer.Option(metavar="OS/ARCH", help="What lists of platforms are reduced to.")
    ] = "linux/amd64",
    lock: Annotated[
        Path | None, typer.Option(help="Lock file of digests; TASKS.images.json by default.")
    ] = None,
    tasks_out: Annotated[
        Path | None, typer.Option(help="Write the tasks anew, with the mirrored images by digest.")
    ] = None,
    docker_config: DockerConfigOption = None,
) -> None:
    """Copy the images of a task file to another registry, by digest; goes on where it stopped."""
    from swerl.cli._rewrites import read_rewrites
    from swerl.cli._task_file import tasks_in
    from swerl.images._login import default_config
    from swerl.images.mirror import MirrorOptions

    options = MirrorOptions(
        workers=workers,
        rewrites=read_rewrites(rewrites),
        platform=_platform(platform),
        docker_config=docker_config or default_config(),
    )
    lock = lock or tasks.with_suffix(".images.json")
    found = tasks_in(tasks)
    report = _mirror(found, to, lock, options)
    _show(report, lock)
    if report.failed:
        raise typer.Exit(1)
    if tasks_out:
        _write_rewritten(found, lock, tasks_out)


def _platform(text: str) -> tuple[str, str]:
    from swerl.core.errors import InputError

    system, slash, architecture = text.partition("/")
    if not (system and slash and architecture):
        raise InputError(
            f"--platform {text!r} is not OS/ARCH", hint="for example --platform linux/arm64"
        )
    return system, architecture


def _mirror(tasks: list[Task], to: str, lock: Path, options: MirrorOptions) -> Report:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from swerl.cli._output import stderr
    from swerl.cli._run import run
    from swerl.core.image_reference import is_local, parse_target
    from swerl.images.mirror import mirror

    images = list(dict.fromkeys(task.image for task in tasks))
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr()) as progress:
        bar = progress.add_task("images", total=sum(not is_local(image) for image in images))

        def advance(_: Mirrored) -> None:
            progress.advance(bar)

        target = parse_target(to)
        return run(
            mirror(images, target, lock, options=options, on_done=advance),
            after="the same command skips what is there already",
        )


def _show(report: Report, lock: Path) -> None:
    from swerl.cli._images import show_failures, shown_bytes
    from swerl.cli._output import console
    from swerl.cli._text import counted
    from swerl.images.mirror import Way

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
        console().print("next: the same command tries the failed images again")


def _write_rewritten(tasks: list[Task], lock: Path, out: Path) -> None:
    from swerl.cli._output import console
    from swerl.core.task import write_tasks
    from swerl.images.mirror import rewrite

    write_tasks(out, rewrite(tasks, lock))
    console().print(f"tasks:   {out}\nnext: set tasks.source to it in a recipe", soft_wrap=True)
