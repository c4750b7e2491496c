"""verl's own worker judges what the example's agent loop returns; verl comes from an index.

Only what verl's agent loops import is installed, without dependencies: torch, Ray and transformers
are this environment's. verl's settings, client, worker, outputs and advantages are real. An engine
that records its calls stands for a server of verl, and a list for the queue, which starts Ray.
This file is also the program that runs in that environment: `python FILE FOLDER`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swerl.core.changes import edits
from swerl.core.chat import Message, Role
from swerl.core.task import Task, to_row
from swerl.core.turn import Sampling
from swerl.engines.families import tiny
from swerl.harnesses import builtin
from swerl.tasks import twin
from tests.unit.examples.packages import ROOT, install
from tests.unit.gateway._fakes import RecordingEngine

NEEDS = (
    "verl==0.9.1", "tensordict==0.10.0", "pyvers==0.2.3", "cloudpickle", "hydra-core==1.3.8",
    "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3", "codetiming", "pillow", "datasets>=3",
    "multiprocess", "dill", "xxhash", "pandas>=2", "cachetools", "uvicorn", "fastapi", "starlette",
    "TransferQueue==0.1.11", "pyzmq", "msgspec", "torchdata",
)  # fmt: skip
MODEL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512}
COLUMNS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
STEP = 3
DONE = Message(Role.ASSISTANT, "Nothing to do.")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Install verl and the example, and return what its worker stored for each Episode."""
    for module in ("torch", "ray", "transformers", "pyarrow"):
        pytest.importorskip(module, reason=f"the package {module} is not installed")
    folder = tmp_path_factory.mktemp("verl")
    site = folder / "verl"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    command = [*pip, "-t", str(site), *NEEDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"verl cannot be installed here: {done.stderr[-300:]}")
    shutil.rmtree(site / "tests", ignore_errors=True)  # the wheel of verl has it
    path = os.pathsep.join(map(str, (ROOT, install(ROOT / "examples" / "verl", folder), site)))
    env, program = {**os.environ, "PYTHONPATH": path}, [sys.executable, __file__, str(folder)]
    done = subprocess.run(
        program, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stored: dict[str, Any] = json.loads((folder / "cases.json").read_text())
    return stored


@pytest.mark.parametrize(("name", "reward"), [("solved", 1), ("forked", 1), ("unsolved", 0)])
def test_every_sampled_token_is_trained_once(cases: Any, name: str, reward: int) -> None:
    case, sampled, logprobs = cases[name], [], []
    for row in case["rows"]:
        ids, mask = row["prompts"] + row["responses"], row["response_mask"]
        trained = [n for n, is_trained in enumerate(mask) if is_trained]
        sampled += [row["responses"][n] for n in trained]
        logprobs += [row["rollout_log_probs"][n] for n in trained]
        assert len(row["prompts"]) <= 50
        assert any(ids[: len(prompt)] == prompt for prompt in case["seen"])
        assert row["rm_scores"] == [0.0] * (len(mask) - 1) + [reward]
    assert (sampled, logprobs) == (case["sampled"], case["logprobs"])
    assert case["steps"] == [STEP] * len(case["rows"])


def test_an_episode_has_one_vote_and_a_lost_one_none(cases: Any) -> None:
    assert cases["lost"]["keys"] == []
    assert [len(cases[name]["keys"]) for name in ("solved", "forked", "unsolved")] == [1, 2, 1]
    values = [sum(row) / sum(map(bool, row)) for row in cases["advantages"]]
    # One rollout of three failed: (1 - 2/3) / stdev(1, 1, 0), and (0 - 2/3) / the same.
    assert values == pytest.approx([0.577, 0.577, 0.577, -1.155], abs=1e-3)


def settings(folder: Path) -> Any:
    """Return verl's default settings for a new model folder, with the example's agent loop."""
    from omegaconf import OmegaConf
    from verl import trainer

    tiny.save_tokenizer(tiny.byte_tokenizer(), folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    recipe, loops = folder / "recipe.toml", folder / "loops.yaml"
    recipe.write_text('name = "for-verl"\nmodel.family = "tiny"\nrollout.max_new_tokens = 800\n')
    entry = {"name": "swerl", "_target_": "swerl_verl.loop.SwerlAgentLoop", "recipe": str(recipe)}
    loops.write_text(json.dumps([entry]))
    config = OmegaConf.load(Path(trainer.__file__).parent / "config/_generated_ppo_trainer.yaml")
    config.actor_rollout_ref.model.path = str(folder)
    rollout = config.actor_rollout_ref.rollout
    rollout.name, rollout.prompt_length, rollout.response_length = "vllm", 50, 8000
    rollout.agent.agent_loop_config_path = str(loops)
    return config


def client_of(config: Any, engine: RecordingEngine) -> Any:
    """Return verl's client of one server, which is no Ray actor."""
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    async def sample(request_id: str, prompt_ids: Any, sampling_params: Any, **_: Any) -> Any:
        sampling = Sampling(sampling_params["max_tokens"])
        reply = await engine.generate(prompt_ids, sampling, request_id)
        columns = {"token_ids": list(reply.ids), "log_probs": list(reply.logprobs)}
        extra = {"global_steps": STEP}
        return TokenOutput(**columns, stop_reason="completed", extra_fields=extra)

    class Client(LLMServerClient):  # type: ignore[misc]
        async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
            return "server", SimpleNamespace(generate=SimpleNamespace(remote=sample))

        def _release_server(self, server_id: str, request_id: str | None = None) -> None: ...

    return Client(config)


async def rolled_out(worker: Any, queue: Any, task: Task, session: int) -> dict[str, Any]:
    """Return keys and columns of what the worker stores for one rollout of a row."""
    stored: dict[str, Any] = {"keys": [], "rows": []}

    async def put(*, keys: list[str], fields: Any, tags: Any, partition_id: str) -> None:
        rows = [fields[number] for number in range(len(keys))]
        stored["rows"] = [{name: row[name].tolist() for name in COLUMNS} for row in rows]
        stored.update(keys=keys, steps=[tag["max_global_steps"] for tag in tags])

    queue.async_kv_batch_put = put
    await worker._run_agent_loop(
        {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True},
        {"step": STEP, "sample_index": 0, "rollout_n": session, "validate": False},
        trace=False, agent_name="swerl", uid="row", session_id=session, global_steps=STEP, index=0,
        raw_prompt=[{"role": "user", "content": task.prompt}],
        extra_info={"index": 0, "task": json.dumps(to_row(task))},
    )  # fmt: skip
    return stored


def advantages(keys: list[str], rows: list[dict[str, Any]]) -> Any:
    """Return verl's GRPO advantages of the rows of one prompt."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    tensors = {}
    for source, name in (("response_mask", "response_mask"), ("rm_scores", "token_level_rewards")):
        columns = [torch.tensor(row[source]) for row in rows]
        tensors[name] = torch.nn.utils.rnn.pad_sequence(columns, batch_first=True)
    batch = TensorDict(tensors, batch_size=len(rows))
    data = DataProto(batch, {"uid": np.array(["row"] * len(rows), dtype=object)})
    return compute_advantage_for_multi_trajectories(data, keys, "grpo").batch["advantages"].tolist()


async def main(folder: Path) -> None:
    """Roll out a solved, a forked, an unsolved and a lost Episode of one Task."""
    from swerl_verl import loop
    from verl.trainer.ppo.v1 import agent_loop_tq

    [task] = twin.make_tasks(folder / "twin", split="train", count=1, seed=3)
    gold = list(builtin.build(builtin.Options()).script(edits(task.gold_patch), task.workdir))
    lines = {"solved": gold, "forked": [DONE, *gold], "unsolved": [DONE], "lost": [DONE]}
    run, engine, config = builtin.Builtin.run, RecordingEngine(), settings(folder)
    agent_loop_tq.tq.init = lambda *args, **options: None
    kind = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = kind(config, client_of(config, engine))

    async def twice(self: Any, sandbox: Any, task: Task, endpoint: Any, budget_s: float) -> Any:
        await run(self, sandbox, replace(task, prompt="Look around."), endpoint, budget_s)
        return await run(self, sandbox, task, endpoint, budget_s)

    stored: dict[str, Any] = {}
    for session, (name, engine.lines) in enumerate(lines.items()):
        engine.calls.clear()
        builtin.Builtin.run = twice if name == "forked" else run  # type: ignore[method-assign]
        row = replace(task, image=f"{task.image}-gone") if name == "lost" else task
        stored[name] = await rolled_out(worker, agent_loop_tq.tq, row, session)
        stored[name]["seen"] = [call.prompt for call in engine.calls]
        stored[name]["sampled"] = [token for call in engine.calls for token in call.output]
        stored[name]["logprobs"] = [number for call in engine.calls for number in call.logprobs]
    await loop.close()
    keys = [key for case in stored.values() for key in case["keys"]]
    rows = [row for case in stored.values() for row in case["rows"]]
    stored["advantages"] = advantages(keys, rows)
    (folder / "cases.json").write_text(json.dumps(stored))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
