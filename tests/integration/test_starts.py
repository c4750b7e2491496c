"""The processes that a GPU recipe starts, compared with its plan: commands, environments, GPUs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from swerl.cli._plan_view import _rows
from swerl.cluster.node import LocalNode, Node, ProcessEnd, ProcessSpec
from swerl.cluster.open import Nodes, open_nodes, place
from swerl.cluster.sglang_servers import node_servers
from swerl.core.errors import RecipeError
from swerl.engines import sglang
from swerl.plan.plan import RecipePlan, plan
from swerl.recipe.load import load
from swerl.rollout.wiring import sglang_launch
from swerl.training.options import TrainerOptions
from swerl.training.trainer import READ_BYTES_PER_S, START_S, MegatronTrainer, start_limit_s
from tests.sglang_cpu.configs import config_of
from tests.sglang_cpu.interpreter import sglang_python

ROOT = Path(__file__).parents[2]
CPU = ROOT / "tests" / "sglang_cpu"
GPU_RECIPES = [
    path for path in sorted((ROOT / "recipes").glob("*.toml")) if load([path]).cluster.gpus_per_node
]


class Started:
    """Implements RunningProcess: the first line that it answers is `ready`."""

    pid, node = 1, "n"

    def __init__(self) -> None:
        self.ended = asyncio.ensure_future(self._end())
        self._asked_to_end = asyncio.Event()
        self._lines = [b'{"result": "ready"}\n']

    async def _end(self) -> ProcessEnd:
        await asyncio.sleep(0)
        await self._asked_to_end.wait()
        return ProcessEnd(0)

    async def signal(self, number: int) -> None:
        self._asked_to_end.set()

    async def send(self, line: bytes) -> None:
        self._asked_to_end.set()

    async def receive(self) -> bytes:
        return self._lines.pop() if self._lines else b""


class Recording:
    """Implements Node: keeps what would start on it."""

    def __init__(self, name: str, gpus: tuple[str, ...], specs: list[ProcessSpec]) -> None:
        self.name, self.address, self.gpus, self._specs = name, "127.0.0.1", gpus, specs

    async def start(self, spec: ProcessSpec) -> Started:
        self._specs.append(spec)
        return Started()

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


async def _machines(found: RecipePlan, tmp_path: Path) -> Nodes:
    recipe = found.recipe
    if recipe.cluster.launcher == "local":
        async with open_nodes(recipe) as nodes:
            return nodes
    gpus = tuple(map(str, range(recipe.cluster.gpus_per_node)))
    machines: list[Node] = [LocalNode(name=f"n{n}", gpus=gpus) for n in range(recipe.cluster.nodes)]
    return place(recipe, machines)


async def _rank_gpus(found: RecipePlan, nodes: Nodes, tmp_path: Path) -> list[tuple[str, str]]:
    """Start the trainer on nodes that only record; return machine and GPU of each rank."""
    recipe = found.recipe
    kept: list[tuple[str, ProcessSpec]] = []
    recording = []
    for node in nodes.trainer:
        specs: list[ProcessSpec] = []
        recording.append((node.name, specs, Recording(node.name, node.gpus, specs)))
    options = TrainerOptions(
        **recipe.trainer.model_dump(),
        steps=1,
        checkpoint_dir=tmp_path,
        publish_dir=tmp_path,
        log_dir=tmp_path,
    )
    trainer = MegatronTrainer(
        model=tmp_path,
        family=recipe.model.family,
        algorithm=recipe.algorithm.type,
        options=options,
        nodes=[each for *_, each in recording],
    )
    await trainer.start()
    await trainer.close()
    for name, specs, _ in recording:
        kept += [(name, spec) for spec in specs]
    if not recipe.cluster.gpus_per_node:
        return [(name, spec.env["CUDA_VISIBLE_DEVICES"]) for name, spec in kept]
    # NCCL's way of sharing memory must be the engines' one, whose setting is checked below.
    assert {spec.env["NCCL_CUMEM_ENABLE"] for _, spec in kept} == {"0"}
    assert {spec.env["CUDA_DEVICE_MAX_CONNECTIONS"] for _, spec in kept} == {"1"}
    return [(name, spec.env["CUDA_VISIBLE_DEVICES"]) for name, spec in kept]


async def _engines(
    found: RecipePlan, nodes: Nodes, tmp_path: Path
) -> list[tuple[str, tuple[str, ...], Mapping[str, str]]]:
    """Return machine, command and environment of each server that would start."""
    recipe = found.recipe
    options, flags = sglang_launch(recipe)
    hosts = await node_servers(
        nodes.engines, options, tmp_path, cluster=recipe.cluster, logs=tmp_path, flags=flags
    )
    return [(host.node.name, host.spec.argv, host.spec.env) for host in hosts]


def _planned(name: str, *settings: str) -> RecipePlan:
    return plan(load([ROOT / f"recipes/{name}.toml"], settings))


def _flags(command: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, _, value in (each.partition("=") for each in command[3:])}


def _gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(env["CUDA_VISIBLE_DEVICES"].split(","))


@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
async def test_a_recipe_starts_what_its_plan_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = plan(load([path]))
    nodes = await _machines(found, tmp_path)
    ranks = await _rank_gpus(found, nodes, tmp_path)
    engines = await _engines(found, nodes, tmp_path)
    layout = found.layout
    assert len(ranks) == layout.ranks and len(set(ranks)) == layout.ranks
    assert len(engines) == layout.num_engines
    held = [(name, gpu) for name, _, env in engines for gpu in _gpus(env)]
    if layout.colocated:
        # The k-th engine rank uses the GPU of the k-th trainer rank.
        assert held == ranks
    else:
        assert len({*held, *ranks}) == len(held) + len(ranks) == layout.num_gpus
    for _, command, env in engines:
        flags = _flags(command)
        assert found.memory is not None
        cache = found.memory.cache
        assert float(flags["--mem-fraction-static"]) == cache.share
        assert int(flags["--cuda-graph-max-bs-decode"]) == cache.batch >= cache.sequences
        assert ("--json-model-override-args" in flags) == (
            "Qwen3.6" in str(found.recipe.model.path)
        )
        # The dry run shows this command, but for the model and the address.
        shown = dict(_rows(found))["engines"].partition("started with ")[2].split()
        assert set(command[3:]) - set(shown) == {
            f"{name}={flags[name]}" for name in ("--model-path", "--host", "--port")
        }
        assert env["NCCL_CUMEM_ENABLE"] == "0"
        assert len(_gpus(env)) == layout.gpus_per_engine
        assert {f"--tp-size={layout.gpus_per_engine}", "--dtype=bfloat16"} <= {*command}
        assert command.count("--enable-memory-saver") == layout.colocated


async def test_engines_beside_the_trainer_on_one_node_have_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    found = _planned(
        "qwen4b_1node", "cluster.colocate=false", "trainer.ranks=4", "cluster.gpus_per_engine=2"
    )
    nodes = await _machines(found, tmp_path)
    ranks = await _rank_gpus(found, nodes, tmp_path)
    engines = await _engines(found, nodes, tmp_path)
    assert [gpu for _, gpu in ranks] == ["7", "6", "5", "4"]
    assert [_gpus(env) for *_, env in engines] == [("3", "2"), ("1", "0")]
    assert all("--enable-memory-saver" not in command for _, command, _ in engines)
    assert len(nodes.all) == 1


async def test_a_recipe_without_gpus_hides_those_of_the_machine(tmp_path: Path) -> None:
    found = _planned("twin_cpu", "trainer.ranks=2", "engine.type=sglang")
    nodes = Nodes((LocalNode(name="n1"),), (LocalNode(name="n1"),))
    assert await _rank_gpus(found, nodes, tmp_path) == [("n1", ""), ("n1", "")]
    servers = await node_servers(
        nodes.engines, sglang.Options(), tmp_path, cluster=found.recipe.cluster, logs=tmp_path
    )
    assert [server.spec.env["CUDA_VISIBLE_DEVICES"] for server in servers] == [""]


def test_the_time_to_start_grows_with_the_model_and_the_nodes(tmp_path: Path) -> None:
    assert start_limit_s(tmp_path, 8) == START_S
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(int(4 * READ_BYTES_PER_S))
    assert start_limit_s(tmp_path, 1) == START_S + 4
    assert start_limit_s(tmp_path, 8) == START_S + 32


def test_ranks_that_leave_a_part_of_a_node_unused_are_refused() -> None:
    with pytest.raises(RecipeError, match="fill whole nodes"):
        _planned("qwen35b_8node", "cluster.colocate=false", "trainer.ranks=12")


def test_an_engine_larger_than_a_node_is_an_obstacle() -> None:
    found = _planned("qwen35b_8node", "cluster.gpus_per_engine=16")
    assert any("one node at most" in each.hint for each in found.obstacles)


async def test_fewer_visible_gpus_than_the_recipe_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RecipeError, match="CUDA_VISIBLE_DEVICES"):
        await _machines(_planned("qwen4b_1node"), tmp_path)


async def test_flags_of_the_recipe_replace_those_of_the_plan() -> None:
    given = '["--mem-fraction-static=0.7", "--cuda-graph-max-bs-decode", "40"]'
    found = _planned("qwen35b_8node", f"engine.flags={given}")
    assert found.memory is not None
    assert (found.memory.cache.share, found.memory.cache.batch) == (0.7, 40)
    text_only = '--json-model-override-args={"language_model_only":true}'
    assert found.engine_flags == ("--enable-fp32-lm-head", text_only)


@pytest.fixture(scope="module", params=["sglang==0.5.21", "sglang"])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel of a release of SGLang: the tested one, and the newest."""
    sglang_python()
    folder = tmp_path_factory.mktemp("sglang")
    pip = [os.environ["SWERL_SGLANG_PYTHON"], "-m", "pip", "download", "-q", "--no-deps"]
    command = [*pip, "-d", str(folder), request.param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr[-300:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


async def test_sglang_resolves_the_command_of_every_recipe(release: Path, tmp_path: Path) -> None:
    plans = {path.stem: plan(load([path])) for path in GPU_RECIPES}
    commands = {}
    for name, found in plans.items():
        assert found.recipe.model.path is not None
        model = tmp_path / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config_of(found.recipe.model.path.name)))
        (_, command, _), *_ = await _engines(found, await _machines(found, tmp_path), model)
        commands[name] = command[3:]
    lines = "".join(json.dumps(command) + "\n" for command in commands.values())
    env = {**os.environ, "PYTHONPATH": f"{release}:{CPU / 'stand_ins'}", "OMP_NUM_THREADS": "1"}
    program = [os.environ["SWERL_SGLANG_PYTHON"], str(CPU / "resolve.py")]
    done = await asyncio.to_thread(
        subprocess.run, program, input=lines, env=env, capture_output=True, text=True, timeout=600
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(plans), done.stderr[-2000:]
    for (name, found), answer in zip(plans.items(), answers, strict=True):
        assert "error" not in answer, f"{name}: {answer['error']}"
        assert not answer["reads_images"], name
        resolved = answer["resolved"]
        assert found.memory is not None
        assert resolved["mem_fraction_static"] == found.memory.cache.share
        assert resolved["tp_size"] == found.layout.gpus_per_engine
        assert resolved["enable_memory_saver"] == found.layout.colocated
        assert resolved["enable_fp32_lm_head"]


def test_an_engine_never_captures_more_replies_than_sglang_itself() -> None:
    found = _planned("qwen4b_1node", "rollout.concurrency=4000")
    # Four GPUs an engine: SGLang itself captures up to 512 there.
    assert "--cuda-graph-max-bs-decode=512" in found.engine_flags


async def test_settings_of_servers_without_a_cluster_are_refused_with_one() -> None:
    found = _planned("qwen4b_1node", "engine.servers=8")
    with pytest.raises(RecipeError, match="do nothing beside"):
        sglang_launch(found.recipe)
