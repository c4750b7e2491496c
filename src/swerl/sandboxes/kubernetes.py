"""The `kubernetes` sandbox: a pod of a cluster for each sandbox, without privileges or a token.

The pod's first process reads from the controller's attach stream, so it ends with the controller.
Commands are started by exec; their words and their environment travel over standard input, because
an exec request carries neither an environment nor long arguments, and servers log its URL.

A NetworkPolicy keeps pods from the network. The first pod tries to reach the API server: if it
can, the cluster's network plug-in ignores policies, and no sandbox is opened.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from swerl.core.errors import ImageError, SandboxError, SandboxUnavailableError
from swerl.core.sandbox import CappedOutput, Limits, LiveSandbox, Mount, new_name
from swerl.sandboxes._docker import create
from swerl.sandboxes._docker.commands import ContainerCommands
from swerl.sandboxes._docker.sandbox import MachineSandbox
from swerl.sandboxes._kubernetes import Cluster, KubernetesError
from swerl.sandboxes._kubernetes_pod import (
    LABELS,
    Pod,
    delete_pod,
    pod_name,
    pods_path,
)
from swerl.sandboxes._kubernetes_pod import Options as Options
from swerl.sandboxes._packed import packed_folder

_POLICY = "swerl-sandboxes"
_CONFLICT, _FORBIDDEN = 409, 403
_REACHED = 7
_COPY_S = 600.0
_DETAIL_BYTES = 4096
_UNPACK = 'mkdir -p -- "$1" && tar -xzf - -C "$1" --no-same-owner && chmod -R a+rX,a-w -- "$1"'
_PYTHON_PROBE = f"""
import os, socket
at = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])
try: socket.create_connection(at, 2)
except OSError: raise SystemExit(0)
raise SystemExit({_REACHED})
"""
_PROBE = """
[ -n "$KUBERNETES_SERVICE_HOST" ] || exit 0
command -v python3 >/dev/null 2>&1 && exec python3 -I -S -c "$1"
"""


def build(options: Options) -> KubernetesBackend:
    """Return the backend. It connects to the cluster when the first sandbox is opened."""
    return KubernetesBackend(options)


class KubernetesBackend:
    """Makes pods in one namespace."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._cluster = Cluster(options.kubeconfig, options.context, options.namespace)
        self._has_policy = self._is_closed = options.network == "unchecked"

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
        async with self._cluster.opened():
            if not self._has_policy:
                await self._require_policy()
                self._has_policy = True
            pod = Pod(
                self._cluster,
                self._options,
                name=name or new_name(),
                image=image,
                limits=limits,
                workdir=workdir,
            )
            sandbox = PodSandbox(pod, int(self._options.output_cap_mib * 2**20))
            try:
                await sandbox.boot(mounts)
                if not self._is_closed:
                    await _require_closed(pod)
                    self._is_closed = True
                yield sandbox
            finally:
                failed = sys.exception() is not None
                try:
                    await asyncio.shield(sandbox.close())
                except SandboxUnavailableError:  # the error that ends the block explains more
                    if not failed:
                        raise

    async def live(self) -> Sequence[LiveSandbox]:
        async with self._cluster.opened():
            query = {"labelSelector": ",".join(f"{key}={word}" for key, word in LABELS.items())}
            found = await self._cluster.call("GET", pods_path(self._cluster), query=query)
        return [
            LiveSandbox(
                name=each["metadata"]["annotations"][create.NAME],
                id=each["metadata"]["uid"],
                image=each["spec"]["containers"][0]["image"],
                started_unix_s=datetime.fromisoformat(
                    each["metadata"]["creationTimestamp"]
                ).timestamp(),
            )
            for each in found["items"]
            if create.NAME in (each["metadata"].get("annotations") or {})
        ]

    async def remove(self, name: str) -> None:
        async with self._cluster.opened():
            await delete_pod(self._cluster, pod_name(name))

    def price(self, limits: Limits) -> float:
        return self._options.price_per_hour

    async def _require_policy(self) -> None:
        """Find or make a NetworkPolicy that denies the pods all traffic. Raises SandboxError."""
        namespace = self._cluster.namespace
        path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        try:
            if any(map(_denies, (await self._cluster.call("GET", path))["items"])):
                return
            await self._cluster.call("POST", path, body=network_policy())
        except KubernetesError as error:
            if error.status == _CONFLICT:
                return
            if error.status != _FORBIDDEN:
                raise
            raise SandboxError(
                f"no NetworkPolicy keeps sandboxes in namespace {namespace} from the network, "
                "and this user may not make one",
                hint="apply the policy of docs/guides/sandboxes.md, section Kubernetes, "
                'or set sandbox.network = "unchecked"',
            ) from error


def network_policy() -> dict[str, Any]:
    """Return the policy that denies the sandboxes all traffic."""
    spec = {"podSelector": {"matchLabels": LABELS}, "policyTypes": ["Ingress", "Egress"]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": _POLICY, "labels": LABELS},
        "spec": spec,
    }


def _denies(policy: Mapping[str, Any]) -> bool:
    """Return whether a policy selects the sandboxes and permits nothing."""
    spec = policy["spec"]
    selector = spec.get("podSelector") or {}
    labels = selector.get("matchLabels") or {}
    return (
        not selector.get("matchExpressions")
        and all(LABELS.get(key) == word for key, word in labels.items())
        and {"Ingress", "Egress"} <= set(spec.get("policyTypes") or ())
        and not (spec.get("ingress") or spec.get("egress"))
    )


async def _require_closed(pod: Pod) -> None:
    """Raise SandboxError if a pod reaches the API server: then no policy is enforced."""
    command = ["/bin/sh", "-c", _PROBE, "swerl", _PYTHON_PROBE]
    if await pod.run(command) == _REACHED:
        raise SandboxError(
            "the cluster's network plug-in enforces no NetworkPolicy: a sandbox reached the "
            "API server",
            hint="install one that does, such as Calico or Cilium, or set sandbox.network = "
            '"unchecked"',
        )


class PodSandbox(MachineSandbox):
    """A pod of the `kubernetes` backend."""

    limits = frozenset({"memory", "cpu", "disk"})
    """Limits in force for the pod as a whole; a process limit is the kubelet's podPidsLimit."""

    async def boot(self, mounts: Sequence[Mount]) -> None:
        """Create the pod, wait until it is ready and copy the mounts. Raises SandboxError."""
        pod = self._machine
        assert isinstance(pod, Pod)
        self._commands = ContainerCommands(pod, await pod.boot())
        for mount in mounts:
            await self._copy(mount)

    async def _copy(self, mount: Mount) -> None:
        packed = await asyncio.to_thread(packed_folder, mount)
        process = await self._commands.launch(
            ["/bin/sh", "-c", _UNPACK, "sh", mount.target], cwd="/", as_root=True, with_input=True
        )
        kept = CappedOutput(_DETAIL_BYTES)
        data = await asyncio.to_thread(packed.read_bytes)
        if await self._finish(process, kept, _COPY_S, data) != 0:
            raise SandboxError(
                f"cannot copy {mount.source} to {mount.target} in sandbox {self.id}: "
                f"{kept.stderr.decode(errors='replace').strip()}",
                hint="the image needs tar and gzip; raise disk_mib if the disk is full",
            )
