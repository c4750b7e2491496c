"""The CPU server of a dense Qwen3 as a process: arguments, start, and how it ends.

`python -m swerl.engines._torch_server --model DIR --ready-file FILE …`; FILE gets the port as JSON
once requests are served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import torch
from aiohttp import web

from swerl.core.errors import EngineError, SwerlError
from swerl.engines._torch_app import App


def main() -> int:
    """Serve until terminated. Returns the exit code."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    try:
        asyncio.run(_serve(args))
    except (SwerlError, OSError) as error:
        hint = error.hint if isinstance(error, SwerlError) else ""
        sys.stderr.write(f"error: {error}\n" + (f"hint: {hint}\n" if hint else ""))
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--ready-file", type=Path, required=True, help="gets the port once ready")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 for any free one")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-running", type=int, required=True, help="most concurrent requests")
    parser.add_argument("--num-rows", type=int, required=True, help="most cached sequences")
    parser.add_argument("--context-length", type=int, required=True, help="most tokens of one")
    return parser.parse_args()


async def _serve(args: argparse.Namespace) -> None:
    app = App(
        args.model,
        num_rows=max(args.num_rows, args.max_running),
        max_running=args.max_running,
        context=args.context_length,
    )
    runner = web.AppRunner(app.routes(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, args.host, args.port).start()
    except OSError as error:
        raise EngineError(
            f"cannot listen on {args.host}:{args.port}: {error.strerror}",
            hint="use another port, or port 0 for any free one",
        ) from error
    _write_ready(args.ready_file, runner.addresses[0][1])
    await app.step_forever()


def _write_ready(path: Path, port: int) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"port": port, "pid": os.getpid()}))
    partial.rename(path)


if __name__ == "__main__":
    sys.exit(main())
