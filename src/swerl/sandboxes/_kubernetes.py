"""One namespace of a Kubernetes cluster: requests, watches, and the streams of exec and attach.

`kubernetes-asyncio` logs in, makes requests and watches. Its streams cannot close a command's
input, which takes the subprotocol `v5.channel.k8s.io` of Kubernetes 1.30: the first byte of each
WebSocket message is its channel, and 255 closes one.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from swerl.core import secrets
from swerl.core.errors import SandboxError, SandboxUnavailableError, install_command

T = TypeVar("T")
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Credentials that a cluster gives to its own pods."""
_PROTOCOL = "v5.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_PIECE_BYTES = 1 << 15
_TIMEOUT_S = 60.0
_CONNECT_S = 20.0
_WATCH_S = 60
_HEARTBEAT_S = 20.0
"""Proxies close a connection that is silent for a minute."""
_BUSY = (429, 500, 502, 503, 504)
_PAUSES_S = (0.2, 1.0, 3.0, 8.0, 15.0)
_NO_CLUSTER = "`kubectl cluster-info` must work; set sandbox.kubeconfig"
_HINTS = {
    "exceeded quota": "open fewer sandboxes (rollout.concurrency), or raise the ResourceQuota",
    "podsecurity": "the namespace must permit the level `baseline` of Pod Security",
    "answers 401": "log in again; `kubectl auth whoami` must work",
    "answers 403": "grant the Role of docs/guides/sandboxes-kubernetes.md",
    "namespaces": "create it (`kubectl create namespace NAME`), or set sandbox.namespace",
}
"""Words of a refusal -> remedy."""


class KubernetesError(SandboxError):
    """The API server refused a request; `status` is HTTP's."""

    status = 0


class Cluster:
    """One namespace of a cluster. It logs in as kubectl does; inside a pod, as that pod."""

    def __init__(self, kubeconfig: str, namespace: str) -> None:
        self._kubeconfig = kubeconfig
        self.namespace = namespace
        self.has_answered = False
        self._configuration: Any = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Session]:
        """Open connections. Raises SandboxUnavailableError without a cluster that can be used."""
        try:
            from kubernetes_asyncio.client import ApiClient, Configuration
        except ImportError as error:
            raise SandboxUnavailableError(
                "the package `kubernetes-asyncio` is not installed",
                hint=install_command("kubernetes"),
            ) from error
        if self._configuration is None:
            configuration = Configuration()
            configuration.connection_pool_maxsize = 0
            await self.log_in(configuration)
            self._configuration = configuration
        async with ApiClient(self._configuration) as client:
            session = Session(self, client)
            yield session
            await session.finish()

    async def log_in(self, configuration: Any) -> None:
        """Write address and login into a configuration. Raises SandboxUnavailableError."""
        from kubernetes_asyncio import config

        paths = self._kubeconfig or secrets.secret("KUBECONFIG") or "~/.kube/config"
        has_file = any(Path(path).expanduser().exists() for path in paths.split(":") if path)
        try:
            if has_file:
                loader = await config.load_kube_config(
                    paths, client_configuration=configuration, persist_config=False
                )
                current = (loader.current_context or {}).get("context") or {}
                self.namespace = self.namespace or current.get("namespace") or "default"
            elif self._kubeconfig or not (_IN_POD / "token").exists():
                raise _no_login(f"there is no kubeconfig {paths}")
            else:
                config.load_incluster_config(  # type: ignore[no-untyped-call]
                    configuration,
                    token_filename=str(_IN_POD / "token"),
                    cert_filename=str(_IN_POD / "ca.crt"),
                )
                self.namespace = self.namespace or (_IN_POD / "namespace").read_text().strip()
        except SandboxUnavailableError:
            raise
        except Exception as error:  # a damaged file may raise anything there
            raise _no_login(f"the login of {paths} cannot be used: {error}") from error


class Session:
    """Connections to the API server of a cluster."""

    def __init__(self, cluster: Cluster, client: Any) -> None:
        self._cluster = cluster
        self._client = client
        self._tasks: set[asyncio.Future[Any]] = set()

    @property
    def pods(self) -> str:
        """Path of the namespace's pods."""
        return f"/api/v1/namespaces/{self._cluster.namespace}/pods"

    async def call(
        self, method: str, path: str, *, body: Any = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Make a request; repeat it while the server is busy. Raises KubernetesError."""
        attempts = count()

        async def attempt() -> dict[str, Any]:
            if next(attempts) and method == "POST":  # the answer to a create may be lost
                created = f"{path}/{body['metadata']['name']}"
                with suppress(KubernetesError, aiohttp.ClientError, OSError, TimeoutError):
                    return await self._attempt("GET", created, None, {})
            return await self._attempt(method, path, body, query or {})

        return await self._patiently(attempt)

    async def follow(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a pod and each of its later states. Raises KubernetesError; 404: it is gone."""
        from kubernetes_asyncio.client import ApiException, CoreV1Api
        from kubernetes_asyncio.watch import Watch

        api = CoreV1Api(self._client)
        while True:
            pod = await self.call("GET", f"{self.pods}/{name}")
            yield pod
            watch = Watch(return_type="object").stream(
                api.list_namespaced_pod,
                self._cluster.namespace,
                field_selector=f"metadata.name={name}",
                resource_version=pod["metadata"]["resourceVersion"],
                timeout_seconds=_WATCH_S,
            )
            # A watch that breaks or expires is opened again.
            with suppress(ApiException, aiohttp.ClientError, OSError, TimeoutError):
                async with watch as events:
                    async for event in events:
                        if event["type"] == "DELETED":
                            raise refused(404, f"{name} is deleted")
                        yield event["raw_object"]
            await asyncio.sleep(_PAUSES_S[0])

    async def stream(self, path: str, query: Sequence[tuple[str, str]]) -> PodStream:
        """Open the stream of an exec or attach. Raises KubernetesError.

        It is safe to repeat: nothing runs before its script is sent.
        """
        return await self._patiently(lambda: self._open_socket(path, query))

    async def finish(self) -> None:
        """Wait for what was sent last."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt while the server is busy, and once after a new login."""
        is_renewed = False
        for pause_s in (*_PAUSES_S, 0.0):
            try:
                answer = await attempt()
                self._cluster.has_answered = True
                return answer
            except KubernetesError as error:
                if error.status == 401 and pause_s and not is_renewed:  # its token may have expired
                    is_renewed = True
                    await self._cluster.log_in(self._client.configuration)
                    continue
                if error.status not in _BUSY or not pause_s:
                    raise
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if not (pause_s and self._cluster.has_answered):
                    raise self._unreachable(error) from error
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
        raise AssertionError

    async def _attempt(
        self, method: str, path: str, body: Any, query: Mapping[str, str]
    ) -> dict[str, Any]:
        from kubernetes_asyncio.client import ApiException

        try:
            answer = await self._client.rest_client.request(
                method,
                self._client.configuration.host + path,
                query_params=query,
                headers=await self._headers(),
                body=body,
                _request_timeout=_TIMEOUT_S,
            )
        except ApiException as error:
            text = bytes(error.body or b"").decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["message"]
            raise refused(error.status, text) from error
        content: dict[str, Any] = json.loads(answer.data)
        return content

    async def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        return headers

    async def _open_socket(self, path: str, query: Sequence[tuple[str, str]]) -> PodStream:
        configuration, rest = self._client.configuration, self._client.rest_client
        try:
            async with asyncio.timeout(_CONNECT_S):
                socket = await rest.pool_manager.ws_connect(
                    configuration.host + path,
                    params=query,
                    headers=await self._headers(),
                    protocols=(_PROTOCOL,),
                    proxy=configuration.proxy,
                    server_hostname=configuration.tls_server_name,
                    heartbeat=_HEARTBEAT_S,
                    max_msg_size=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
        except aiohttp.WSServerHandshakeError as error:
            raise refused(error.status, f"no stream ({error.message})") from error
        if socket.protocol != _PROTOCOL:
            await socket.close()
            raise SandboxUnavailableError(
                f"{configuration.host} does not speak the subprotocol {_PROTOCOL}",
                hint="Kubernetes 1.30 or newer is needed, without a proxy that drops it",
            )
        return PodStream(socket, self._tasks)

    def _unreachable(self, error: Exception) -> SandboxUnavailableError:
        detail = str(error) or type(error).__name__
        url = self._client.configuration.host
        message = f"no Kubernetes API server answers at {url}: {detail}"
        return SandboxUnavailableError(message, hint=_NO_CLUSTER)


def refused(status: int, detail: str) -> KubernetesError:
    """Return the error of an answer with this status, with a remedy."""
    message = f"kubernetes answers {status}: {detail.strip()[:400]}"
    low = message.lower()
    hint = next((hint for words, hint in _HINTS.items() if words in low), "")
    error = KubernetesError(
        message,
        hint=hint or "`kubectl describe` and the API server's log have details",
        retryable=status in _BUSY or "exceeded quota" in low,
    )
    error.status = status
    return error


def _no_login(message: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(message, hint=_NO_CLUSTER)


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
