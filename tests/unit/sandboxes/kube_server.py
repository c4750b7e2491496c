"""A stand-in for a Kubernetes cluster; its pods are containers of a real Docker daemon.

No API server can be had in a test. This one is written to the wire contract of `core/v1` pods
(create, get, list, watch, delete, exec and attach over WebSocket `v5.channel.k8s.io`, Status
objects). It plays the kubelet, too: an exec's status comes after all holders of its output are
gone, output before an attach is lost, and the input ends with the first attach.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import re
import ssl
import subprocess
import threading
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from swerl.core.errors import ImageError, SandboxError
from swerl.sandboxes._docker_container import remove, security_options
from swerl.sandboxes._docker_daemon import Daemon

TOKEN = "the-token-of-a-test"
_QUANTITY = {"m": 10**-3, "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_PIDS = 128
_PODS = "/api/v1/namespaces/{namespace}/pods"


@dataclass
class Running:
    """A pod and its container."""

    pod: dict[str, Any]
    container: str = ""
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class KubeServer:
    """One namespace, `swerl`, whose only node has all the images of the daemon."""

    def __init__(self, daemon: str) -> None:
        self.api = Daemon(daemon)
        self.url = ""
        self.expired = 0
        """Number of requests to refuse, as after the end of a token."""
        self.unanswered = 0
        """Number of creates whose answer is lost."""
        self.network = "none"
        self.environment = {
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
        }
        self.pods: dict[str, Running] = {}
        self.loop: asyncio.AbstractEventLoop
        self._events: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: set[web.WebSocketResponse] = set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 24)
        app.router.add_get(_PODS, self._list)
        app.router.add_post(_PODS, self._create)
        app.router.add_get(_PODS + "/{name}", self._get)
        app.router.add_delete(_PODS + "/{name}", self._delete)
        app.router.add_get(_PODS + "/{name}/{kind:exec|attach}", self._stream)
        return app

    def evict(self, name: str, message: str) -> None:
        """Evict a pod as the kubelet does."""
        asyncio.run_coroutine_threadsafe(
            self._end(self.pods[name], "Failed", "Evicted", message), self.loop
        ).result(20)

    def cut(self) -> None:
        """Cut all streams, as a proxy that restarts."""

        async def cut() -> None:
            for socket in list(self._sockets):
                socket._req.transport.close()  # type: ignore[union-attr]

        asyncio.run_coroutine_threadsafe(cut(), self.loop).result(5)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}" or self.expired:
            self.expired = max(0, self.expired - 1)
            return _status(401, "Unauthorized", "Unauthorized")
        if request.match_info.get("namespace", "swerl") != "swerl":
            return _status(
                404, "NotFound", f'namespaces "{request.match_info["namespace"]}" not found'
            )
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        name = pod["metadata"].get("name", "")
        if name in self.pods:
            return _status(409, "AlreadyExists", f'pods "{name}" already exists')
        await self._add_pod(pod)
        if self.unanswered and request.transport:
            self.unanswered -= 1
            request.transport.close()
        return web.json_response(pod, status=201)

    async def _add_pod(self, pod: dict[str, Any]) -> None:
        pod["metadata"] |= _new_facts()
        pod["status"] = {"phase": "Pending"}
        running = self.pods[pod["metadata"]["name"]] = Running(pod)
        await self._tell("ADDED", pod)
        self._spawn(self._run(running))

    async def _get(self, request: web.Request) -> web.Response:
        found = self.pods.get(request.match_info["name"])
        return web.json_response(found.pod) if found else _not_found(request)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch", "").lower() in ("1", "true"):
            return await self._watch(request)
        items = [each.pod for each in self.pods.values() if _matches(each.pod, request)]
        version = {"resourceVersion": str(len(self._events))}
        body = {"kind": "PodList", "apiVersion": "v1", "metadata": version, "items": items}
        return web.json_response(body)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        place = int(request.query.get("resourceVersion") or 0)
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(float(request.query.get("timeoutSeconds") or 60)):
                while True:
                    async with self._changed:
                        await self._changed.wait_for(lambda at=place: len(self._events) > at)
                    for event in self._events[place:]:
                        place += 1
                        if _matches(event["object"], request):
                            await answer.write(json.dumps(event).encode() + b"\n")
        return answer

    async def _delete(self, request: web.Request) -> web.Response:
        found = self.pods.get(request.match_info["name"])
        if not found:
            return _not_found(request)
        options = await request.json() if request.can_read_body else {}
        found.pod["metadata"]["deletionTimestamp"] = _now()
        await self._tell("MODIFIED", found.pod)
        if options.get("gracePeriodSeconds") == 0:
            await self._forget(found)
        self._spawn(self._kill(found))
        return web.json_response(found.pod)

    async def _run(self, running: Running) -> None:
        pod = running.pod
        [spec] = pod["spec"]["containers"]
        await self.api.connect()
        state: dict[str, Any] = {"running": {"startedAt": _now()}}
        try:
            running.container = await self.api.call(lambda client: self._make(client, pod, spec))
            await self.api.call(lambda client: client.start(running.container))
        except ImageError as error:
            detail = f'failed to pull and unpack image "{spec["image"]}": not found'
            state = {"waiting": {"reason": "ErrImagePull", "message": detail}}
            assert error
        except SandboxError as error:
            pod["status"]["phase"] = "Failed"
            ended = {"reason": "StartError", "exitCode": 128, "message": str(error)}
            state = {"terminated": ended}
        if running.gone.is_set():
            return await self._kill(running)
        if "running" in state:
            pod["status"]["phase"] = "Running"
        pod["status"]["containerStatuses"] = [{"name": spec["name"], "state": state}]
        await self._tell("MODIFIED", pod)
        if "running" in state:
            await self._supervise(running, pod["spec"].get("activeDeadlineSeconds", 1e9))

    def _make(self, client: Any, pod: dict[str, Any], spec: dict[str, Any]) -> str:
        security, limits = spec["securityContext"], spec["resources"]["limits"]
        assert security["allowPrivilegeEscalation"] is False
        profile = pod["spec"]["securityContext"]["seccompProfile"]["type"]
        assert profile == "RuntimeDefault"
        host = client.create_host_config(
            network_mode=self.network,
            cap_drop=security["capabilities"]["drop"],
            cap_add=security["capabilities"].get("add"),
            security_opt=[
                "no-new-privileges",
                *security_options(self.api.info.get("SecurityOptions") or ()),
            ],
            mem_limit=int(_amount(limits["memory"])),
            memswap_limit=int(_amount(limits["memory"])),
            nano_cpus=int(_amount(limits["cpu"]) * 1e9),
            pids_limit=_PIDS,
            log_config={"Type": "none"},
        )
        made = client.create_container(
            spec["image"],
            entrypoint=spec["command"],
            command=[],
            hostname=pod["spec"].get("hostname"),
            user=str(security["runAsUser"]) if "runAsUser" in security else None,
            environment=self.environment,
            stdin_open=spec.get("stdin", False),
            host_config=host,
        )
        return str(made["Id"])

    async def _supervise(self, running: Running, deadline_s: float) -> None:
        ends = self.loop.time() + deadline_s
        while not running.gone.is_set():
            state = (await self.api.call(lambda c: c.inspect_container(running.container)))["State"]
            if not state["Running"]:
                reason = "OOMKilled" if state["OOMKilled"] else "Error"
                reason = "Completed" if state["ExitCode"] == 0 else reason
                phase = "Failed" if state["ExitCode"] else "Succeeded"
                ended = {"reason": reason, "exitCode": state["ExitCode"]}
                running.pod["status"]["phase"] = phase
                running.pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
                return await self._tell("MODIFIED", running.pod)
            if self.loop.time() > ends:
                message = "Pod was active on the node longer than the specified deadline"
                return await self._end(running, "Failed", "DeadlineExceeded", message)
            await asyncio.sleep(0.2)

    async def _end(self, running: Running, phase: str, reason: str, message: str) -> None:
        running.pod["status"] |= {"phase": phase, "reason": reason, "message": message}
        await self._tell("MODIFIED", running.pod)
        with suppress(SandboxError):
            await self.api.call(lambda client: client.kill(running.container))

    async def _kill(self, running: Running) -> None:
        if running.container:
            with suppress(SandboxError):
                await remove(self.api, running.container)
        await self._forget(running)

    async def _forget(self, running: Running) -> None:
        if self.pods.get(running.pod["metadata"]["name"]) is running:
            running.gone.set()
            del self.pods[running.pod["metadata"]["name"]]
            await self._tell("DELETED", running.pod)

    async def _tell(self, kind: str, pod: dict[str, Any]) -> None:
        pod["metadata"]["resourceVersion"] = str(len(self._events) + 1)
        self._events.append({"type": kind, "object": copy.deepcopy(pod)})
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        found = self.pods.get(request.match_info["name"])
        if not found:
            return _not_found(request)
        if "running" not in found.pod["status"].get("containerStatuses", [{}])[0].get("state", {}):
            return _status(500, "InternalError", "container not found")
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",), max_msg_size=0)
        await socket.prepare(request)
        self._sockets.add(socket)
        wants = {key for key in ("stdin", "stdout", "stderr") if request.query.get(key) == "true"}
        number = ""
        if request.match_info["kind"] == "attach":
            params = {"stream": 1, "stdin": 1, "stdout": 1, "stderr": 1}
            stream = await self.api.stream(
                lambda client: client.attach_socket(found.container, params=params)
            )
        else:
            words = request.query.getall("command")
            made = await self.api.call(
                lambda client: client.exec_create(found.container, words, stdin="stdin" in wants)
            )
            number = made["Id"]
            stream = await self.api.stream(lambda client: client.exec_start(number, socket=True))
        feeding = asyncio.ensure_future(_feed(socket, stream))
        try:
            with suppress(ConnectionError):
                detail = b""
                while read := await stream.read():
                    data, is_stderr = read
                    detail = detail or data
                    if ("stderr" if is_stderr else "stdout") in wants:
                        await socket.send_bytes(bytes([2 if is_stderr else 1]) + data)
                await socket.send_bytes(
                    b"\3" + json.dumps(await self._result(number, detail)).encode()
                )
                await socket.close()
        finally:
            feeding.cancel()
            stream.close()
            self._sockets.discard(socket)
        return socket

    async def _result(self, number: str, detail: bytes) -> dict[str, Any]:
        code = 0
        while number:
            try:
                state = await self.api.call(lambda client: client.exec_inspect(number))
            except SandboxError:
                return {"status": "Failure", "message": "the container is gone"}
            code = state["ExitCode"] or 0
            if not state["Running"] and state["ExitCode"] is not None:
                break
            await asyncio.sleep(0.01)
        if code and detail.startswith(b"OCI runtime exec failed"):
            return {"status": "Failure", "reason": "InternalError", "message": detail.decode()}
        if not code:
            return {"kind": "Status", "metadata": {}, "status": "Success"}
        cause = {"reason": "ExitCode", "message": str(code)}
        return {
            "kind": "Status",
            "metadata": {},
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "message": f"command terminated with non-zero exit code: {code}",
            "details": {"causes": [cause]},
        }


async def _feed(socket: web.WebSocketResponse, stream: Any) -> None:
    with suppress(ConnectionError):
        async for message in socket:
            if message.type is not WSMsgType.BINARY:
                break
            if message.data[:1] == b"\0":
                await stream.send(message.data[1:])
            elif message.data[:2] == b"\xff\0":
                stream.end_input()
    stream.close()


def _amount(quantity: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity).groups()  # type: ignore[union-attr]
    return float(number) * _QUANTITY[unit]


def _matches(pod: dict[str, Any], request: web.Request) -> bool:
    wanted = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
    labels = pod["metadata"].get("labels", {})
    pairs = [part.split("=") for part in request.query.get("labelSelector", "").split(",") if part]
    return wanted in ("", pod["metadata"]["name"]) and all(
        labels.get(key.strip("=")) == value for key, value in pairs
    )


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": code}  # fmt: skip
    return web.json_response(body, status=code)


def _not_found(request: web.Request) -> web.Response:
    return _status(404, "NotFound", f'pods "{request.match_info["name"]}" not found')


def _new_facts() -> dict[str, str]:
    return {"namespace": "swerl", "uid": str(uuid.uuid4()), "creationTimestamp": _now()}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def serving(daemon: str, folder: Path) -> Iterator[tuple[KubeServer, Path]]:
    """Serve in a thread, with TLS; yield the server and a kubeconfig for it."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    new = ("req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    subprocess.run(
        ["openssl", *new, "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[KubeServer, web.AppRunner]:
        server = KubeServer(daemon)
        server.loop = loop
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        server.url = f"https://127.0.0.1:{port}"
        return server, runner

    server, runner = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield server, _write_kubeconfig(folder, server.url, certificate)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def _write_kubeconfig(folder: Path, url: str, certificate: Path) -> Path:
    """Write one whose token comes from a login program, as those of the large clouds do."""
    authority = base64.b64encode(certificate.read_bytes()).decode()
    version = "client.authentication.k8s.io/v1"
    answer = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": TOKEN}}
    plugin = folder / "login"
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    plugin.chmod(0o755)
    login = {"apiVersion": version, "command": str(plugin), "interactiveMode": "Never"}
    path = folder / "kubeconfig"
    cluster = {"server": url, "certificate-authority-data": authority}
    context = {"cluster": "test", "user": "tester", "namespace": "swerl"}
    path.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "tester", "user": {"exec": login}}],
        "contexts": [{"name": "test", "context": context}],
    }))  # fmt: skip
    return path
