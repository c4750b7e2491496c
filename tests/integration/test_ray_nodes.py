"""Ranks and servers on two nodes of a real Ray cluster: equal steps, crashes and hangs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from swerl.cluster import ray_nodes as ray_module
from swerl.cluster.node import PYTHON, ProcessSpec
from swerl.cluster.ray_nodes import RayShare, ray_nodes
from swerl.cluster.sglang_servers import serve_on
from swerl.core.contracts import EngineSetup
from swerl.core.errors import ClusterError, RankLostError
from swerl.core.learning import Batch
from swerl.core.turn import Sampling
from swerl.engines import _sglang_pool, sglang
from swerl.engines._process import child, free_port
from swerl.recipe.schema import ClusterSection
from swerl.training import trainer as ranks
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from tests.unit.engines._fake_python import fake_python, process_at

MakeBatch = Callable[..., Batch]
TWO = RayShare(num_nodes=2, gpus_per_node=0, cpus_per_node=1, place_s=240)


def _trainer(model: Path, options: TrainerOptions, **more: Any) -> MegatronTrainer:
    return MegatronTrainer(model=model, family="tiny", algorithm="gspo", options=options, **more)


async def test_a_step_on_two_nodes_equals_that_on_one_and_a_lost_rank_is_named(
    ray_cluster: Any, tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> None:
    two = options.model_copy(update={"ranks": 2})
    async with _trainer(tiny_model, two) as trainer:
        await trainer.step(random_batch(0))
        await trainer.save(1)
        await trainer.step(random_batch(1))
        alone = await trainer.publish()
    async with (
        ray_nodes(ray_cluster.address, TWO, run="equal") as nodes,
        _trainer(tiny_model, two, nodes=nodes) as trainer,
    ):
        assert len({node.name for node in nodes}) == 2
        assert trainer.hosts == [node.name for node in nodes]
        await trainer.restore(1)
        await trainer.step(random_batch(1))
        assert (await trainer.publish()).checksum == alone.checksum
        step = asyncio.create_task(trainer.step(random_batch(2, num_rows=300)))
        await asyncio.sleep(0.1)
        os.kill(trainer.pids[1], signal.SIGKILL)
        with pytest.raises(RankLostError, match=r"rank 1 on .*killed by SIGKILL") as error:
            await step
        assert "trainer-rank1.log" in error.value.hint


async def test_a_rank_that_hangs_is_an_error_with_the_stacks_in_the_logs(
    tiny_model: Path,
    options: TrainerOptions,
    random_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "STACKS_S", 5.0)  # the stopped rank cannot write its own
    two = options.model_copy(update={"ranks": 2, "step_timeout_s": 2.0})
    async with _trainer(tiny_model, two) as trainer:
        os.kill(trainer.pids[1], signal.SIGSTOP)
        where = "rank 0 in swerl/training/.*rank 1 wrote no stack"
        with pytest.raises(RankLostError, match=f"step did not end within 2 s: {where}") as error:
            await trainer.step(random_batch(0))
        assert "step_timeout_s" in error.value.hint
    said = (options.log_dir / "trainer-rank0.log").read_text()
    assert "most recent call first" in said
    assert "worker.py" in said


async def test_a_cluster_that_is_too_small_is_named_and_left_alone(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_module, "NOTIFY_S", 0.1)
    share = RayShare(num_nodes=3, gpus_per_node=0, cpus_per_node=1, place_s=2)
    told: list[str] = []
    with pytest.raises(ClusterError, match=r"no 3 machines with 1 CPU free: .* has 1 CPU"):
        async with ray_nodes(ray_cluster.address, share, run="small", notify=told.append):
            pass
    assert [each.partition(" with ")[0] for each in told] == ["waiting up to 2 s for 3 machines"]
    async with ray_nodes(ray_cluster.address, TWO, run="fits") as nodes:
        assert await nodes[1].call(os.path.basename, "/there/it.is") == "it.is"


async def test_a_cluster_of_another_version_is_named_with_both(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "__version__", "2.40.0")
    with pytest.raises(ClusterError, match=r"Version mismatch: .*Ray: 2\.\d+.*Ray: 2\.40\.0"):
        async with ray_nodes(ray_cluster.address, TWO, run="old"):
            pass


async def test_ray_does_not_take_the_signal_that_ends_a_run_in_order(ray_cluster: Any) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    try:
        async with ray_nodes(ray_cluster.address, TWO, run="told"), asyncio.timeout(240):
            os.kill(os.getpid(), signal.SIGTERM)
            await told.wait()
            # Ray's handler would abort the process by an alarm.
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def test_an_address_without_a_cluster_is_an_error() -> None:
    pytest.importorskip("ray", reason="needs the extra swerl[cluster]")
    with pytest.raises(ClusterError, match="no Ray cluster answers"):
        async with ray_nodes("127.0.0.1:9", TWO, run="none"):
            pass


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from swerl.cluster.node import ProcessSpec
from swerl.cluster.ray_nodes import ray_nodes
from swerl.cluster.ray_nodes import RayShare

async def main() -> None:
    async with ray_nodes(sys.argv[1], RayShare(2, 0, 1), run="killed") as nodes:
        order = ProcessSpec(("sleep", "300"), Path(sys.argv[2]), guarded=True)
        print(*[(await node.start(order)).pid for node in nodes], flush=True)
        await asyncio.sleep(300)

asyncio.run(main())
"""


async def test_nothing_of_a_killed_controller_lives_on(ray_cluster: Any, tmp_path: Path) -> None:
    controller = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CONTROLLER, ray_cluster.address, str(tmp_path / "log")),
        stdout=asyncio.subprocess.PIPE,
    )
    assert controller.stdout
    pids = [int(pid) for pid in (await controller.stdout.readline()).split()]
    assert len(pids) == 2
    controller.kill()
    await controller.wait()
    async with asyncio.timeout(240):
        # Processes of others cannot be waited for, only looked at.
        while any(Path(f"/proc/{pid}").exists() for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_server_of_a_node_that_hangs_is_replaced_and_its_requests_begun_anew(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sglang_pool, "WATCH_EVERY_S", 0.2)
    monkeypatch.setattr(_sglang_pool, "WATCH_S", 1.0)
    options = sglang.Options(python=fake_python(tmp_path), restarts=9, start_timeout_s=240)
    told: list[str] = []
    setup = EngineSetup(family=None, log_dir=tmp_path, model=tmp_path, notify=told.append)  # type: ignore[arg-type]
    async with (
        ray_nodes(ray_cluster.address, TWO, run="servers") as nodes,
        serve_on(nodes, options, tmp_path, cluster=ClusterSection(), logs=tmp_path) as hosts,
        sglang.open_hosts(hosts, options, setup) as engine,
        asyncio.timeout(240),
    ):
        calls = [
            asyncio.create_task(engine.generate([5], Sampling(900), f"s{n}")) for n in range(4)
        ]
        while len(engine._flights) < len(calls):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        process_at(hosts[0].url).suspend()
        replies = await asyncio.gather(*calls)
        while any(server.lost for server in engine.pool.servers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert {len(reply.ids) for reply in replies} == {900}
    assert "ran but did not answer; restarting it" in told[0]


async def test_a_node_that_is_lost_ends_its_processes_for_the_controller(
    ray_cluster: Any, tmp_path: Path
) -> None:
    extra = ray_cluster.add_node(num_cpus=2)
    share = RayShare(num_nodes=1, gpus_per_node=0, cpus_per_node=2, place_s=240)
    async with ray_nodes(ray_cluster.address, share, run="lost") as (node,):
        process = await node.start(
            ProcessSpec((PYTHON, "-c", "import time; time.sleep(300)"), tmp_path / "log")
        )
        ray_cluster.remove_node(extra, allow_graceful=False)
        async with asyncio.timeout(240):
            ended = await process.ended
        assert "a machine of the Ray cluster failed" in str(ended)
        with pytest.raises(ClusterError, match="machine of the Ray cluster failed"):
            await node.call(os.getpid)


LEAVER = """
import asyncio, sys
from swerl.cluster import ray_nodes as module

module.LEAVE_S = 5.0

async def main() -> None:
    told, share = [], module.RayShare(1, 0, 1)
    async with module.ray_nodes(sys.argv[1], share, run="left", notify=told.append):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    print(*told, flush=True)

asyncio.run(main())
"""


async def _start_head(stack: AsyncExitStack, command: list[str], log: Path) -> None:
    """Start Ray; again if it ends, as each attempt has 30 s, which a busy machine may exceed."""
    for _ in range(3):
        running = child(command, log, env={"RAY_USAGE_STATS_ENABLED": "0"})
        process = await stack.enter_async_context(running)
        while process.returncode is None:
            if "Ray runtime started" in log.read_text(errors="replace"):
                return
            await asyncio.sleep(0.2)
    pytest.fail(f"Ray does not start: {log.read_text(errors='replace')[-500:]}")


@pytest.mark.parametrize(
    ("daemon", "number"), [("gcs_server", signal.SIGKILL), ("/raylet --", signal.SIGSTOP)]
)
async def test_a_cluster_that_no_longer_answers_is_left_in_time(
    daemon: str, number: signal.Signals, tmp_path: Path
) -> None:
    """Ray itself would end the process in the middle of its work, or wait without end."""
    import psutil

    folder, port = tempfile.mkdtemp(prefix="ray-", dir="/tmp"), free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=0", "--block"]
    command += [f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats"]
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        await _start_head(stack, command, tmp_path / "head.log")
        pipe = asyncio.subprocess.PIPE
        leaver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LEAVER, f"127.0.0.1:{port}"), stdin=pipe, stdout=pipe
        )
        assert leaver.stdin and leaver.stdout
        assert await leaver.stdout.readline() == b"ready\n"
        (victim,) = [
            each
            for each in psutil.process_iter(["cmdline"])
            if folder in (line := " ".join(each.info["cmdline"] or ())) and daemon in line
        ]
        victim.send_signal(number)
        async with asyncio.timeout(50):
            said, _ = await leaver.communicate(b"leave\n")
        assert (leaver.returncode, b"did not answer within 5 s" in said) == (0, True)
