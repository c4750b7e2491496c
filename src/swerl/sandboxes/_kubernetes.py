"""The Kubernetes API: logins, requests, watches, and the streams of exec and attach.

A stream is a WebSocket of the subprotocol `v5.channel.k8s.io`: the first byte of each message is
its channel. Only version 5 can close a command's standard input; Kubernetes has it since 1.30.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import ssl
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from swerl.core import secrets
from swerl.core.errors import SandboxError, SandboxUnavailableError

_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Credentials that a cluster gives to its own pods."""
_MINOR_VERSION = 30
_PROTOCOL = "v5.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_PIECE_BYTES = 1 << 15
_TIMEOUT_S = 60.0
_CONNECT_S = 20.0
_WATCH_S = 60
_HEARTBEAT_S = 20.0
"""Proxies close a connection that is silent for a minute."""
_PLUGIN_S = 60.0
_EARLY_S = 60.0
"""A token is renewed so long before its end."""
_MAX_LINE_BYTES = 1 << 23
_PAUSES_S = (0.2, 1.0, 3.0, 8.0, 15.0)
_NO_CLUSTER = "`kubectl cluster-info` must work; set sandbox.kubeconfig and sandbox.context"
_GRANT = "grant the Role of docs/guides/sandboxes.md, section Kubernetes"


class KubernetesError(SandboxError):
    """The API server refused a request; `status` is HTTP's."""

    status = 0


class Cluster:
    """One namespace of a cluster."""

    def __init__(self, kubeconfig: str, context: str, namespace: str) -> None:
        self._source = kubeconfig, context
        self._namespace = namespace
        self._login: ClusterLogin | None = None
        self._session: aiohttp.ClientSession | None = None
        self._num_users = 0
        self._has_answered = False
        self._tasks: set[asyncio.Future[Any]] = set()

    @property
    def namespace(self) -> str:
        return self._namespace or (self._login.namespace if self._login else "") or "default"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Use it. Raises SandboxUnavailableError without a cluster that can be used."""
        self._num_users += 1
        try:
            if self._login is None:
                self._login = await asyncio.to_thread(read_login, *self._source)
            if self._session is None:
                self._session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, ssl=self._login.tls or True),
                    trust_env=True,
                    read_bufsize=_MAX_LINE_BYTES,
                )
            if not self._has_answered:
                await self._require_version()
            yield
        finally:
            self._num_users -= 1
            if not self._num_users and self._session:
                session, self._session = self._session, None
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await session.close()

    async def call(
        self, method: str, path: str, *, body: object = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Make a request; repeat it while the server is busy or gone. Raises KubernetesError.

        A create may be repeated, because the caller names the object: an object of this name is
        taken as the answer to the first attempt.
        """
        is_renewed = False
        for pause_s in (*_PAUSES_S, 0.0):
            try:
                return await self._attempt(method, path, body, query or {})
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if not (pause_s and self._has_answered):
                    raise self._unreachable(error) from error
            except KubernetesError as error:
                if error.status == 401 and not is_renewed:  # its token may have expired
                    is_renewed = True
                    continue
                if not (error.retryable and pause_s) or error.status < 429:
                    raise
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
            if method == "POST" and body:
                name = body["metadata"]["name"]  # type: ignore[index]
                with suppress(KubernetesError, aiohttp.ClientError, OSError, TimeoutError):
                    return await self._attempt("GET", f"{path}/{name}", None, {})
        raise AssertionError

    async def follow(self, path: str, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield an object and each of its later states. Raises KubernetesError; 404: it is gone."""
        while True:
            found = await self.call("GET", f"{path}/{name}")
            yield found
            query = {
                "watch": "1",
                "fieldSelector": f"metadata.name={name}",
                "resourceVersion": found["metadata"]["resourceVersion"],
                "timeoutSeconds": str(_WATCH_S),
            }
            event = {}
            with suppress(aiohttp.ClientError, OSError, TimeoutError, KubernetesError):
                async with self._request("GET", path, None, query, _WATCH_S * 2) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        if event["type"] not in ("ADDED", "MODIFIED"):
                            break  # it is deleted, or the watch has expired
                        yield event["object"]
            if event.get("type") == "DELETED":
                raise refused(404, f"{name} is deleted")
            await asyncio.sleep(_PAUSES_S[0])

    async def stream(self, path: str, query: Sequence[tuple[str, str]]) -> PodStream:
        """Open the stream of an exec or attach. Raises KubernetesError.

        It is safe to repeat: nothing runs before its script is sent.
        """
        for pause_s in (*_PAUSES_S[:3], 0.0):
            try:
                return await self._open_socket(path, query)
            except aiohttp.WSServerHandshakeError as error:
                if not (pause_s and error.status in (401, 429, 502, 503, 504)):
                    raise refused(error.status, f"no stream ({error.message})") from error
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if not pause_s:
                    raise self._unreachable(error) from error
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
        raise AssertionError

    async def _open_socket(self, path: str, query: Sequence[tuple[str, str]]) -> PodStream:
        login, session = self._require_open()
        try:
            async with asyncio.timeout(_CONNECT_S):
                socket = await session.ws_connect(
                    login.url + path,
                    params=query,
                    headers=await login.headers(),
                    protocols=(_PROTOCOL,),
                    proxy=login.proxy,
                    server_hostname=login.server_name,
                    heartbeat=_HEARTBEAT_S,
                    max_msg_size=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                login.forget_token()
            raise
        if socket.protocol != _PROTOCOL:
            await socket.close()
            raise SandboxUnavailableError(
                f"a proxy before {login.url} drops the WebSocket subprotocol {_PROTOCOL}",
                hint="use an address of the API server without that proxy",
            )
        return PodStream(socket, self._tasks)

    async def _attempt(
        self, method: str, path: str, body: object, query: Mapping[str, str]
    ) -> dict[str, Any]:
        async with self._request(method, path, body, query, _TIMEOUT_S) as answer:
            self._has_answered = True
            found: dict[str, Any] = await answer.json(content_type=None)
            return found

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: object, query: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        login, session = self._require_open()
        async with session.request(
            method,
            login.url + path,
            json=body,
            params=query,
            headers=await login.headers(),
            proxy=login.proxy,
            server_hostname=login.server_name,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
        ) as answer:
            if answer.status >= 400:
                text = await answer.text(errors="replace")
                with suppress(ValueError, KeyError, TypeError):
                    text = json.loads(text)["message"]
                if answer.status == 401:
                    login.forget_token()
                raise refused(answer.status, text)
            yield answer

    async def _require_version(self) -> None:
        version = await self.call("GET", "/version")
        minor = "".join(filter(str.isdigit, str(version.get("minor", "0"))))
        if version.get("major") == "1" and int(minor or 0) < _MINOR_VERSION:
            raise SandboxUnavailableError(
                f"the cluster has Kubernetes {version.get('gitVersion')}",
                hint=f"1.{_MINOR_VERSION} or newer is needed: older ones cannot close the input "
                "of a command",
            )

    def _require_open(self) -> tuple[ClusterLogin, aiohttp.ClientSession]:
        if not (self._login and self._session):
            raise KubernetesError("the connection to the cluster is closed")
        return self._login, self._session

    def _unreachable(self, error: Exception) -> SandboxUnavailableError:
        url = self._login.url if self._login else ""
        detail = str(error) or type(error).__name__
        return SandboxUnavailableError(
            f"no Kubernetes API server answers at {url}: {detail}", hint=_NO_CLUSTER
        )


def refused(status: int, detail: str) -> KubernetesError:
    """Return the error of an answer with this status, with a remedy."""
    low, hint = detail.lower(), "`kubectl describe` and the API server's log have details"
    if "exceeded quota" in low:
        hint = "open fewer sandboxes (rollout.concurrency), or raise the namespace's ResourceQuota"
    elif "podsecurity" in low:
        hint = "the namespace must permit the level `baseline` of Pod Security"
    elif status == 401:
        hint = "log in again; `kubectl auth whoami` must work"
    elif status == 403:
        hint = _GRANT
    elif "namespaces" in low and status == 404:
        hint = "create it (`kubectl create namespace NAME`), or set sandbox.namespace"
    retryable = status in (429, 500, 502, 503, 504) or "exceeded quota" in low
    error = KubernetesError(
        f"kubernetes answers {status}: {detail.strip()[:400]}", hint=hint, retryable=retryable
    )
    error.status = status
    return error


class PodStream:
    """An ExecStream of a pod."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, tasks: set[asyncio.Future[Any]]
    ) -> None:
        self._socket = socket
        self._tasks = tasks
        self.status: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """The Status object of the program's end; empty if the stream broke before."""

    async def read(self) -> tuple[bytes, bool] | None:
        while True:
            message = await self._socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                self._end({})
                return None
            channel, data = message.data[:1], message.data[1:]
            if data and channel[0] in (_STDOUT, _STDERR):
                return data, channel[0] == _STDERR
            if data and channel[0] == _ERROR:
                with suppress(ValueError):
                    self._end(json.loads(data))

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            await self._socket.send_bytes(bytes([_STDIN]) + piece)

    def end_input(self) -> None:
        self._in_background(self._socket.send_bytes(bytes([_CLOSE, _STDIN])))

    def close(self) -> None:
        self._end({})
        self._in_background(self._socket.close())

    def _end(self, status: dict[str, Any]) -> None:
        if not self.status.done():
            self.status.set_result(status)

    def _in_background(self, work: Any) -> None:
        async def quietly() -> None:
            with suppress(OSError, aiohttp.ClientError):
                await work

        task = asyncio.ensure_future(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(slots=True)
class ClusterLogin:
    """A cluster's address, and the proof of this user's identity."""

    url: str
    namespace: str
    user: Mapping[str, Any]
    """Entry `user` of a kubeconfig."""
    folder: Path
    """Folder that relative paths of the entry start from."""
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    proxy: str | None = None
    _token: str = field(default="", repr=False)
    _renew_at: float = 0.0

    async def headers(self) -> dict[str, str]:
        """Return the headers of a request. Raises SandboxUnavailableError."""
        if self.user.get("username"):
            pair = f"{self.user['username']}:{self.user.get('password', '')}"
            return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
        if time.time() >= self._renew_at:
            await self._renew()
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def forget_token(self) -> None:
        self._renew_at = 0.0

    async def _renew(self) -> None:
        self._renew_at = float("inf")
        if path := self.user.get("tokenFile"):  # the kubelet replaces it every hour
            try:
                self._token = (self.folder / path).read_text().strip()
            except OSError as error:
                raise _no_login(f"cannot read the token in {path}: {error.strerror}") from error
            self._renew_at = time.time() + _EARLY_S
        elif plugin := self.user.get("exec"):
            await self._ask(plugin)
        else:
            self._token = self.user.get("token") or ""

    async def _ask(self, plugin: Mapping[str, Any]) -> None:
        """Get a token or certificate from the program that the kubeconfig names."""
        version = plugin.get("apiVersion", "client.authentication.k8s.io/v1")
        request = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
        variables = {each["name"]: each["value"] for each in plugin.get("env") or ()}
        command = str(plugin.get("command"))
        if "/" in command:
            command = str(self.folder / command)
        try:
            process = await asyncio.create_subprocess_exec(
                *(command, *map(str, plugin.get("args") or ())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=secrets.child_environment(
                    KUBERNETES_EXEC_INFO=json.dumps(request), **variables
                ),
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(), _PLUGIN_S)
            except TimeoutError:
                process.kill()
                raise
            if process.returncode:
                raise OSError(err.decode(errors="replace").strip()[-300:])
            status = json.loads(out)["status"]
        except (OSError, TimeoutError, ValueError, KeyError) as error:
            detail = str(error) or f"no answer in {_PLUGIN_S:g} s"
            raise _no_login(f"the login program {command} fails: {detail}") from error
        self._token = status.get("token") or ""
        if status.get("clientCertificateData") and self.tls:
            _load_certificate(self.tls, status["clientCertificateData"], status["clientKeyData"])
        if until := status.get("expirationTimestamp"):
            self._renew_at = datetime.fromisoformat(until).timestamp() - _EARLY_S


def read_login(kubeconfig: str, context: str) -> ClusterLogin:
    """Find the cluster as kubectl does; inside a pod, the pod's own.

    Raises SandboxUnavailableError if there is none.
    """
    named = kubeconfig or secrets.secret("KUBECONFIG") or ""
    paths = [Path(part).expanduser() for part in named.split(":") if part]
    paths = paths or [Path.home() / ".kube" / "config"]
    found = [path for path in paths if path.exists()]
    if found:
        return _from_kubeconfig(found, context)
    host = secrets.secret("KUBERNETES_SERVICE_HOST")
    if named or not (host and (_IN_POD / "token").exists()):
        raise _no_login(f"there is no kubeconfig {named or paths[0]}")
    host = f"[{host}]" if ":" in host else host
    return ClusterLogin(
        url=f"https://{host}:{secrets.secret('KUBERNETES_SERVICE_PORT') or 443}",
        namespace=(_IN_POD / "namespace").read_text().strip(),
        user={"tokenFile": "token"},
        folder=_IN_POD,
        tls=ssl.create_default_context(cafile=str(_IN_POD / "ca.crt")),
    )


def _from_kubeconfig(paths: Sequence[Path], context: str) -> ClusterLogin:
    try:
        import yaml
    except ImportError as error:
        raise SandboxUnavailableError(
            "the package `pyyaml` is not installed", hint="pip install 'swerl[kubernetes]'"
        ) from error
    entries: dict[tuple[str, str], tuple[dict[str, Any], Path]] = {}
    try:
        for path in paths:
            text = yaml.safe_load(path.read_text()) or {}
            context = context or text.get("current-context") or ""
            for kind in ("context", "cluster", "user"):
                for each in text.get(f"{kind}s") or ():
                    entries.setdefault((kind, each["name"]), (each.get(kind) or {}, path.parent))
        chosen = entries["context", context][0]
        cluster, folder = entries["cluster", chosen["cluster"]]
        user, user_folder = entries.get(("user", chosen.get("user") or ""), ({}, folder))
        return ClusterLogin(
            url=cluster["server"].rstrip("/"),
            namespace=chosen.get("namespace") or "",
            user=user,
            folder=user_folder,
            tls=_tls(cluster, folder, user, user_folder),
            server_name=cluster.get("tls-server-name"),
            proxy=cluster.get("proxy-url"),
        )
    except KeyError as error:
        problem = f"no entry {error.args[0]!r}; its context is {context!r}"
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        problem = str(error)
    raise _no_login(f"the kubeconfig {paths[0]} cannot be used: {problem}")


def _tls(
    cluster: Mapping[str, Any], folder: Path, user: Mapping[str, Any], user_folder: Path
) -> ssl.SSLContext:
    text, path = cluster.get("certificate-authority-data"), cluster.get("certificate-authority")
    tls = ssl.create_default_context(
        cafile=str(folder / path) if path and not text else None,
        cadata=base64.b64decode(text).decode() if text else None,
    )
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE

    def read(key: str) -> str:
        if data := user.get(f"{key}-data"):
            return base64.b64decode(data).decode()
        return (user_folder / user[key]).read_text() if user.get(key) else ""

    if certificate := read("client-certificate"):
        _load_certificate(tls, certificate, read("client-key"))
    return tls


def _load_certificate(tls: ssl.SSLContext, certificate: str, key: str) -> None:
    with _private_file(f"{certificate}\n{key}") as path:  # the ssl module reads files only
        tls.load_cert_chain(path)


@contextmanager
def _private_file(text: str) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text)
        file.flush()
        yield file.name


def _no_login(message: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(message, hint=_NO_CLUSTER)
