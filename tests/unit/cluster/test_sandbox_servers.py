"""Real sandboxes on the nodes of a run: servers, Episodes on two machines, crashes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from swerl.checks import launch
from swerl.cluster import sandbox_servers
from swerl.cluster.checks import FindingState
from swerl.cluster.node import LocalNode
from swerl.cluster.open import Nodes
from swerl.cluster.ray_nodes import RayShare, ray_nodes
from swerl.cluster.sandbox_servers import SpreadBackend, _Machine, serve_sandboxes
from swerl.core import plugins
from swerl.core.changes import edits
from swerl.core.chat import Finish, Message
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.events import Event, ignore
from swerl.core.grade import Verdict
from swerl.core.sandbox import Limits, Mount
from swerl.core.turn import Completion, Sampling
from swerl.gateway.server import Gateway
from swerl.harnesses import builtin
from swerl.recipe.schema import Recipe
from swerl.rollout import group
from swerl.rollout.parts import Parts
from swerl.rollout.reward import reward_of
from swerl.rollout.sandbox_pool import SandboxPool
from swerl.runs.layout import open_run
from swerl.sandboxes import local
from swerl.sandboxes.ledger import ListedSandbox, SandboxState, default_ledger, list_sandboxes
from swerl.tasks import twin
from tests.unit.cluster.conftest import Lost

pytest.importorskip("e2b", reason="the package `e2b` is not installed")

LIMITS = Limits(memory_mib=512, num_processes=128, disk_mib=512, lifetime_s=600)
TWO = RayShare(num_nodes=2, gpus_per_node=0, cpus_per_node=1, place_s=240)
FAMILY = plugins.load("families", "tiny").build(None)
SIZE = 4
"""Episodes at once; each machine has half of their sandboxes."""


def _recipe(name: str) -> Recipe:
    budgets = {
        "model_call_s": 300, "tool_s": 310, "agent_s": 320, "grading_s": 330, "episode_s": 700,
        "sandbox_s": 800,
    }  # fmt: skip
    return Recipe.model_validate(
        {
            "name": name,
            "rollout": {"concurrency": SIZE, "max_new_tokens": 800, "max_context_tokens": 8000},
            "budgets": budgets,
        }
    )


def _servers(folder: Path) -> dict[str, int]:
    """Return the servers, without their guards, by the names of their logs in this folder."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[1:3] == ["-m", "swerl.sandboxes.e2b_server.process"]:
            with suppress(OSError):  # it ended just now
                log = Path(f"/proc/{process.pid}/fd/2").readlink()
                if log.parent == folder:
                    found[log.stem] = process.pid
    return found


async def _until(true: Callable[[], object]) -> None:
    """Wait for something outside of this process, which can only be looked at."""
    async with asyncio.timeout(240):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _open_rows(run: str) -> Sequence[ListedSandbox]:
    rows = await list_sandboxes(default_ledger(), run=run)
    return [row for row in rows if row.state is not SandboxState.ENDED]


async def test_a_sandbox_is_as_ordered_and_is_lost_with_its_server(tmp_path: Path) -> None:
    brought = tmp_path / "agent"
    brought.mkdir()
    (brought / "word").write_text("brought\n")
    # The second one has an address that another machine could have.
    nodes = [LocalNode(name="n1"), LocalNode(name="n2", address="127.0.0.2")]
    told: list[Event] = []
    async with serve_sandboxes(nodes, _recipe("ordered"), logs=tmp_path, emit=told.append) as both:
        opened = both.open("host", LIMITS, workdir="/a/b", mounts=[Mount(brought, "/opt/agent")])
        async with opened as one, both.open("host", LIMITS, workdir="/w") as two:
            look = "pwd; cat /opt/agent/word; grep -c ' /opt/agent ' /proc/mounts; touch mine"
            assert (await one.run(["sh", "-c", look])).text == "/a/b\nbrought\n1\n"
            rows = await _open_rows("ordered")
            assert {(row.entry.backend, row.entry.image) for row in rows} == {("local", "host")}
            assert {row.entry.lifetime_s for row in rows} == {LIMITS.lifetime_s}
            servers = _servers(tmp_path)
            assert {row.entry.owner.pid for row in rows} == set(servers.values())
            running = asyncio.create_task(one.run(["sleep", "600"]))
            os.kill(servers["sandboxes-n1"], signal.SIGKILL)
            with pytest.raises(SandboxLostError, match="the sandbox server on n1 ended"):
                await running
            assert (await two.run(["echo", "alive"])).text == "alive\n"
        await _until(lambda: both._machines[0].backend)
        assert "restarting it, 2 restarts left" in str(told)
        async with both.open("host", LIMITS, workdir="/w"):
            assert [site.num_open for site in both._machines] == [1, 0]
    assert not _servers(tmp_path)
    assert not await _open_rows("ordered")


async def test_a_server_that_is_stopped_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_servers, "ASK_S", 0.1)
    monkeypatch.setattr(sandbox_servers, "SILENT_S", 5.0)
    recipe = _recipe("stopped")
    async with serve_sandboxes([LocalNode(name="n1")], recipe, logs=tmp_path, emit=ignore) as one:
        async with one.open("host", LIMITS, workdir="/w") as sandbox:
            server = _servers(tmp_path)["sandboxes-n1"]
            os.kill(server, signal.SIGSTOP)
            async with asyncio.timeout(240):
                with pytest.raises(SandboxLostError, match="the sandbox server on n1 ended"):
                    await sandbox.run(["sleep", "600"])
        await _until(lambda: one._machines[0].backend)
        async with one.open("host", LIMITS, workdir="/w") as sandbox:
            assert (await sandbox.run(["echo", "alive"])).text == "alive\n"
    assert not _servers(tmp_path)


async def test_a_lost_machine_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    told: list[Event] = []
    recipe = _recipe("gone")
    async with serve_sandboxes([Lost(name="n1")], recipe, logs=tmp_path, emit=told.append) as one:
        os.kill(_servers(tmp_path)["sandboxes-n1"], signal.SIGKILL)
        await _until(lambda: one._machines[0].is_over)
        assert "n1 no longer serves sandboxes: the machine is gone" in str(told[-1])
        with pytest.raises(SandboxUnavailableError):
            async with one.open("host", LIMITS, workdir="/w"):
                pass


async def test_a_server_that_does_not_start_is_an_error_with_its_words(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"name": "broken", "sandbox": {"type": "local", "typo": 1}})
    with pytest.raises(SandboxError, match="no sandboxes on n1: unknown recipe key") as error:
        async with serve_sandboxes([LocalNode(name="n1")], recipe, logs=tmp_path, emit=ignore):
            pass
    assert error.value.hint
    assert not _servers(tmp_path)


async def test_a_machine_that_can_hold_no_sandbox_fails_at_once(tmp_path: Path) -> None:
    sandbox = {"type": "docker", "base_url": "unix:///no/such/daemon"}
    recipe = Recipe.model_validate({"name": "none", "sandbox": sandbox})
    async with serve_sandboxes([LocalNode(name="n1")], recipe, logs=tmp_path, emit=ignore) as one:
        with pytest.raises(SandboxUnavailableError, match="/no/such/daemon"):
            async with one.open("any", LIMITS, workdir="/w"):
                pass


async def test_doctor_checks_sandboxes_and_gateway_of_each_machine(tmp_path: Path) -> None:
    nodes = (LocalNode(name="n1"), LocalNode(name="n2"))
    checks = launch._check_on_nodes(_recipe("looked"), Nodes(nodes, nodes), tmp_path)
    findings = [finding async for finding in checks]
    assert {finding.state for finding in findings} == {FindingState.OK}, findings
    assert [(finding.node, finding.check) for finding in findings] == [
        ("n1", "sandbox"), ("n1", "gateway"), ("n2", "sandbox"), ("n2", "gateway"),
    ]  # fmt: skip


class Solver:
    """An Engine that plays the known solution to each session, once it may."""

    def __init__(self, replies: Sequence[Message]) -> None:
        self._replies = replies
        self._sessions: dict[str, Iterator[Message]] = {}
        self.may_reply = asyncio.Event()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        replies = self._sessions.setdefault(session, iter(self._replies))
        await self.may_reply.wait()
        said = tuple(FAMILY.encode_reply(next(replies)))
        return Completion(said, (-0.25,) * len(said), Finish.STOP, "7")

    async def abort(self, session: str) -> None: ...
    async def close(self) -> None: ...


@asynccontextmanager
async def _parts(engine: Any, recipe: Recipe, backend: SandboxBackend) -> AsyncIterator[Parts]:
    async with Gateway(engine=engine, family=FAMILY) as gateway:
        yield Parts(
            gateway=gateway,
            sandboxes=SandboxPool(backend, LIMITS, concurrency=SIZE),
            harness=builtin.build(builtin.Options()),
            reward=reward_of("solved"),
            rollout=recipe.rollout,
            budgets=recipe.budgets,
            seed=0,
            emit=ignore,
        )


async def test_episodes_on_two_machines_survive_the_end_of_a_server(
    ray_cluster: Any, tmp_path: Path
) -> None:
    recipe, logs = _recipe("spread"), tmp_path / "logs"
    logs.mkdir()
    [task] = twin.make_tasks(tmp_path / "twin", split="train", count=1, seed=3)
    script = builtin.build(builtin.Options()).script(edits(task.gold_patch), task.workdir)
    engine = Solver(script)
    with open_run(tmp_path / "run", {}) as folder:
        async with (
            ray_nodes(ray_cluster.address, TWO, run="spread") as nodes,
            serve_sandboxes(nodes, recipe, logs=logs, emit=ignore) as both,
            _parts(engine, recipe, both) as parts,
        ):
            running = asyncio.create_task(
                group.run([task], "00000", parts, size=SIZE, folder=folder)
            )
            await _until(lambda: engine.num_sessions == SIZE or running.done())
            assert [site.num_open for site in both._machines] == [SIZE // 2, SIZE // 2]
            servers = _servers(logs)
            assert {row.entry.owner.pid for row in await _open_rows("spread")} == set(
                servers.values()
            )
            os.kill(servers[f"sandboxes-{nodes[1].name}"], signal.SIGKILL)
            engine.may_reply.set()
            [found] = await running
            assert [each.verdict for each in found.episodes] == [Verdict.SOLVED] * SIZE
            assert engine.num_sessions == SIZE + SIZE // 2
            await _until(lambda: both._machines[1].backend)  # it has cleared up what was killed
    assert not _servers(logs)
    assert not await _open_rows("spread")


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from swerl.cluster.ray_nodes import ray_nodes
from swerl.cluster.ray_nodes import RayShare
from swerl.cluster.sandbox_servers import serve_sandboxes
from swerl.recipe.schema import Recipe
from swerl.core.events import ignore
from swerl.core.sandbox import Limits

async def main() -> None:
    recipe = Recipe(name="orphaned")
    async with (
        ray_nodes(sys.argv[1], RayShare(2, 0, 1), run="orphaned") as nodes,
        serve_sandboxes(nodes, recipe, logs=Path(sys.argv[2]), emit=ignore) as both,
        both.open("host", Limits(), workdir="/w"),
        both.open("host", Limits(), workdir="/w"),
    ):
        print("open", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_nothing_of_a_killed_controllers_sandboxes_lives_on(
    ray_cluster: Any, tmp_path: Path
) -> None:
    controller = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CONTROLLER, ray_cluster.address, str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert controller.stdout
    assert await controller.stdout.readline() == b"open\n"
    names = {row.entry.name for row in await _open_rows("orphaned")}
    assert len(names) == len(_servers(tmp_path)) == 2
    controller.kill()
    await controller.wait()
    await _until(lambda: not _servers(tmp_path))
    backend = local.build(local.Options())
    async with asyncio.timeout(240):
        while names & {each.name for each in await backend.live()}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class Opened:
    """A sandbox that only knows why it is lost."""

    lost: SandboxLostError | None = None

    def lose(self, error: SandboxLostError) -> None:
        self.lost = error


class Opens:
    """Stands in for an E2BBackend, which needs a server; opens while `may_open` is set."""

    def __init__(self) -> None:
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.closes = True

    @asynccontextmanager
    async def open(self, image: str, limits: Limits, **_: object) -> AsyncIterator[Opened]:
        await self.may_open.wait()
        sandbox = Opened()
        yield sandbox
        if not self.closes:
            raise SandboxError("the server does not answer")


def _two() -> tuple[SpreadBackend, list[_Machine], list[Opens]]:
    changed, recipe = asyncio.Event(), _recipe("two")
    machines = [
        _Machine(LocalNode(name=name), recipe, changed, logs=Path(), emit=ignore)
        for name in ("n1", "n2")
    ]
    backends = [Opens(), Opens()]
    for machine, backend in zip(machines, backends, strict=True):
        machine.serve(backend)  # type: ignore[arg-type]
    return SpreadBackend(machines, changed), machines, backends


def _open(spread: SpreadBackend) -> Any:
    return spread.open("host", Limits(), workdir="/w")


async def test_each_sandbox_goes_to_the_emptiest_machine() -> None:
    spread, sites, _ = _two()
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(_open(spread))
        assert [site.num_open for site in sites] == [2, 2]
        async with _open(spread), _open(spread):
            assert [site.num_open for site in sites] == [3, 3]
    assert [site.num_open for site in sites] == [0, 0]


async def test_a_sandbox_that_is_being_opened_counts_for_its_machine() -> None:
    spread, sites, backends = _two()
    backends[0].may_open.clear()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(_open(spread).__aenter__())
        await asyncio.sleep(0)
        async with _open(spread):
            assert [site.num_open for site in sites] == [1, 1]
        waiting.cancel()
    assert [site.num_open for site in sites] == [0, 0]


async def test_a_sandbox_that_does_not_close_is_an_error_while_its_server_serves() -> None:
    spread, _, backends = _two()
    backends[0].closes = False
    with pytest.raises(SandboxError, match="does not answer"):
        async with _open(spread):
            pass


async def test_an_opening_ends_with_the_server_that_it_waits_for() -> None:
    spread, sites, backends = _two()
    backends[0].may_open.clear()
    opening = asyncio.create_task(_open(spread).__aenter__())
    await asyncio.sleep(0)
    sites[0].lose("killed")
    with pytest.raises(SandboxLostError, match="server on n1 ended: killed"):
        await opening
    assert sites[0].num_open == 0


async def test_without_a_server_it_waits_for_one_and_fails_if_none_will_come() -> None:
    spread, sites, backends = _two()
    sites[0].give_up("killed")
    sites[1].lose("killed")
    opening = asyncio.create_task(_open(spread).__aenter__())
    await asyncio.sleep(0)
    assert not opening.done()
    sites[1].serve(backends[1])  # type: ignore[arg-type]
    assert isinstance(await opening, Opened)
    sites[1].give_up("killed")
    with pytest.raises(SandboxUnavailableError, match="no machine of the cluster serves"):
        await _open(spread).__aenter__()
