"""A server inside a sandbox answers under the sandbox's own host name."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from e2b import Sandbox

from .helpers import Service, eventually

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        if self.path.startswith("/raw/"):
            self.wfile.write(b"HTTP/1.1 " + self.path[5:].encode() + b" X\\r\\n\\r\\n")
            self.wfile.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 6\\r\\n\\r\\nforged")
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        shown = {"method": self.command, "path": self.path, "body": body.decode(),
                 "headers": dict(self.headers)}
        data = json.dumps(shown).encode()
        self.send_response(207, "Hm")
        self.send_header("X-From", "inside")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    do_GET = do_POST = do_DELETE = do_HEAD = answer
http.server.ThreadingHTTPServer(("127.0.0.1", 8123), Handler).serve_forever()
"""


@pytest.fixture
def client(service: Service, sandbox: Sandbox) -> Iterator[httpx.Client]:
    """A client of a server that runs inside."""
    sandbox.files.write("/tmp/server.py", SERVER)
    sandbox.commands.run("python3 /tmp/server.py", background=True, timeout=0)
    headers = {
        "Host": sandbox.get_host(8123),
        "E2b-Traffic-Access-Token": sandbox.traffic_access_token or "",
    }
    with service.client(**headers) as http:
        eventually(lambda: http.get("/").status_code == 207)
        yield http


def test_requests_and_answers_pass_both_ways(client: httpx.Client) -> None:
    answer = client.post("/a%20b?c=d", content="hello", headers={"X-Own": "1"})
    told = answer.json()
    assert (answer.status_code, answer.headers["X-From"]) == (207, "inside")
    assert (told["method"], told["path"], told["body"]) == ("POST", "/a%20b?c=d", "hello")
    assert told["headers"]["X-Own"] == "1"
    assert client.delete("/x").json()["method"] == "DELETE"


def test_the_tokens_stay_outside(client: httpx.Client, sandbox: Sandbox) -> None:
    answer = client.get("/", headers={"X-Access-Token": sandbox._envd_access_token or ""})
    assert sandbox._envd_access_token not in answer.text


@pytest.mark.parametrize(("method", "status"), [("GET", 204), ("GET", 304), ("HEAD", 200)])
def test_a_server_inside_answers_no_later_request(
    client: httpx.Client, method: str, status: int
) -> None:
    """Its bytes after an answer that has no body would be read as the next answer."""
    answer = client.request(method, f"/raw/{status}")
    assert (answer.status_code, answer.text) == (status, "")
    assert answer.headers["Connection"] == "close"
    assert client.get("/next").json()["path"] == "/next"


def test_a_port_that_nobody_serves_is_told(client: httpx.Client, sandbox: Sandbox) -> None:
    answer = client.get("/", headers={"Host": sandbox.get_host(8124)})
    assert answer.status_code == 502
    assert "port is not open" in answer.json()["message"]
