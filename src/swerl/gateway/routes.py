"""Routes: which dialect and operation a path belongs to, over every dialect that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from swerl.core import plugins
from swerl.core.contracts import Dialect

MODELS = "/v1/models"


@dataclass(frozen=True, slots=True)
class Route:
    """What is done at a path."""

    dialect: Dialect
    operation: str


class Routes:
    """The paths of every dialect."""

    def __init__(self) -> None:
        dialects = [plugins.load("dialects", name).build() for name in plugins.names("dialects")]
        self._fallback: Dialect = dialects[0]
        self._routes: dict[str, Route] = {}
        for dialect in dialects:
            for path, operation in dialect.routes.items():
                self._routes.setdefault(path, Route(dialect, operation))

    def find(self, path: str) -> Route | None:
        """Return the route of a path without a slash at its end."""
        return self._routes.get(path) or self._model(path)

    def dialect(self, path: str) -> Dialect:
        """Return in whose shape a path is answered: its own, or that of the nearest above it."""
        while path:
            if route := self.find(path):
                return route.dialect
            path = path.rpartition("/")[0]
        return self._fallback

    def key(self, target: str, headers: Mapping[str, str]) -> str | None:
        """Return the session key that a request for this target carries."""
        try:
            path = urlsplit(target).path.rstrip("/")
        except ValueError:  # no URL: whoever serves it refuses it
            return None
        return self.dialect(path).session_key(headers)

    def _model(self, path: str) -> Route | None:
        """Return the route of one model's page; the model answers to any name in a request too."""
        name = path.removeprefix(MODELS + "/")
        is_name = name not in (path, "") and ".." not in name.split("/")
        return self._routes.get(MODELS) if is_name else None
