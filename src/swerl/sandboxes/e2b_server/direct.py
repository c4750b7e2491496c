"""A sandbox's own methods over HTTP, in whole and in bytes, for a run's own client.

E2B's protocols know streams of text and no command's end as one answer; a client that wants bytes
over them puts a supervisor around every command. A run's own client has no need of that: it sends
the key, the sandbox's id, and `POST /swerl/run`, or `GET` or `PUT /swerl/file`.
"""

from __future__ import annotations

import base64
from typing import Any

import orjson
from aiohttp import web

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.sandboxes.e2b_server.boxes import Box
from swerl.sandboxes.e2b_server.connect import read_body
from swerl.sandboxes.e2b_server.failure import Code, Failure

PATHS = frozenset({"/swerl/run", "/swerl/file"})
FAILED = 409
"""Status of an answer that holds an error of the sandbox."""
_MAX_RUN_BYTES = 1 << 29


async def answer(box: Box, request: web.BaseRequest, max_file_bytes: int) -> web.Response:
    """Answer a request of a client that has the key."""
    try:
        match request.method, request.path:
            case "POST", "/swerl/run":
                return await _run(box, orjson.loads(await read_body(request, _MAX_RUN_BYTES)))
            case "GET", "/swerl/file":
                return web.Response(body=await box.sandbox.read(request.query["path"]))
            case "PUT", "/swerl/file":
                data = await read_body(request, max_file_bytes)
                await box.sandbox.write(request.query["path"], data)
                return web.Response(status=204)
    except FileNotFoundError as error:
        return _failed({"missing": str(error)})
    except SandboxError as error:
        is_lost = isinstance(error, SandboxLostError)
        if is_lost:
            box.end(from_inside=error.from_inside)
        told = {"message": str(error), "hint": error.hint, "from_inside": error.from_inside}
        return _failed({**told, "lost": is_lost})
    raise Failure(Code.UNIMPLEMENTED, "the method is not allowed here", status=405)


async def _run(box: Box, asked: dict[str, Any]) -> web.Response:
    stdin = asked.pop("stdin")
    done = await box.sandbox.run(
        asked.pop("argv"), stdin=None if stdin is None else base64.b64decode(stdin), **asked
    )
    told = {
        "exit_code": done.exit_code,
        "stdout": base64.b64encode(done.stdout).decode(),
        "stderr": base64.b64encode(done.stderr).decode(),
        "timed_out": done.timed_out,
        "truncated": done.truncated,
        "duration_s": done.duration_s,
    }
    return web.Response(body=orjson.dumps(told), content_type="application/json")


def _failed(told: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(told), status=FAILED, content_type="application/json")
