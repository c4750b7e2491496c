"""`swerl images bake`: agent CLIs as one layer on top of mirrored images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swerl.cli._images import DockerConfigOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swerl.images._agent_layer import Layer
    from swerl.images._lock import Pinned
    from swerl.images.bake import Baked


def bake(
    tasks: Annotated[Path, typer.Argument(help="Task file whose images are mirrored.")],
    agents: Annotated[
        list[str], typer.Option("--agent", metavar="NAME[@VERSION]", help="What to add.")
    ],
    *,
    mirror_lock: Annotated[
        Path | None, typer.Option(help="The mirror's lock file; TASKS.images.json by default.")
    ] = None,
    lock: Annotated[
        Path | None, typer.Option(help="Lock file of the twins; TASKS.baked.json by default.")
    ] = None,
    tasks_out: Annotated[
        Path | None, typer.Option(help="Write the tasks anew, with the baked images by digest.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Images at once.")] = 4,
    docker_config: DockerConfigOption = None,
) -> None:
    """Add agents to mirrored images as one shared layer, for sandboxes that mount no folders."""
    import tempfile

    from swerl.cli._output import console
    from swerl.cli._task_file import tasks_in
    from swerl.core.task import write_tasks
    from swerl.images.mirror import rewrite

    found = tasks_in(tasks)
    images = _mirrored({task.image for task in found}, mirror_lock, tasks)
    lock = lock or tasks.with_suffix(".baked.json")
    with tempfile.TemporaryDirectory() as folder:
        layer = _layer(agents, Path(folder, "agents.tar.gz"))
        done = _bake(images, layer, lock, workers, docker_config)
    _show(done, layer, lock)
    if any(one.error for one in done):
        raise typer.Exit(1)
    if tasks_out:
        write_tasks(tasks_out, rewrite(found, lock))
        console().print(f"tasks:   {tasks_out}\nnext: set tasks.source to it", soft_wrap=True)


def _mirrored(wanted: set[str], lock: Path | None, tasks: Path) -> dict[str, Pinned]:
    from swerl.core.errors import InputError
    from swerl.core.image_reference import is_local
    from swerl.images._lock import Lock

    lock = lock or tasks.with_suffix(".images.json")
    known = Lock(lock).images
    remote = {image for image in wanted if not is_local(image)}
    if missing := sorted(remote - known.keys()):
        more = f", and {len(missing) - 1} more are not" if missing[1:] else ""
        message = f"image {missing[0]} is not in {lock}{more}"
        hint = f"mirror them first: swerl images mirror {tasks} --to HOST:PORT/PREFIX"
        raise InputError(message, hint=hint)
    return {image: known[image] for image in sorted(remote)}


def _layer(agents: list[str], path: Path) -> Layer:
    from swerl.cli._output import stderr
    from swerl.core import plugins
    from swerl.core.errors import InputError
    from swerl.images._agent_layer import make_layer

    mounts, labels = [], []
    for agent in agents:
        name, _, version = agent.partition("@")
        module = plugins.module("harnesses", name)
        if not hasattr(module, "fetch"):
            raise InputError(
                f"{name} runs outside the sandbox: there is nothing to bake",
                hint="bake an agent that is a CLI, such as claude-code",
            )
        version = version or module.DEFAULT_VERSION
        labels.append(f"{name}@{version}")
        with stderr().status(f"fetching {labels[-1]}"):
            mounts += module.fetch(version)
    with stderr().status("packing the layer"):
        return make_layer(mounts, labels, path)


def _bake(
    images: Mapping[str, Pinned],
    layer: Layer,
    lock: Path,
    workers: int,
    docker_config: Path | None,
) -> list[Baked]:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from swerl.cli._output import stderr
    from swerl.cli._run import run
    from swerl.images import bake as baking
    from swerl.images._login import default_config

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr()) as progress:
        bar = progress.add_task("images", total=len(images))
        job = baking.bake(
            images,
            layer,
            lock,
            docker_config=docker_config or default_config(),
            workers=workers,
            on_done=lambda _: progress.advance(bar),
        )
        return run(job, after="the same command skips what is there already")


def _show(done: list[Baked], layer: Layer, lock: Path) -> None:
    from swerl.cli._images import show_failures, shown_bytes
    from swerl.cli._output import console
    from swerl.cli._text import counted

    failed = [(one.image, one.error) for one in done if one.error]
    show_failures(failed)
    console().print(
        f"{', '.join(layer.agents)} ({shown_bytes(layer.blob.size)}, stored once) "
        f"in {counted(len(done) - len(failed), 'image')}, {len(failed)} failed",
        soft_wrap=True,
    )
    console().print(f"digests: {lock}", soft_wrap=True)
    if failed:
        console().print("next: the same command tries the failed images again")
