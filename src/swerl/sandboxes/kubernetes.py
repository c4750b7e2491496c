"""The `kubernetes` sandbox: a pod of a cluster for each sandbox, without privileges or a token.

The pod's first process reads from the controller's attach stream, so it ends with the controller.
Commands are started by exec; their words and their environment travel over standard input, because
an exec request carries neither an environment nor long arguments, and servers log its URL.

A NetworkPolicy of the cluster's owner keeps pods from the network. The first pod tries to reach the
API server: if it can, no sandbox is opened.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from swerl.core.errors import ImageError, SandboxError, SandboxUnavailableError
from swerl.core.sandbox import CappedOutput, Limits, LiveSandbox, Mount, new_name
from swerl.sandboxes import _machine_scripts as scripts
from swerl.sandboxes._kubernetes import Cluster, KubernetesError, PodStream, Session
from swerl.sandboxes._machine import (
    NAME,
    ExecRequest,
    MachineSandbox,
    SignallerReady,
    WaitForExit,
    labels,
)
from swerl.sandboxes._packed import packed_folder

_LABELS = {"app.kubernetes.io/managed-by": "swerl"}
_KEEP = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
         "karpenter.sh/do-not-disrupt": "true"}  # fmt: skip
"""Annotations that keep autoscalers from emptying the pod's node."""
_OWN_KEYS = {"containers", "restartPolicy", "automountServiceAccountToken", "hostNetwork",
             "hostPID", "hostIPC", "shareProcessNamespace", "activeDeadlineSeconds"}  # fmt: skip
_POD_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NOT_FOUND, _CONFLICT = 404, 409
_BOOT_TIMEOUT_S = 600.0
"""Time until a pod must run: it may wait for a node and for the pull of a large image."""
_CLOCK_SLACK_S = 5
_CAUSE_S = 5.0
"""Time after a broken stream in which the cluster may report the pod's end."""
_REMOVAL_S = 30.0
_STATUS_S = 0.3
"""Time after the end of a command's output in which the kubelet may report its exit code. It does
not before every process that the command left has closed its output."""
_RUN_S = 30.0
_COPY_S = 600.0
_FILE_BLOCK = 512
_DETAIL_BYTES = 4096
_CROWDED = ("temporarily unavailable", "cannot allocate memory", "cannot fork", "no space left")
_PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_TRANSIENT = re.compile(r"many ?requests|time(d )?out|refused|reset|unavailable|\beof\b", re.I)
_PULL_HINT = (
    "check the name and that the nodes reach the registry; a private registry, or one that limits "
    "pulls, needs imagePullSecrets in sandbox.pod"
)

_HIDE = (
    "unset KUBERNETES_SERVICE_HOST KUBERNETES_SERVICE_PORT KUBERNETES_SERVICE_PORT_HTTPS "
    "KUBERNETES_PORT KUBERNETES_PORT_443_TCP KUBERNETES_PORT_443_TCP_ADDR "
    "KUBERNETES_PORT_443_TCP_PORT KUBERNETES_PORT_443_TCP_PROTO\n"
)
_ENTER = """
user=$1; shift
group=$(id -g -- "$user" 2>/dev/null) || group=$user
exec setpriv --reuid "$user" --regid "$group" --clear-groups --inh-caps=-all \\
    --bounding-set=-all -- "$@"
"""
"""Runs a command as a user without capabilities. Arguments: user, command."""
_FIRST = _HIDE + 'read -r _ && exec /bin/sh -c "$1" swerl "$@"'
"""Runs `scripts.FIRST` once a controller is attached: output before that would be lost."""
_LOAD = """
text=
while IFS= read -r line; do
    [ "$line" != "$1" ] || { eval "$text"; exit; }
    text="$text$line
"
done
"""
"""Runs the script in its standard input up to the line that is its argument."""
_MAKE_WORKDIR = 'mkdir -p -- "$1" && { [ "$(id -u)" = "${2%:*}" ] || chown -- "$2" "$1"; }'
_UNPACK = 'mkdir -p -- "$1" && tar -xzf - -C "$1" --no-same-owner && chmod -R a+rX,a-w -- "$1"'
_REACHED, _NO_BASH = 7, 8
_PROBE = f"""
[ -n "$KUBERNETES_SERVICE_HOST" ] || exit 0
command -v bash >/dev/null && command -v timeout >/dev/null || exit {_NO_BASH}
timeout 2 bash -c ': <"/dev/tcp/$KUBERNETES_SERVICE_HOST/$KUBERNETES_SERVICE_PORT"' 2>/dev/null &&
exit {_REACHED}
exit 0
"""


class Options(BaseModel):
    """Settings of the `kubernetes` sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kubeconfig: str = ""
    """File with the cluster and the login. Empty: KUBECONFIG, ~/.kube/config, or inside a pod its
    service account."""
    namespace: str = ""
    """Namespace of the pods; empty: that of the current context, else `default`."""
    user: str = ""
    """Ordinary user of the sandboxes, by name or number, for images that have one. Empty: the
    image's own user, who must then be root. A user needs `setpriv` in the image."""
    pod: dict[str, Any] = {}
    """Additional fields of the pod's spec, such as {hostUsers = false}, imagePullSecrets,
    nodeSelector, tolerations or runtimeClassName. gVisor of 2022 lacks /proc/PID/limits, which
    swerl needs; later ones are untested."""

    @field_validator("pod")
    @classmethod
    def _check_pod(cls, pod: dict[str, Any]) -> dict[str, Any]:
        if refused := sorted(_OWN_KEYS & pod.keys()):
            raise ValueError(f"swerl sets {', '.join(refused)} itself: leave it out")
        return pod


def build(options: Options) -> KubernetesBackend:
    """Return the backend. It connects to the cluster when the first sandbox is opened."""
    return KubernetesBackend(options)


class KubernetesBackend:
    """Makes pods in one namespace."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._cluster = Cluster(options.kubeconfig, options.namespace)
        self._is_closed = False

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[PodSandbox]:
        if not image or image == "host" or image.startswith(("dir:", "built:", "snapshot:")):
            raise ImageError(
                f"image {image!r} is not in a registry",
                hint="name an image that the cluster's nodes can pull",
            )
        async with self._cluster.opened() as session:
            sandbox = PodSandbox(session, self._options, name or new_name(), limits, workdir)
            try:
                await sandbox.boot(image, mounts)
                if not self._is_closed:
                    await sandbox.require_closed()
                    self._is_closed = True
                yield sandbox
            finally:
                has_failed = sys.exception() is not None
                try:
                    await asyncio.shield(sandbox.close())
                except SandboxUnavailableError:  # the error that ends the block explains more
                    if not has_failed:
                        raise

    async def live(self) -> Sequence[LiveSandbox]:
        query = {"labelSelector": ",".join(f"{key}={word}" for key, word in _LABELS.items())}
        async with self._cluster.opened() as session:
            pods = (await session.call("GET", session.pods, query=query))["items"]
        return [
            LiveSandbox(
                name=pod["metadata"]["annotations"][NAME],
                id=pod["metadata"]["uid"],
                image=pod["spec"]["containers"][0]["image"],
                started_unix_s=datetime.fromisoformat(
                    pod["metadata"]["creationTimestamp"]
                ).timestamp(),
            )
            for pod in pods
            if NAME in (pod["metadata"].get("annotations") or {})
        ]

    async def remove(self, name: str) -> None:
        async with self._cluster.opened() as session:
            await _delete_pod(session, _pod_name(name))

    def price(self, limits: Limits) -> float:
        return 0.0


def _pod_name(name: str) -> str:
    if _POD_NAME.fullmatch(name):
        return name
    return f"swerl-{hashlib.sha256(name.encode()).hexdigest()[:40]}"


async def _delete_pod(session: Session, pod: str) -> None:
    """Delete a pod and wait until it is gone; forget one whose node does not confirm its end."""
    path = f"{session.pods}/{pod}"
    try:
        await session.call("DELETE", path, body={"gracePeriodSeconds": 1})
        with suppress(TimeoutError):
            async with asyncio.timeout(_REMOVAL_S):
                await _next_state(session, pod, lambda _: False)
        await session.call("DELETE", path, body={"gracePeriodSeconds": 0})
    except KubernetesError as error:
        if error.status != _NOT_FOUND:
            raise


async def _next_state(
    session: Session, pod: str, is_due: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Wait for a state of a pod. Raises KubernetesError; status 404: the pod is gone."""
    async with aclosing(session.follow(pod)) as states:
        async for state in states:
            if is_due(state):
                return state
    raise AssertionError


class PodSandbox(MachineSandbox):
    """A pod of the `kubernetes` backend; `boot` creates it."""

    limits = frozenset({"memory", "cpu", "disk"})
    """Limits in force for the pod as a whole; a process limit is the kubelet's podPidsLimit."""

    def __init__(
        self, session: Session, options: Options, name: str, limits: Limits, workdir: str
    ) -> None:
        super().__init__(name, limits, workdir)
        self._session = session
        self._options = options
        self._pod = _pod_name(name)
        self._user = "" if options.user in ("root", "0") else options.user
        """The user that commands change to; empty: the container's own is the ordinary one."""
        self._home = ""
        self._is_created = False
        self._trouble: ImageError | None = None
        """The reason why it does not run yet."""

    async def boot(self, image: str, mounts: Sequence[Mount]) -> None:
        """Create the pod, wait until it is ready and copy the mounts.

        Raises ImageError, SandboxError.
        """
        await self._create(self._manifest(image))
        try:
            async with asyncio.timeout(_BOOT_TIMEOUT_S):
                await _next_state(self._session, self._pod, self._is_running)
        except TimeoutError as error:
            raise self._trouble or SandboxError(
                f"pod {self._pod} does not run after {_BOOT_TIMEOUT_S:g} s",
                hint="`kubectl describe pod` shows why: no node may have room for it",
                retryable=True,
            ) from error
        stream = await self._stream("attach", (), "stdin", "stdout")
        with suppress(ConnectionError):  # then it ended, which is reported
            await stream.send(b"\n")
        hint = f"see `sh` and `id` in image {image}, and `setpriv` if sandbox.user is set"
        ready = await self._until_ready(stream, hint)
        if ready.user_id and not self._user:
            raise SandboxError(
                f"image {image} runs as user {ready.user_name}",
                hint=f'set sandbox.user = "{ready.user_name}"; then root can run commands, too',
            )
        if self._user and _USER.fullmatch(ready.user_name):
            self._home = ready.user_name
        if not ready.has_workdir:
            await self._make_workdir(ready)
        for mount in mounts:
            await self._copy(mount)

    async def require_closed(self) -> None:
        """Raise SandboxError if the pod reaches the API server, or cannot try."""
        code = await self._exit_code(["/bin/sh", "-c", _PROBE])
        if code:
            what = (
                "reached the API server" if code == _REACHED else "lacks bash to test its network"
            )
            raise SandboxError(
                f"no NetworkPolicy is known to close the network of pods: a sandbox {what}",
                hint="apply the policy of docs/guides/sandboxes-kubernetes.md, with a network "
                "plug-in that enforces it",
            )

    async def _create(self, manifest: Mapping[str, Any]) -> None:
        creating = asyncio.ensure_future(
            self._session.call("POST", self._session.pods, body=manifest)
        )
        self._is_created = True
        try:
            await asyncio.shield(creating)
        except asyncio.CancelledError:
            await asyncio.wait([creating], timeout=_CAUSE_S)  # otherwise it could appear after all
            creating.cancel()
            raise
        except KubernetesError as error:
            self._is_created = error.status >= 500
            if error.status == _CONFLICT:
                hint = f"use another name, or `kubectl delete pod {self._pod}`"
                raise SandboxError(f"there is a pod {self._pod} already", hint=hint) from error
            raise

    def _manifest(self, image: str) -> dict[str, Any]:
        options, limits = self._options, self._limits
        clock_s = math.ceil(limits.lifetime_s + _CLOCK_SLACK_S)
        first = ["/bin/sh", "-c", _FIRST, "swerl", scripts.FIRST, str(clock_s), self._workdir]
        enter = ["/bin/sh", "-c", _ENTER, "swerl", self._user] if self._user else []
        powers = {"add": ["CHOWN", "SETGID", "SETPCAP", "SETUID"]} if self._user else {}
        quantities = {
            "cpu": f"{max(1, round(limits.num_cpus * 1000))}m",
            "memory": f"{limits.memory_mib}Mi",
            "ephemeral-storage": f"{limits.disk_mib}Mi",
        }
        container = {
            "name": "sandbox",
            "image": image,
            "command": [*enter, *first],
            "stdin": True,
            "stdinOnce": True,  # the end of the controller's stream is the end of its input
            "resources": {"limits": quantities, "requests": quantities},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], **powers},
                **({"runAsUser": 0, "runAsGroup": 0} if options.user else {}),
            },
        }
        annotations = {**labels(self.id, limits.lifetime_s + _BOOT_TIMEOUT_S), **_KEEP}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self._pod, "labels": _LABELS, "annotations": annotations},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "enableServiceLinks": False,
                "hostname": "sandbox",
                "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                **options.pod,
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "activeDeadlineSeconds": math.ceil(clock_s + _BOOT_TIMEOUT_S),
                "containers": [container],
            },
        }

    def _is_running(self, pod: Mapping[str, Any]) -> bool:
        """Return whether it runs. Raises ImageError or SandboxError if it never will."""
        status = pod.get("status") or {}
        [container, *_] = status.get("containerStatuses") or [{}]
        state = container.get("state") or {}
        if "running" in state:
            return True
        if reason := _cause(pod)[0]:
            raise SandboxError(
                f"pod {self._pod} did not start: {reason}",
                hint="see `sh` in the image" if "terminated" in state else "open another sandbox",
                retryable=True,
            )
        waiting = state.get("waiting") or {}
        reason, detail = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _PULLING:
            image = pod["spec"]["containers"][0]["image"]
            message = f"the node cannot pull {image}: {detail or reason}"
            self._trouble = ImageError(message[:400], hint=_PULL_HINT)
            name = re.split("[:@]", image.rpartition("/")[2])
            if not _TRANSIENT.search(detail.replace(name[0], "").replace(name[-1], "")):
                raise self._trouble
        return False

    async def _open_exec(self, request: ExecRequest) -> tuple[PodStream, WaitForExit]:
        self._require_alive()
        end = secrets.token_hex(16)
        command = ["/bin/sh", "-c", _LOAD, "swerl", end]
        if self._user:
            user = "root" if request.as_root else self._user
            command = ["/bin/sh", "-c", _ENTER, "swerl", user, *command]
        text = f"{self._script(request)}\n{end}\n"
        try:
            stream = await self._stream("exec", command, "stdin", "stdout", "stderr")
            await stream.send(text.encode("utf-8", "surrogateescape"))
        except (SandboxError, ConnectionError) as error:
            await self._require_alive_soon()
            raise await self._refusal(str(error)) from error
        return stream, lambda printed: self._wait_for_exit(stream, printed)

    def _script(self, request: ExecRequest) -> str:
        """Return the shell script of an exec request, with its words and its environment."""
        words = [*request.words]
        lines = [_HIDE, f"ulimit -f {(self._limits.disk_mib << 20) // _FILE_BLOCK}"]
        if self._home and not request.as_root:
            lines.append(f'HOME=~{self._home}; case $HOME in "~"*) HOME=/ ;; esac; export HOME')
        if request.environment and words[3:]:  # words: token, mark, folder, command
            words[3:3] = ["env", *(f"{key}={value}" for key, value in request.environment.items())]
        return "\n".join([*lines, f"set -- {shlex.join(words)}", request.script])

    async def _stream(self, kind: str, command: Sequence[str], *channels: str) -> PodStream:
        query = [("container", "sandbox"), *(("command", word) for word in command)]
        query += [(channel, "true") for channel in channels]
        return await self._session.stream(f"{self._session.pods}/{self._pod}/{kind}", query)

    async def _exit_code(self, command: Sequence[str]) -> int:
        """Run a command as the container's own user, without input and output."""
        stream = await self._stream("exec", command, "stdout")
        try:
            async with asyncio.timeout(_RUN_S):
                while await stream.read():
                    pass
        except TimeoutError as error:
            message = f"pod {self._pod} does not answer in {_RUN_S:g} s"
            raise SandboxError(message, hint="its node is busy", retryable=True) from error
        finally:
            stream.close()
        return await self._wait_for_exit(stream, None)

    async def _make_workdir(self, ready: SignallerReady) -> None:
        owner = f"{ready.user_id}:{ready.group_id}"
        command = ["/bin/sh", "-c", _MAKE_WORKDIR, "swerl", self._workdir, owner]
        if await self._exit_code(command):
            raise SandboxError(
                f"cannot make the folder {self._workdir} in {self.id}",
                hint="the image must permit it, or have the folder",
            )

    async def _copy(self, mount: Mount) -> None:
        packed = await asyncio.to_thread(packed_folder, mount)
        data = await asyncio.to_thread(packed.read_bytes)
        command = ["/bin/sh", "-c", _UNPACK, "sh", mount.target]
        process = await self._launch(command, cwd="/", as_root=True)
        output = CappedOutput(_DETAIL_BYTES)
        if await self._finish(process, output, _COPY_S, data) != 0:
            raise SandboxError(
                f"cannot copy {mount.source} to {mount.target} in sandbox {self.id}: "
                f"{output.stderr.decode(errors='replace').strip()}",
                hint="the image needs tar and gzip; raise disk_mib if the disk is full",
            )

    async def _wait_for_exit(self, stream: PodStream, printed: int | None) -> int:
        """Wait for a command's end, and return its exit code; see `_STATUS_S` for `printed`."""
        either: set[asyncio.Future[Any]] = {stream.status, self._lost}
        limit_s = None if printed is None else _STATUS_S
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        self._require_alive()
        status = stream.status.result() if stream.status.done() else {}
        if status.get("status") == "Success":
            return 0
        for cause in (status.get("details") or {}).get("causes") or ():
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        if printed is not None:
            return printed
        if status:
            raise await self._refusal(str(status.get("message")))
        await self._require_alive_soon()
        await self._end("the stream of a command broke")
        raise self._lost.result()

    async def _require_running(self) -> None:
        self._require_alive()

    async def _explain_end(self) -> None:
        if self._lost.done():
            return
        reason, from_inside = "the stream to its pod broke", False
        try:
            async with asyncio.timeout(_CAUSE_S):
                pod = await _next_state(self._session, self._pod, lambda pod: _cause(pod)[0])
                reason, from_inside = _cause(pod)
        except TimeoutError:
            pass
        except KubernetesError as error:
            reason = "its pod was deleted" if error.status == _NOT_FOUND else str(error)
        except SandboxError:
            self._lose("the cluster no longer answers")
            return
        await self._end(reason, from_inside=from_inside)

    async def _is_crowded(self, detail: str) -> bool:
        return any(words in detail.lower() for words in _CROWDED)

    async def _remove_machine(self) -> None:
        if self._signaller:
            await self._signaller.close()
        if self._is_created:
            await _delete_pod(self._session, self._pod)


def _cause(pod: Mapping[str, Any]) -> tuple[str, bool]:
    """Return why a pod ends, and whether code inside caused it; empty while it runs."""
    status = pod.get("status") or {}
    [container, *_] = status.get("containerStatuses") or [{}]
    ended = (container.get("state") or {}).get("terminated") or {}
    reason, detail = status.get("reason") or "", status.get("message") or ""
    if ended.get("reason") == "OOMKilled":
        return "it ran out of memory", True
    if reason == "DeadlineExceeded":
        return "its lifetime is over", False
    if reason or detail:
        # a node that runs out of its own resources evicts pods that kept their limits
        is_own = "node was low on" not in detail and "storage" in detail
        return f"{reason}: {detail}" if detail else reason, is_own
    if pod["metadata"].get("deletionTimestamp"):
        return "its pod was deleted", False
    if ended:
        detail = ended.get("message") or f"exit code {ended.get('exitCode')}"
        return f"its first process ended ({ended.get('reason')}, {detail})", False
    return "", False
