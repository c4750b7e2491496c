"""A fake of the Hugging Face hub on this machine: one dataset or model, by the hub's contract.

It answers what `huggingface_hub` and `datasets` ask when a dataset is streamed or a model fetched:
the repository's description at a commit, the tree of its files, facts about paths, and files by
range. It takes commits of one user; large files come by LFS, as the client asks it which do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from swerl.core.chat import Json

COMMIT = "c0ffee" * 6 + "c0ff"
_API = re.compile(
    r"/api/(?:datasets|models)/([\w.-]+/[\w.-]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$"
)
_FILE = re.compile(r"(?:/datasets)?/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)$")


class Hub(ThreadingHTTPServer):
    """Serves one repository; `asked` lists the requests, `created` the new repositories."""

    def __init__(self, repo_id: str, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo_id = repo_id
        self.files = dict(files)
        self.objects: dict[str, bytes] = {}
        self.created: list[dict[str, object]] = []
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def entry(self, path: str) -> dict[str, Json]:
        return {"type": "file", "path": path, "size": len(self.files[path]), "oid": "0" * 40}

    def info(self) -> dict[str, Json]:
        siblings: list[Json] = [{"rfilename": path} for path in self.files]
        return {"id": self.repo_id, "sha": COMMIT, "siblings": siblings, "tags": [],
                "private": False, "gated": False, "disabled": False, "downloads": 0}  # fmt: skip

    def tree(self, folder: str, recursive: bool) -> list[Json]:
        prefix = f"{folder}/" if folder else ""
        found: dict[str, Json] = {}
        for path in self.files:
            if path.startswith(prefix):
                rest = path.removeprefix(prefix).split("/")
                if len(rest) == 1 or recursive:
                    found[path] = self.entry(path)
                if len(rest) > 1:
                    name = prefix + rest[0]
                    found.setdefault(
                        name, {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
                    )
        return list(found.values())


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        path = unquote(url.path)
        if (match := _API.match(path)) and match[1] == self.server.repo_id:
            return self._api(
                match[2] or "revision", match[4] or "", "recursive=true" in url.query.lower()
            )
        if (match := _FILE.match(path)) and match[1] == self.server.repo_id:
            return self._file(match[3])
        return self._missing("RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.asked.append(f"POST {self.path}")
        path, body = urlsplit(self.path).path, self._body()
        match = _API.match(unquote(path))
        if match and match[2] == "paths-info" and match[1] == self.server.repo_id:
            text, known = body.decode(), self.server.files
            paths = json.loads(text)["paths"] if text.startswith("{") else _form(text)
            return self._json([self.server.entry(path) for path in paths if path in known])
        if match:
            return self._missing("RepoNotFound")
        if self.headers.get("authorization") != "Bearer hf_writer":
            error = b'{"error": "Invalid credentials in Authorization header"}'
            return self._send(401, error, "application/json", {})
        if path.endswith("/commit/main"):
            return self._json(self._commit(path, body))
        return self._json(self._before_a_commit(path, json.loads(body)))

    def do_PUT(self) -> None:
        oid, body = self.path.rpartition("/")[2], self._body()
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        self._json({})

    def _before_a_commit(self, path: str, asked: Any) -> dict[str, object]:
        if path == "/api/repos/create":
            self.server.created.append(asked)
            kind = "datasets/" * (asked["type"] == "dataset")
            name = f"{asked['organization']}/{asked['name']}"
            return {"url": f"{self.server.url}/{kind}{name}", "name": name}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            names = [file["path"] for file in asked["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            files = [
                {"path": name, "shouldIgnore": False, "uploadMode": mode}
                for name, mode in modes.items()
            ]
            return {"files": files}
        assert path.endswith(".git/info/lfs/objects/batch")
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.server.url}/lfs/{each['oid']}"}}}
            for each in asked["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _commit(self, path: str, body: bytes) -> dict[str, object]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.objects[value["oid"]]
        name = path.removeprefix("/api/").removesuffix("/commit/main").removeprefix("models/")
        url = f"{self.server.url}/{name}/commit/{COMMIT}"
        return {"success": True, "commitOid": COMMIT, "commitUrl": url}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _api(self, kind: str, folder: str, recursive: bool) -> None:
        if kind == "revision":
            return self._json(self.server.info())
        found = self.server.tree(folder, recursive)
        return self._json(found) if found else self._missing("EntryNotFound")

    def _file(self, path: str) -> None:
        if path not in self.server.files:
            return self._missing("EntryNotFound")
        data = self.server.files[path]
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        start = int(match[1]) if match else 0
        end = min(int(match[2]) + 1 if match and match[2] else len(data), len(data))
        # The client's cache stores a file by its etag.
        etag = hashlib.sha1(data).hexdigest()
        extra = {"etag": f'"{etag}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
        if match:
            extra["content-range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return self._send(206 if match else 200, data[start:end], "application/octet-stream", extra)

    def _missing(self, code: str) -> None:
        self._send(404, b"{}", "application/json", {"x-error-code": code})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), "application/json", {"x-repo-commit": COMMIT})

    def _send(self, status: int, data: bytes, kind: str, extra: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        for name, value in extra.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _form(body: str) -> list[str]:
    pairs = (pair.split("=", 1) for pair in body.split("&"))
    return [unquote(value) for name, value in pairs if name == "paths"]


@contextmanager
def serve(repo_id: str, files: Mapping[str, bytes]) -> Iterator[Hub]:
    """Serve a repository until the context ends."""
    with Hub(repo_id, files) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()
