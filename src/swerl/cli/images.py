"""`swerl images`: the images of tasks, here and in registries."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn

from swerl.cli._options import (
    AgentOption,
    JsonOption,
    RecipeSettingsOption,
    require_made_from,
    tasks_in,
)
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.cli._run import progress_bar, run
from swerl.core import plugins
from swerl.core.errors import (
    ImageError,
    InputError,
    SwerlError,
    unknown,
)
from swerl.core.events import ignore
from swerl.core.image_reference import is_local, parse, parse_target
from swerl.core.jobs import run_jobs
from swerl.core.task import Task, write_tasks
from swerl.images import bake as baking
from swerl.images.archive import import_image
from swerl.images.bake import AgentLayer, make_layer
from swerl.images.build import prepare as prepare_instance
from swerl.images.build import read_specs
from swerl.images.gc import collect
from swerl.images.http import RegistryOptions
from swerl.images.mirror import LockFile, Mirrored, Pinned, mirror, rewrite
from swerl.images.pull import Pulled, PullOptions
from swerl.images.pull import plan as read_plan
from swerl.images.pull import pull as pull_images
from swerl.images.store import default_store
from swerl.tasks.rows import file_rows

ImagesArgument = Annotated[
    list[str], typer.Argument(metavar="TASKS...", help="Task files, or names of images.")
]
RewritesOption = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="OLD=NEW", help="Replace the prefix OLD of image names by NEW."),
]

_ARCHIVE = "oci-archive:"
_ENDINGS = {".jsonl", ".json", ".txt", ".parquet"}
_MAX_FAILURES = 5
"""Failed images that get a line each: an unreachable registry fails all."""


def pull(
    images: ImagesArgument,
    *,
    rewrites: RewritesOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Layers at the same time.")] = 4,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Check again if a stored tag has changed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print bytes and pulls; read only manifests.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Pull images into the store, unpacked for local sandboxes; resumes if interrupted.

    `oci-archive:FILE:NAME` imports the image of an OCI layout, a tar or a folder, as NAME.
    """
    archives = [image for image in images if image.startswith(_ARCHIVE)]
    images = [image for image in images if image not in archives]
    options = PullOptions(
        workers=workers,
        rewrites=read_rewrites(rewrites),
        refresh=refresh,
    )
    if dry_run:
        _show_plan(images_of(images), options, as_json=as_json)
        return
    for archive in archives:
        _import(archive)
    if archives and not images:
        return
    pulled = _pull(images_of(images), options)
    failed = [(image.image, image.error) for image in pulled if image.error]
    show_failures(failed)
    moved = sum(image.moved_bytes for image in pulled)
    there = sum(image.stored is not None and not image.moved_bytes for image in pulled)
    console().print(
        f"{counted(len(pulled) - len(failed), 'image')} ready ({there} already there), "
        f"{len(failed)} failed; "
        f"{shown_bytes(moved)} pulled"
    )
    if as_json:
        stored = {image.image: image.stored.digest for image in pulled if image.stored}
        lost = failures((image.image, image.error) for image in pulled)
        root = default_store().root
        print_json({"images": stored, "failed": lost, "moved_bytes": moved, "store": root})
    console().print(f"store: {default_store().root}", soft_wrap=True)
    if failed:
        console().print("next: run the same command again to retry the failed images")
        raise typer.Exit(1)
    console().print("next: swerl images ls, or swerl sandbox smoke TASKS")


def _pull(images: list[str], options: PullOptions) -> list[Pulled]:
    total = sum(not is_local(image) for image in images)
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeElapsedColumn(), console=stderr(), transient=True) as progress:
        bar = progress.add_task(f"0 of {total} images", total=None)
        num_done = 0

        def told(_: Pulled) -> None:
            nonlocal num_done
            num_done += 1
            progress.update(bar, description=f"{num_done} of {total} images")

        job = pull_images(
            images,
            default_store(),
            options=options,
            on_done=told,
            on_bytes=lambda count: progress.advance(bar, count),
        )
        return run(job, after="run the same command again to resume")


def _show_plan(images: list[str], options: PullOptions, *, as_json: bool) -> None:
    with progress_bar("manifests", sum(not is_local(image) for image in images)) as advance:
        job = read_plan(images, default_store(), options=options, on_done=lambda _: advance())
        plan = run(job, after="manifests that were read are kept")
    unique_bytes = sum(blob.size for blob in plan.blobs)
    missing_bytes = sum(blob.size for blob in plan.missing)
    if as_json:
        print_json(
            {
                "num_images": plan.num_images,
                "num_stored": plan.num_stored,
                "num_local": plan.num_local,
                "unique_bytes": unique_bytes,
                "missing_bytes": missing_bytes,
                "pulls": plan.pulls,
                "failed": failures(plan.failed.items()),
            }
        )
    table = simple_table("", "number", "size", numbers={"number", "size"})
    table.add_row("images in registries", f"{plan.num_images:,}", shown_bytes(unique_bytes))
    table.add_row("  ready on this machine", f"{plan.num_stored:,}", "")
    table.add_row("blobs to fetch", f"{len(plan.missing):,}", shown_bytes(missing_bytes))
    for registry, count in sorted(plan.pulls.items()):
        table.add_row(f"pulls from {registry}", f"{count:,}", "")
    console().print(table)
    show_failures([*plan.failed.items()])
    if plan.failed:
        raise typer.Exit(1)
    console().print("next: the same command without --dry-run")


def _import(argument: str) -> None:
    path, _, name = argument.removeprefix(_ARCHIVE).partition(":")
    if not name:
        raise InputError(f"{argument} names no image", hint=f"append a name: {argument}:NAME")
    with stderr().status(f"importing {path}"):
        job = import_image(Path(path), default_store(), name)
        image = run(job, after="run the same command again")
    layers = f"{counted(len(image.layers), 'layer')}, {shown_bytes(image.size)}"
    console().print(f"{image.reference}  [dim]{layers}[/]", soft_wrap=True)


def mirror_images(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    to: Annotated[str, typer.Option(metavar="HOST:PORT/PREFIX", help="Destination registry.")],
    *,
    rewrites: RewritesOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Images and blobs at the same time.")] = 4,
    tasks_out: Annotated[
        Path | None, typer.Option(help="Write the tasks again with the mirrored images by digest.")
    ] = None,
) -> None:
    """Copy the images of a task file to another registry, by digest; resumes if interrupted."""
    options = RegistryOptions(workers=workers, rewrites=read_rewrites(rewrites))
    lock = tasks.with_suffix(".images.json")
    task_list = tasks_in(tasks)
    images = list(dict.fromkeys(task.image for task in task_list))
    with progress_bar("images", sum(not is_local(image) for image in images)) as advance:
        job = mirror(images, parse_target(to), lock, options=options, on_done=lambda _: advance())
        mirrored = run(job, after="the same command skips what is there already")
    _show(mirrored, lock, "mirrored")
    if tasks_out:
        write_tasks(tasks_out, rewrite(task_list, lock))
        text = f"tasks:   {tasks_out}\nnext: set tasks.source to it in a recipe"
        console().print(text, soft_wrap=True)


def _show(images: Sequence[Mirrored], lock: Path, what: str) -> None:
    """Print the results of a mirror run or of baking; exit with 1 if an image failed."""
    failed = [(image.image, image.error) for image in images if image.error]
    show_failures(failed)
    unchanged = sum(image.was_there for image in images)
    console().print(
        f"{counted(len(images) - len(failed), 'image')} {what} ({unchanged} already there), "
        f"{len(failed)} failed; {shown_bytes(sum(image.moved_bytes for image in images))} moved",
        soft_wrap=True,
    )
    console().print(f"digests: {lock}", soft_wrap=True)
    if failed:
        console().print("next: run the same command again to retry the failed images")
        raise typer.Exit(1)


def ls(as_json: JsonOption = False) -> None:
    """List the images of the store."""
    store = default_store()
    table = simple_table("image", "digest", "layers", "unpacked", "since")
    names, rows, num_damaged = store.names(), [], 0
    for name in names:
        since = f"{datetime.fromtimestamp(name.pulled_unix_s, UTC):%Y-%m-%d}"
        num_layers = num_bytes = None
        try:
            image = store.find(name.reference)
            num_layers, num_bytes = len(image.layers), image.size
            shown = (str(num_layers), shown_bytes(num_bytes))
        except ImageError:
            shown = ("[red]damaged[/]", "")
            num_damaged += 1
        rows.append({**asdict(name), "num_layers": num_layers, "num_bytes": num_bytes})
        table.add_row(name.reference, name.digest[7:19], *shown, since)
    if as_json:
        print_json({"store": store.root, "images": rows})
        return
    if names:
        console().print(table)
    console().print(f"{counted(len(names), 'image')} in {store.root}", soft_wrap=True)
    if not names:
        console().print("next: swerl images pull TASKS")
    if num_damaged:
        console().print("next: swerl images pull them again")


def gc(
    keep: Annotated[
        list[str],
        typer.Option(metavar="TASKS", help="Task files or images to keep."),
    ],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed.")
    ] = False,
) -> None:
    """Free space: remove the images outside of --keep.

    `--keep host` keeps no image of the store.
    """
    for name in images_of([argument for argument in keep if not is_file(argument)]):
        if not is_local(name):
            default_store().named(name)  # a mistyped file name must not remove everything
    result = collect(default_store(), images_of(keep), dry_run=dry_run)
    for image in result.removed:
        console().print(f"{image.reference}  [dim]{image.digest[7:19]}[/]", soft_wrap=True)
    for image in result.in_use:
        console().print(f"[yellow]in use[/] {image.reference}", soft_wrap=True)
    verb = "would be freed" if dry_run else "freed"
    console().print(
        f"{counted(len(result.removed), 'image')}, {result.num_parts} blobs and layers: "
        f"{shown_bytes(result.freed_bytes)} ({result.freed_bytes:,} bytes) {verb}, "
        f"{shown_bytes(result.kept_bytes)} kept"
    )


def prepare(
    tasks: Annotated[Path, typer.Argument(help="Task file.")],
    *,
    agent: AgentOption = "builtin",
    settings: RecipeSettingsOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Sandboxes at the same time.")] = 4,
) -> None:
    """Prepare the sandboxes of tasks ahead; a run does it at the first attempt otherwise."""
    from swerl.recipe.load import load
    from swerl.rollout import wiring

    recipe = load([], ["name=prepare", "steps=1", f"harness.type={agent}", *(settings or ())])
    pool = wiring.sandbox_pool_of(recipe, wiring.sandbox_backend(recipe, ignore))
    harness = wiring.harness_of(recipe)
    task_list = tasks_in(tasks)
    counts: dict[str, int] = {}
    failed: dict[str, str] = {}

    async def one(task: Task) -> None:
        try:
            counts[task.id] = await pool.prepare(task, harness)
        except SwerlError as error:
            failed[task.id] = str(error)

    with progress_bar("tasks", len(task_list)) as advance:
        job = run_jobs(task_list, one, limit=jobs, on_done=lambda _: advance())
        run(job, after="what is prepared is kept")
    for name, error in failed.items():
        stderr().print(f"{name}: {error}", markup=False, soft_wrap=True)
    whole = [name for name, count in counts.items() if count == 2]
    console().print(
        f"{counted(len(whole), 'task')} prepared; {len(counts) - len(whole)} must be prepared in "
        f"each sandbox; {len(failed)} failed"
    )
    if failed:
        raise typer.Exit(1)


def build(
    specs: Annotated[Path, typer.Argument(help="JSON list of instance specs.")],
    rows: Annotated[Path, typer.Option(help="JSONL or Parquet file with the instances' rows.")],
    *,
    instances: Annotated[
        list[str] | None, typer.Option("--instance", help="Build this one; all by default.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("tasks.jsonl"),
) -> None:
    """Build instances from their projects' released source archives, and write their Tasks."""
    by_id = {spec.instance_id: spec for spec in read_specs(specs)}
    for name in instances or ():
        if name not in by_id:
            raise unknown("instance", name, by_id)
    selected = instances or list(by_id)
    require_made_from(out, selected)
    records = list(file_rows(rows))
    tasks = []
    for name in selected:
        started = time.monotonic()
        try:
            with stderr().status(name) as status:
                tasks.append(prepare_instance(by_id[name], records, status.update))
        except ImageError as error:
            console().print(f"[red]{name}[/]: {error}\n  {error.hint}", soft_wrap=True)
            continue
        duration = f"[dim]{time.monotonic() - started:.1f} s[/]"
        console().print(f"{tasks[-1].image}  {duration}", soft_wrap=True)
    if not tasks:
        raise ImageError("no image could be built", hint="the reasons are above")
    count = write_tasks(out, tasks)
    console().print(f"{counted(count, 'task')}: {out}", soft_wrap=True)
    console().print(f"next: swerl rollout --tasks {out} --instance {tasks[0].id}", soft_wrap=True)
    if len(tasks) < len(selected):
        raise typer.Exit(1)


def bake(
    tasks: Annotated[Path, typer.Argument(help="Task file with mirrored images.")],
    agents: Annotated[
        list[str], typer.Option("--agent", metavar="NAME[@VERSION]", help="Agent to add.")
    ],
    *,
    tasks_out: Annotated[
        Path | None, typer.Option(help="Write the tasks again with the baked images by digest.")
    ] = None,
) -> None:
    """Add agents to mirrored images as one shared layer, for sandboxes that mount no folders."""
    task_list = tasks_in(tasks)
    images = _mirrored({task.image for task in task_list}, tasks)
    lock = tasks.with_suffix(".baked.json")
    with tempfile.TemporaryDirectory() as folder:
        layer = _layer(agents, Path(folder, "agents.tar.gz"))
        with progress_bar("images", len(images)) as advance:
            job = baking.bake(images, layer, lock, on_done=lambda _: advance())
            baked = run(job, after="the same command skips what is there already")
    _show(baked, lock, f"with {', '.join(layer.agents)}")
    if tasks_out:
        write_tasks(tasks_out, rewrite(task_list, lock))
        console().print(f"tasks:   {tasks_out}\nnext: set tasks.source to it", soft_wrap=True)


def _mirrored(images: set[str], tasks: Path) -> dict[str, Pinned]:
    lock = tasks.with_suffix(".images.json")
    pinned = LockFile(lock).images
    remote = {image for image in images if not is_local(image)}
    if missing := sorted(remote - pinned.keys()):
        more = f", and {len(missing) - 1} more are not" if missing[1:] else ""
        message = f"image {missing[0]} is not in {lock}{more}"
        hint = f"mirror them first: swerl images mirror {tasks} --to HOST:PORT/PREFIX"
        raise InputError(message, hint=hint)
    return {image: pinned[image] for image in sorted(remote)}


def _layer(agents: list[str], path: Path) -> AgentLayer:
    mounts, labels = [], []
    for agent in agents:
        name, _, version = agent.partition("@")
        module = plugins.module("harnesses", name)
        if not hasattr(module, "fetch"):
            raise InputError(
                f"{name} runs outside of the sandbox and needs no image",
                hint="bake an agent that is a CLI, such as claude-code",
            )
        version = version or module.DEFAULT_VERSION
        labels.append(f"{name}@{version}")
        with stderr().status(f"fetching {labels[-1]}"):
            mounts += module.fetch(version)
    with stderr().status("packing the layer"):
        return make_layer(mounts, labels, path)


def images_of(arguments: Sequence[str]) -> list[str]:
    """Return the images of task files and named images, each once, in order of use.

    Raises TaskError on a file without tasks, InputError on an invalid image name.
    """
    images: list[str] = []
    for argument in arguments:
        if is_file(argument):
            images += [task.image for task in tasks_in(Path(argument))]
        else:
            if not is_local(argument):
                parse(argument)
            images.append(argument)
    return list(dict.fromkeys(images))


def is_file(argument: str) -> bool:
    """True if an argument is a file name, not an image name."""
    path = Path(argument)
    return path.is_file() or path.suffix in _ENDINGS or argument.startswith(("/", ".", "~"))


def failures(outcomes: Iterable[tuple[str, SwerlError | None]]) -> dict[str, str]:
    """Return image -> error with its hint, for JSON."""
    return {image: error.explained() for image, error in outcomes if error}


def show_failures(failures: Sequence[tuple[str, SwerlError]]) -> None:
    """Print the first failures with their remedies, and the number of the others."""
    for image, error in failures[:_MAX_FAILURES]:
        text = escape(f"{image}: {error.explained()}")
        stderr().print(f"[red]failed[/] {text}", soft_wrap=True)
    if rest := failures[_MAX_FAILURES:]:
        stderr().print(f"[red]failed[/] {len(rest)} more images", soft_wrap=True)


def shown_bytes(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    return f"{count / 2**30:,.1f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:,.1f} MiB"


def read_rewrites(texts: Iterable[str] | None) -> dict[str, str]:
    """Return old prefix -> new prefix. Raises InputError on a text that is not OLD=NEW."""
    return dict(map(_rewrite, texts or ()))


def _rewrite(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise InputError(
            f"--from {text!r} is not OLD=NEW",
            hint="for example --from docker.io/=127.0.0.1:5000/hub/",
        )
    return old, new
