"""The backend that the tests of `e2b` use."""

from __future__ import annotations

from swerl.sandboxes import e2b


def backend(url: str, **settings: object) -> e2b.E2BBackend:
    """Build a backend for the server at `url`."""
    options = {"api_url": url, "sandbox_url": url, "creates_per_s": 1000, **settings}
    return e2b.build(e2b.Options(**options))  # type: ignore[arg-type]
