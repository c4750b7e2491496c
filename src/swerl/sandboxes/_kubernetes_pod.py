"""One pod of the `kubernetes` sandbox: its creation, its commands, its end and the cause of it."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from swerl.core.errors import ImageError, SandboxError
from swerl.core.sandbox import Limits
from swerl.sandboxes._docker import create, scripts
from swerl.sandboxes._docker.container import Machine, Signaller, SignallerReady
from swerl.sandboxes._docker.process import WaitForExit, new_token
from swerl.sandboxes._kubernetes import Cluster, KubernetesError, PodStream

LABELS = {"app.kubernetes.io/managed-by": "swerl"}
_CONTAINER = "sandbox"
_POD_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"(?!(E?UID|PPID|(BASH|SHELL)OPTS)$)[A-Z_][A-Z0-9_]*")
"""Variables that the shell around a command may set; its own ones are in lower case."""
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_CLOCK_SLACK_S = 5
_CAUSE_S = 5.0
"""Time after a broken stream in which the cluster may report the pod's end."""
_REMOVAL_S = 30.0
_STATUS_S = 0.3
"""Time after the end of a command's output in which the kubelet may report its exit code. It does
not before every process that the command left has closed its output."""
_FILE_BLOCK = 512
_NOT_FOUND, _CONFLICT = 404, 409
_RUN_S = 30.0
_KEEP = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
         "karpenter.sh/do-not-disrupt": "true"}  # fmt: skip
"""Annotations that keep autoscalers from emptying the pod's node."""
_CROWDED = ("temporarily unavailable", "cannot allocate memory", "cannot fork", "no space left")
_PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_TRANSIENT = ("429", "toomanyrequests", "timeout", "timed out", "refused", "reset", "503", "EOF")

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
_OWN_KEYS = {"containers", "restartPolicy", "automountServiceAccountToken", "hostNetwork",
             "hostPID", "hostIPC", "shareProcessNamespace", "activeDeadlineSeconds"}  # fmt: skip


class Options(BaseModel):
    """Settings of the `kubernetes` sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kubeconfig: str = ""
    """File with the cluster and the login. Empty: KUBECONFIG, ~/.kube/config, or inside a pod its
    service account."""
    context: str = ""
    """Context of the kubeconfig; empty: its current one."""
    namespace: str = ""
    """Namespace of the pods; empty: the context's own, else `default`."""
    user: str = ""
    """Ordinary user of the sandboxes, by name or number, for images that have one. Empty: the
    image's own user, who must then be root. A user needs `setpriv` in the image."""
    network: Literal["none", "unchecked"] = "none"
    """`none`: a NetworkPolicy denies all traffic, and the first pod tests it. `unchecked`: swerl
    sets and tests nothing, and the cluster's owner is responsible."""
    pull_secrets: tuple[str, ...] = ()
    """Names of the namespace's secrets for private registries."""
    requests: dict[str, str] = {}
    """Resources that the scheduler reserves, such as {cpu = "250m"}. Empty: the limits."""
    pod: dict[str, Any] = {}
    """Additional fields of the pod's spec, such as {hostUsers = false}, nodeSelector, tolerations
    or runtimeClassName. gVisor lacks /proc/PID/limits, which swerl needs."""
    boot_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until a pod must run: it may wait for a node and for the pull of a large image."""
    output_cap_mib: float = Field(default=8.0, gt=0)
    """Largest MiB kept of each of a command's two output streams; test logs are below 2."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of one sandbox in US dollars per hour, if the nodes are paid for by use."""

    @field_validator("pod")
    @classmethod
    def _check_pod(cls, pod: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_OWN_KEYS & pod.keys()):
            raise ValueError(f"swerl sets {', '.join(taken)} itself: leave it out")
        return pod


def pods_path(cluster: Cluster) -> str:
    return f"/api/v1/namespaces/{cluster.namespace}/pods"


def pod_name(name: str) -> str:
    if _POD_NAME.fullmatch(name):
        return name
    return f"swerl-{hashlib.sha256(name.encode()).hexdigest()[:40]}"


async def delete_pod(cluster: Cluster, pod: str) -> None:
    """Delete a pod and wait until it is gone; forget one whose node does not confirm its end."""
    path = f"{pods_path(cluster)}/{pod}"
    with _if_there():
        await cluster.call("DELETE", path, body={"gracePeriodSeconds": 1})
        with suppress(TimeoutError):
            async with asyncio.timeout(_REMOVAL_S):
                await _next_state(cluster, pod, lambda _: False)
        await cluster.call("DELETE", path, body={"gracePeriodSeconds": 0})


@contextmanager
def _if_there() -> Iterator[None]:
    """Do what the block does with an object, if it exists."""
    try:
        yield
    except KubernetesError as error:
        if error.status != _NOT_FOUND:
            raise


async def _next_state(
    cluster: Cluster, pod: str, is_wanted: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Wait for a state of a pod. Raises KubernetesError; status 404: the pod is gone."""
    async with aclosing(cluster.follow(pods_path(cluster), pod)) as states:
        async for state in states:
            if is_wanted(state):
                return state
    raise AssertionError


class Pod(Machine):
    """A pod; `boot` creates it."""

    def __init__(
        self,
        cluster: Cluster,
        options: Options,
        *,
        name: str,
        image: str,
        limits: Limits,
        workdir: str,
    ) -> None:
        super().__init__(name, limits, workdir)
        self._cluster = cluster
        self._options = options
        self._image = image
        self._pod = pod_name(name)
        self._user = "" if options.user in ("root", "0") else options.user
        """The user that commands change to; empty: the container's own is the ordinary one."""
        self._home = ""
        self._is_made = False
        self._trouble: SandboxError | ImageError | None = None
        """The reason why it does not run yet."""

    async def boot(self) -> SignallerReady:
        """Create it and wait until it is ready. Raises ImageError, SandboxError."""
        await self._create()
        try:
            async with asyncio.timeout(self._options.boot_timeout_s):
                await _next_state(self._cluster, self._pod, self._is_running)
        except TimeoutError as error:
            raise self._trouble or SandboxError(
                f"pod {self._pod} does not run after {self._options.boot_timeout_s:g} s",
                hint="`kubectl describe pod` shows why; raise sandbox.boot_timeout_s",
                retryable=True,
            ) from error
        stream = await self._open("attach", (), "stdin", "stdout")
        signaller = Signaller(stream, lambda: self.in_background(self._explain_end()))
        with suppress(ConnectionError):  # then it ended, which is reported
            await stream.send(b"\n")
        hint = f"see `sh` and `id` in image {self._image}, and `setpriv` if sandbox.user is set"
        ready = await self._until_ready(signaller, hint)
        if ready.user_id and not self._user:
            raise SandboxError(
                f"image {self._image} runs as user {ready.user_name}",
                hint=f'set sandbox.user = "{ready.user_name}"; then root can run commands, too',
            )
        if self._user and _USER.fullmatch(ready.user_name):
            self._home = ready.user_name
        if not ready.has_workdir:
            await self._make_workdir(ready)
        return ready

    async def open_exec(self, request: Mapping[str, Any]) -> tuple[PodStream, WaitForExit]:
        self.require_alive()
        end = new_token()
        command = ["/bin/sh", "-c", _LOAD, "swerl", end]
        if self._user:
            user = request["user"] or self._user
            command = ["/bin/sh", "-c", _ENTER, "swerl", user, *command]
        outputs = ["stdout", "stderr"] if request.get("stderr", True) else ["stdout"]
        try:
            stream = await self._open("exec", command, "stdin", *outputs)
            await stream.send(
                f"{self._script(request)}\n{end}\n".encode("utf-8", "surrogateescape")
            )
        except (SandboxError, ConnectionError) as error:
            await self.require_alive_soon()
            raise await self.refusal(str(error)) from error
        if not request["stdin"]:
            stream.end_input()
        return stream, partial(self._wait_for_exit, stream)

    async def _create(self) -> None:
        made = asyncio.ensure_future(
            self._cluster.call("POST", pods_path(self._cluster), body=self._manifest())
        )
        self._is_made = True
        try:
            await asyncio.shield(made)
        except asyncio.CancelledError:
            await asyncio.wait([made], timeout=_CAUSE_S)  # otherwise it could appear after all
            made.cancel()
            raise
        except KubernetesError as error:
            self._is_made = error.status >= 500
            if error.status == _CONFLICT:
                hint = f"use another name, or `kubectl delete pod {self._pod}`"
                raise SandboxError(f"there is a pod {self._pod} already", hint=hint) from error
            raise

    def _manifest(self) -> dict[str, Any]:
        options, limits = self._options, self.limits
        clock_s = limits.lifetime_s + _CLOCK_SLACK_S
        first = [_FIRST, "swerl", scripts.FIRST, f"{math.ceil(clock_s)}", self.workdir]
        enter = ["/bin/sh", "-c", _ENTER, "swerl", self._user] if self._user else []
        powers = {"add": ["CHOWN", "SETGID", "SETPCAP", "SETUID"]} if self._user else {}
        security = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], **powers},
            **({"runAsUser": 0, "runAsGroup": 0} if options.user else {}),
        }
        quantities = {
            "cpu": f"{max(1, round(limits.num_cpus * 1000))}m",
            "memory": f"{limits.memory_mib}Mi",
            "ephemeral-storage": f"{limits.disk_mib}Mi",
        }
        container = {
            "name": _CONTAINER,
            "image": self._image,
            "command": [*enter, "/bin/sh", "-c", *first],
            "stdin": True,
            "stdinOnce": True,  # the end of the controller's stream is the end of its input
            "resources": {"limits": quantities, "requests": {**quantities, **options.requests}},
            "securityContext": security,
        }
        spec = {
            "terminationGracePeriodSeconds": 1,
            "enableServiceLinks": False,
            "hostname": "sandbox",
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "imagePullSecrets": [{"name": each} for each in options.pull_secrets],
            **options.pod,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "activeDeadlineSeconds": math.ceil(clock_s + options.boot_timeout_s),
            "containers": [container],
        }
        marks = create.labels(self.name, limits.lifetime_s + options.boot_timeout_s)
        metadata = {"name": self._pod, "labels": LABELS, "annotations": {**marks, **_KEEP}}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _is_running(self, pod: Mapping[str, Any]) -> bool:
        """Return whether it runs. Raises ImageError or SandboxError if it never will."""
        status = pod.get("status") or {}
        [container, *_] = status.get("containerStatuses") or [{}]
        state = container.get("state") or {}
        if "running" in state:
            return True
        if status.get("phase") in ("Failed", "Succeeded") or pod["metadata"].get(
            "deletionTimestamp"
        ):
            reason, _ = _cause(pod)
            hint = "see `sh` in the image" if "terminated" in state else "open another sandbox"
            raise SandboxError(
                f"pod {self._pod} did not start: {reason}", hint=hint, retryable=True
            )
        waiting = state.get("waiting") or {}
        reason, detail = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _PULLING:
            self._trouble = _pull_error(self._image, detail or reason)
            if not any(word in detail for word in _TRANSIENT):
                raise self._trouble
        elif reason.endswith("Error"):
            hint = "the node's kubelet and the image do not fit: `kubectl describe pod` has more"
            raise SandboxError(f"pod {self._pod} cannot start: {reason}: {detail}", hint=hint)
        for condition in status.get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                self._trouble = SandboxError(
                    f"no node takes pod {self._pod}: {condition.get('message', '')}",
                    hint="open fewer sandboxes, add nodes, or lower the limits or sandbox.requests",
                    retryable=True,
                )
        return False

    def _script(self, request: Mapping[str, Any]) -> str:
        """Return the shell script of an exec request, with its words and its environment."""
        _, _, script, _, *words = request["cmd"]
        lines = [_HIDE, f"ulimit -f {(self.limits.disk_mib << 20) // _FILE_BLOCK}"]
        if self._home and not request["user"]:
            lines.append(f'HOME=~{self._home}; case $HOME in "~"*) HOME=/ ;; esac; export HOME')
        odd = []
        for key, value in (request.get("environment") or {}).items():
            if _VARIABLE.fullmatch(key):
                lines.append(f"export {key}={shlex.quote(value)}")
            else:
                odd.append(f"{key}={value}")
        if odd:  # words: token, mark, folder, command
            words[3:3] = ["env", *odd]
        lines.append(f"set -- {shlex.join(words)}")
        return "\n".join([*lines, script])

    async def _open(self, kind: str, command: Sequence[str], *channels: str) -> PodStream:
        query = [("container", _CONTAINER), *(("command", word) for word in command)]
        query += [(channel, "true") for channel in channels]
        return await self._cluster.stream(f"{pods_path(self._cluster)}/{self._pod}/{kind}", query)

    async def run(self, command: Sequence[str]) -> int:
        """Run a command as the container's own user, without input and output."""
        stream = await self._open("exec", command, "stdout")
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
        command = ["/bin/sh", "-c", _MAKE_WORKDIR, "swerl", self.workdir, owner]
        if await self.run(command):
            raise SandboxError(
                f"cannot make the folder {self.workdir} in {self.name}",
                hint=f"the image {self._image} must permit it, or have the folder",
            )

    async def _wait_for_exit(self, stream: PodStream, printed: int | None) -> int:
        """Wait for a command's end, and return its exit code; see `_STATUS_S` for `printed`."""
        either: set[asyncio.Future[Any]] = {stream.status, self.lost}
        limit_s = None if printed is None else _STATUS_S
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        self.require_alive()
        status = stream.status.result() if stream.status.done() else {}
        if status.get("status") == "Success":
            return 0
        for cause in (status.get("details") or {}).get("causes") or ():
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        if printed is not None:
            return printed
        if status:
            raise await self.refusal(str(status.get("message")))
        await self.require_alive_soon()
        await self.close("the stream of a command broke")
        raise self.lost.result()

    async def _explain_end(self) -> None:
        """Find out why the stream of its first process ended, and close it."""
        if self.lost.done():
            return
        reason, from_inside = "the stream to its pod broke", False
        try:
            async with asyncio.timeout(_CAUSE_S):
                pod = await _next_state(self._cluster, self._pod, lambda pod: _cause(pod)[0])
                reason, from_inside = _cause(pod)
        except TimeoutError:
            pass
        except KubernetesError as error:
            reason = "its pod was deleted" if error.status == _NOT_FOUND else str(error)
        except SandboxError:
            self.lose("the cluster no longer answers")
            return
        await self.close(reason, from_inside=from_inside)

    async def _is_crowded(self, detail: str) -> bool:
        return any(words in detail.lower() for words in _CROWDED)

    async def _remove_it(self) -> None:
        if self.signaller:
            await self.signaller.close()
        if self._is_made:
            await delete_pod(self._cluster, self._pod)


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
        own = "node was low on" not in detail and "storage" in detail
        return f"{reason}: {detail}" if detail else reason, own
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"{condition.get('reason')}: {condition.get('message')}", False
    if pod["metadata"].get("deletionTimestamp"):
        return "its pod was deleted", False
    if ended:
        detail = ended.get("message") or f"exit code {ended.get('exitCode')}"
        return f"its first process ended ({ended.get('reason')}, {detail})", False
    return "", False


def _pull_error(image: str, detail: str) -> ImageError:
    low, hint = detail.lower(), "check that the nodes reach the registry"
    if "429" in low or "toomanyrequests" in low:
        hint = "the registry limits pulls: name a secret in sandbox.pull_secrets, or use a mirror"
    elif any(word in low for word in ("unauthorized", "denied", "forbidden", "401", "403")):
        hint = "check the name; a private registry needs a secret in sandbox.pull_secrets"
    elif any(word in low for word in ("not found", "manifest", "invalid", "parse")):
        hint = "check the name, and its tag or digest"
    return ImageError(f"the node cannot pull {image}: {detail[:400]}", hint=hint)
