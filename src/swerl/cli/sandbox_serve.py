"""`swerl sandbox serve`: E2B's interfaces over sandboxes of this machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swerl.cli._options import BackendOption, SettingsOption, is_loopback

if TYPE_CHECKING:
    from swerl.core.contracts import SandboxBackend
    from swerl.sandboxes.e2b_server.served import ServerOptions

_LOCAL_TEMPLATES = {"base": "host"}
"""What the SDK's default template is where no other image is named."""


def serve(
    *,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 49000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key. By default one is made and printed.")
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=IMAGE", help="Image behind a template id; can be repeated."),
    ] = None,
    image_key: Annotated[
        str, typer.Option(help="Metadata key that names the image in place of the template.")
    ] = "image",
    workdir: Annotated[str, typer.Option(help="Folder where commands start.")] = "/home/user",
    memory_mib: Annotated[int, typer.Option(min=16, help="Memory of a sandbox, MiB.")] = 2048,
    cpus: Annotated[float, typer.Option(min=0.01, help="CPUs of a sandbox.")] = 1.0,
    processes: Annotated[int, typer.Option(min=4, help="Processes of a sandbox.")] = 256,
    disk_mib: Annotated[int, typer.Option(min=1, help="Disk of a sandbox, MiB.")] = 4096,
    max_sandboxes: Annotated[int, typer.Option(min=1, help="Sandboxes at once.")] = 256,
    max_hours: Annotated[float, typer.Option(min=0.01, help="Longest life of a sandbox.")] = 24.0,
    max_file_mib: Annotated[int, typer.Option(min=1, help="Largest file, MiB.")] = 512,
) -> None:
    """Serve sandboxes to E2B's SDK, and to tools written for it, until Ctrl-C."""
    from swerl.cli._options import open_backend
    from swerl.cli._run import run
    from swerl.core.sandbox import Limits
    from swerl.sandboxes.e2b_server.served import ServerOptions

    key = _key(api_key_file, host)
    _require_absolute(workdir)
    options = ServerOptions(
        host=host,
        port=port,
        templates={**(_LOCAL_TEMPLATES if backend == "local" else {}), **_templates(template)},
        image_key=image_key,
        workdir=workdir,
        limits=Limits(memory_mib, processes, cpus, disk_mib),
        max_lifetime_s=max_hours * 3600,
        max_sandboxes=max_sandboxes,
        max_file_mib=max_file_mib,
    )
    shown = f'"$(cat {shlex.quote(str(api_key_file))})"' if api_key_file else key
    run(
        _serve(open_backend(backend, settings, run="serve"), key, options, shown),
        after="every sandbox is removed",
    )


async def _serve(backend: SandboxBackend, key: str, options: ServerOptions, shown: str) -> None:
    import asyncio
    import signal

    from swerl.cli._output import console, stderr
    from swerl.sandboxes.e2b_server.app import SandboxServer, raise_file_limit

    raise_file_limit()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with SandboxServer(backend, key, options) as server:
        for line in (
            f"export E2B_API_URL={server.url}",
            f"export E2B_SANDBOX_URL={server.url}",
            f"export E2B_API_KEY={shown}",
        ):
            console().print(line, markup=False, soft_wrap=True)
        console().file.flush()  # whoever started it in the background waits for these lines
        stderr().print("serving until Ctrl-C, which removes every sandbox", markup=False)
        await stopped.wait()


def _key(path: Path | None, host: str) -> str:
    from swerl.core.errors import InputError
    from swerl.sandboxes.e2b_server.access import new_key

    if path is None:
        if not is_loopback(host):
            raise InputError(
                f"{host} can be reached from other machines, and the key would be printed",
                hint="put a key of your own in a file: --api-key-file FILE",
            )
        return new_key()
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the key in {path}: {error}",
            hint="--api-key-file takes a file with one line",
        ) from error
    if len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"{path} holds no key: it takes 16 printable characters or more",
            hint="`openssl rand -hex 20` makes one",
        )
    return key


def _require_absolute(workdir: str) -> None:
    from swerl.core.errors import InputError

    if not workdir.startswith("/"):
        raise InputError(
            f"--workdir {workdir!r} is not an absolute path",
            hint="write it as the sandbox sees it, such as /home/user",
        )


def _templates(given: Sequence[str] | None) -> Mapping[str, str]:
    from swerl.core.errors import InputError

    found = {}
    for text in given or ():
        name, _, image = text.partition("=")
        if not name or not image:
            raise InputError(f"{text!r} is no template", hint="write --template NAME=IMAGE")
        found[name] = image
    return found
