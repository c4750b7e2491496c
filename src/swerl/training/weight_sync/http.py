"""Calls from the trainer's first rank to engine servers: several at once, none without an end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from swerl.core.chat import Json


class CallError(Exception):
    """A server refused a call; or it is gone: it did not answer."""

    def __init__(self, message: str, *, gone: bool) -> None:
        super().__init__(message)
        self.gone = gone


class Caller:
    """Posts to servers from threads of its own; a call ends after `timeout_s`."""

    def __init__(self, num_servers: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(max_workers=max(num_servers, 1))

    def start(self, url: str, path: str, body: Mapping[str, Json]) -> Future[None]:
        """Begin a call; the future fails with CallError."""
        return self._threads.submit(_post, url + path, body, self.timeout_s)

    def close(self) -> None:
        """Let calls that are under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def failures(calls: Mapping[str, Future[None]]) -> dict[str, CallError]:
    """Wait for all calls, by URL; return what went wrong, by URL."""
    found = {}
    for url, call in calls.items():
        error = call.exception()
        if isinstance(error, CallError):
            found[url] = error
        elif error is not None:
            raise error
    return found


def _post(url: str, body: Mapping[str, Json], timeout_s: float) -> None:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    # Engines are never behind a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data, headers)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            response.read()
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise CallError(f"{url} answered {error.code}: {said}", gone=False) from error
    except (OSError, TimeoutError) as error:
        raise CallError(f"{url} did not answer: {error}", gone=True) from error


def addresses(urls: Sequence[str]) -> list[tuple[str, int]]:
    """Return host and port of each URL."""
    split = [url.rpartition("//")[2].partition("/")[0].rpartition(":") for url in urls]
    return [(host, int(port)) for host, _, port in split]
