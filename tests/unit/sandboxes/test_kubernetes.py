"""The `kubernetes` backend against a stand-in cluster, which the real kubectl uses as well."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.errors import ImageError, SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import Mount
from swerl.sandboxes import kubernetes
from swerl.sandboxes._kubernetes import Cluster
from swerl.sandboxes.ledger import Outcome, default_ledger, reap

from .helpers import GREETED, LIMITS, WORKDIR, Echo, eventually, refuse, sh
from .kube_server import TOKEN, KubeServer, serving


@pytest.fixture(scope="module")
def kube(
    dockerd: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[KubeServer, Path]]:
    """A cluster of this file's own: its tests break it."""
    with serving(dockerd, tmp_path_factory.mktemp("kube")) as running:
        yield running


def backend(kube: tuple[KubeServer, Path], **settings: object) -> kubernetes.KubernetesBackend:
    settings = {"user": "agent", **settings}
    return kubernetes.build(kubernetes.Options(kubeconfig=str(kube[1]), **settings))  # type: ignore[arg-type]


def kubectl(kube: tuple[KubeServer, Path], *words: str, stdin: bytes = b"") -> bytes:
    program = shutil.which("kubectl")
    if not program:
        pytest.skip("kubectl is not installed")
    argv = [program, "--kubeconfig", str(kube[1]), *words]
    done = subprocess.run(argv, input=stdin, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


async def test_a_pod_has_no_token_no_privilege_and_known_fields_only(
    kube: tuple[KubeServer, Path], docker_image: str, tmp_path: Path
) -> None:
    secrets = [{"name": "registry"}]
    settings = {"pod": {"imagePullSecrets": secrets, "nodeSelector": {"pool": "big"}}}
    async with backend(kube, **settings).open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        pod = kube[0].pods[sandbox.id].pod
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert (spec["restartPolicy"], spec["nodeSelector"]) == ("Never", {"pool": "big"})
    assert spec["imagePullSecrets"] == secrets
    assert spec["activeDeadlineSeconds"] == 725  # lifetime, slack, boot
    security = spec["containers"][0]["securityContext"]
    assert security["capabilities"]["drop"] == ["ALL"]
    assert spec["containers"][0]["resources"]["limits"] == {
        "cpu": "1000m",
        "memory": "512Mi",
        "ephemeral-storage": "256Mi",
    }
    # kubectl reads the pod into Kubernetes's own types, which drop what they do not know.
    path = tmp_path / "pod.json"
    path.write_text(json.dumps(pod))
    command = ("label", "--local", "-f", str(path), "checked=yes", "-o", "json")
    typed = json.loads(await asyncio.to_thread(kubectl, kube, *command))
    typed["metadata"]["labels"].pop("checked")
    assert typed["spec"] == spec
    assert set(typed["metadata"]) == set(pod["metadata"])


async def test_a_cluster_that_ignores_policies_is_refused(
    kube: tuple[KubeServer, Path], docker_image: str
) -> None:
    server, before = kube[0], kube[0].environment
    port = server.url.rpartition(":")[2]
    server.network = "host"
    server.environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    try:
        error = await refuse(backend(kube), docker_image, SandboxError)
    finally:
        server.network, server.environment = "none", before
    assert "reached the API server" in str(error)
    assert "apply the policy" in error.hint


async def test_a_missing_image_is_refused_at_once(kube: tuple[KubeServer, Path]) -> None:
    async with asyncio.timeout(30):
        await refuse(backend(kube), "127.0.0.1:1/swe/async-timeout:django-14290", ImageError)


async def test_no_cluster_and_a_wrong_login(kube: tuple[KubeServer, Path], tmp_path: Path) -> None:
    config = json.loads(kube[1].read_text())
    config["users"][0]["user"] = {"token": "wrong"}
    await _refused_by(config, tmp_path, SandboxError, "401")
    program = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./no-such-program"}
    config["users"][0]["user"] = {"exec": program}
    await _refused_by(config, tmp_path, SandboxUnavailableError, "no-such-program")
    config["users"][0]["user"] = {"token": TOKEN}
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    await _refused_by(config, tmp_path, SandboxUnavailableError, "127.0.0.1:1")
    config["current-context"] = "other"
    await _refused_by(config, tmp_path, SandboxUnavailableError, "other")
    with pytest.raises(SandboxUnavailableError, match="no kubeconfig"):
        async with Cluster(str(tmp_path / "missing"), "").opened():
            pass


async def test_a_pod_logs_in_with_its_service_account(
    kube: tuple[KubeServer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, port = kube[1].parent, kube[0].url.rpartition(":")[2]
    for name, text in (
        ("token", TOKEN),
        ("namespace", "swerl"),
        ("ca.crt", (folder / "certificate.pem").read_text()),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("swerl.sandboxes._kubernetes._IN_POD", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    assert await kubernetes.build(kubernetes.Options()).live() == []


async def test_an_expired_token_is_renewed(
    kube: tuple[KubeServer, Path], docker_image: str
) -> None:
    async with backend(kube).open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        kube[0].expired = 1
        assert await sh(sandbox, "echo up") == "up\n"
        kube[0].expired = 1
        assert await backend(kube).live()


async def test_a_create_whose_answer_is_lost_makes_one_pod(
    kube: tuple[KubeServer, Path], docker_image: str
) -> None:
    pods = backend(kube)
    assert await pods.live() == []  # so that it is known to answer
    kube[0].unanswered = 1
    async with pods.open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        assert kube[0].unanswered == 0
        assert await sh(sandbox, "echo up") == "up\n"
        assert [pod.name for pod in await pods.live()] == [sandbox.id]
    assert await pods.live() == []


async def _refused_by(
    config: dict[str, object], folder: Path, kind: type[SandboxError], word: str
) -> None:
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    with pytest.raises(kind, match=word) as raised:
        await kubernetes.build(kubernetes.Options(kubeconfig=str(path))).live()
    assert raised.value.hint


async def test_an_eviction_is_the_agents_fault_only_for_its_own_files(
    kube: tuple[KubeServer, Path], docker_image: str
) -> None:
    for message, from_inside in (
        ("Pod ephemeral local storage usage exceeds the total limit of containers 256Mi.", True),
        ("The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi", False),
    ):
        async with backend(kube).open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
            running = asyncio.ensure_future(sandbox.run(["sleep", "60"], timeout_s=30))
            await sandbox.run(["true"])
            await asyncio.to_thread(kube[0].evict, sandbox.id, message)
            with pytest.raises(SandboxLostError, match="Evicted") as raised:
                await running
        assert raised.value.from_inside == from_inside


async def test_cut_streams_lose_the_sandbox_to_infrastructure(
    kube: tuple[KubeServer, Path], docker_image: str
) -> None:
    async with backend(kube).open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        running = asyncio.ensure_future(sandbox.run(["sleep", "60"], timeout_s=30))
        await sandbox.run(["true"])
        await asyncio.to_thread(kube[0].cut)
        with pytest.raises(SandboxLostError) as raised:
            await running
    assert not raised.value.from_inside
    assert sandbox.id not in kube[0].pods


OWNER = """
import asyncio, sys
from swerl.core.sandbox import Limits
from swerl.sandboxes import kubernetes
from swerl.sandboxes.ledger import tracked

async def hold():
    options = kubernetes.Options(kubeconfig=sys.argv[1], user="agent")
    backend = tracked("kubernetes", options, run="r")
    async with backend.open(sys.argv[2], Limits(memory_mib=256), workdir="/testbed") as sandbox:
        print(sandbox.id, flush=True)
        await sandbox.run(["sleep", "100"])

asyncio.run(hold())
"""


async def test_a_killed_owners_pod_stops_and_reap_deletes_it(
    kube: tuple[KubeServer, Path],
    docker_image: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWERL_STATE", str(tmp_path))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(kube[1]), docker_image, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    name = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
    process.kill()
    await process.wait()
    await eventually(lambda: kube[0].pods[name].pod["status"]["phase"] == "Succeeded")
    results = await reap(default_ledger())
    assert [(result.entry.name, result.outcome) for result in results] == [(name, Outcome.REMOVED)]
    assert name not in kube[0].pods


def test_fields_that_swerl_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="hostNetwork"):
        kubernetes.Options(pod={"hostNetwork": True})


async def test_the_gateway_is_reached_and_a_mount_copied(
    kube: tuple[KubeServer, Path],
    docker_image: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "program").write_text("text")
    mounts = [Mount(tmp_path / "agent", "/opt/agent")]
    limits = replace(LIMITS, num_cpus=0.5)
    async with backend(kube).open(
        docker_image, limits, workdir="/made/here", mounts=mounts
    ) as sandbox:
        url = await sandbox.expose(Echo(b"hello"))
        assert (await sandbox.run(["python3", "-c", GREETED, url])).stdout == b"hello\n"
        script = (
            "cat /opt/agent/program; echo x >/opt/agent/program || pwd; touch f && stat -c %U f"
        )
        assert await sh(sandbox, script) == "text/made/here\nagent\n"
