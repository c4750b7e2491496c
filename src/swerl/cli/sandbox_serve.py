"""`swerl sandbox serve`: E2B's API over sandboxes of this machine."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from swerl.cli._options import (
    BackendOption,
    SettingsAndLimitsOption,
    keys_in,
    open_backend,
    split_limits,
)
from swerl.cli._output import console, stderr
from swerl.cli._run import run
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import InputError
from swerl.sandboxes.e2b_server.access import new_key
from swerl.sandboxes.e2b_server.app import SandboxServer, raise_file_limit
from swerl.sandboxes.e2b_server.served import ServerOptions

_LOCAL_TEMPLATES = {"base": "host"}
"""Image of the SDK's default template."""
_LIFETIME_S = 24 * 3600.0
"""Default maximum lifetime of a sandbox in seconds."""


def serve(
    *,
    backend: BackendOption = "local",
    settings: SettingsAndLimitsOption = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="HOST:PORT; port 0 chooses a free one. Put a proxy with TLS before an address "
            "that other machines reach.",
        ),
    ] = "127.0.0.1:49000",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key. By default a new key is printed.")
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=IMAGE", help="Image of a template id; can be repeated."),
    ] = None,
    max_sandboxes: Annotated[int, typer.Option(min=1, help="Maximum sandboxes.")] = 256,
) -> None:
    """Serve sandboxes to E2B's SDK, and to tools written for it, until Ctrl-C.

    `--set limits.lifetime_s=…` sets the maximum lifetime of a sandbox; the default is 24 hours.
    """
    host, port = _address(listen)
    key = _key(api_key_file, host)
    limits, backend_settings = split_limits(settings or (), lifetime_s=_LIFETIME_S)
    options = ServerOptions(
        host=host,
        port=port,
        templates={**(_LOCAL_TEMPLATES if backend == "local" else {}), **_templates(template)},
        limits=limits,
        max_lifetime_s=limits.lifetime_s,
        max_sandboxes=max_sandboxes,
    )
    shown = f'"$(cat {shlex.quote(str(api_key_file))})"' if api_key_file else key
    run(
        _serve(open_backend(backend, backend_settings, run="serve"), key, options, shown),
        after="every sandbox is removed",
    )


async def _serve(backend: SandboxBackend, key: str, options: ServerOptions, shown: str) -> None:
    raise_file_limit()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with SandboxServer(backend, key, options) as server:
        variables = {"API_URL": server.url, "SANDBOX_URL": server.url, "API_KEY": shown}
        for name, value in variables.items():
            console().print(f"export E2B_{name}={value}", markup=False, soft_wrap=True)
        console().file.flush()  # a script that starts it in the background waits for these lines
        stderr().print("serving until Ctrl-C, which removes every sandbox", markup=False)
        await stopped.wait()


def _address(listen: str) -> tuple[str, int]:
    """Return the host and port of an address."""
    parts = urlsplit(listen if "://" in listen else f"//{listen}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("", "http") or host is None or port is None:
        raise InputError(
            f"{listen!r} is not an address of this server",
            hint="write --listen HOST:PORT; for https put a proxy before it",
        )
    return host, port


def _key(path: Path | None, host: str) -> str:
    keys = keys_in(path, host, "--api-key-file")
    if len(keys) > 1:
        raise InputError(f"{path} has {len(keys)} lines", hint="write one key to the file")
    return keys[0] if keys else new_key()


def _templates(texts: Sequence[str] | None) -> Mapping[str, str]:
    templates = {}
    for text in texts or ():
        name, _, image = text.partition("=")
        if not name or not image:
            raise InputError(f"{text!r} is not a template", hint="write --template NAME=IMAGE")
        templates[name] = image
    return templates
