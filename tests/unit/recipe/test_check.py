"""Every key of a recipe that names something is looked up before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from swerl.core import plugins
from swerl.core.errors import InputError, RecipeError
from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.plan.plan import plan
from swerl.recipe.check import (
    PLUGIN_SECTIONS,
    check,
    check_flags,
    check_settings,
    obstacles,
)
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe
from swerl.tasks import twin

WRONG = {
    "tasks.source": ("nope.jsonl", "cannot read task file"),
    "tasks.heldout": ("nope.jsonl", "cannot read task file"),
    "model.family": ("qwn3", "unknown family 'qwn3'"),
    "model.path": ("nowhere", "is not a model folder"),
    "sandbox.type": ("locl", "unknown sandbox 'locl'"),
    "harness.type": ("bultin", "unknown agent 'bultin'"),
    "engine.type": ("sglng", "unknown engine 'sglng'"),
    "algorithm.type": ("gsop", "unknown algorithm 'gsop' (did you mean gspo"),
    "rollout.reward": ("solvd", "unknown reward 'solvd' (did you mean solved"),
    "sft.sources": ('["runs/none"]', "runs/none does not exist"),
    "metrics.sinks": ('["wandbb"]', "metrics.sinks"),
    "cluster.gpu": ("h20", "unknown GPU type 'h20' (did you mean h200"),
    "engine.python": ("/path/to/venv-sglang/bin/python", "is not a program"),
}
"""Keys that name something: a wrong name, and a part of its error."""
BESIDE = {
    "model.path": ["model.family=qwen3"],
    "sft.sources": ["algorithm.type=sft"],
    "algorithm.type": ["cluster.gpus_per_node=1", "cluster.gpus_per_engine=1"],
    "cluster.gpu": ["cluster.gpus_per_node=1", "cluster.gpus_per_engine=1"],
    "engine.python": ["engine.type=sglang"],
}
FREE = {
    "name": "the run's own name",
    "cost.prices": "own prices; `--dry-run` notes the unused ones",
    "grading.flags": "patterns: the schema compiles them",
    "metrics.project": "the project's own name",
}
"""Other keys with text, and why no name is looked up."""


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a recipe whose values are texts or paths."""
    for name, field in model.model_fields.items():
        some = get_args(field.annotation)
        # `harness` is a section or a list of them, each with a mark.
        parts = [field.annotation, *some, *(part for each in some for part in get_args(each))]
        inner = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        if inner:
            yield from _keys(inner[0], f"{prefix}{name}.")
        elif any(part in (str, Path) for part in parts) or name == "sinks":
            yield f"{prefix}{name}"


def _found(*settings: str) -> str:
    """Return every error that looking at a recipe finds."""
    try:
        recipe = load([], ["name=looked", *settings])
        # A model that is not here has no shape, so there is no plan.
        if recipe.model.path:
            return " | ".join(error.explained() for error in obstacles(recipe))
        planned = plan(recipe)
        seen = (*planned.obstacles, *planned.absent)
        return " | ".join(error.explained() for error in seen)
    except InputError as error:
        return error.explained()


def test_every_key_with_text_is_looked_up_or_has_a_reason() -> None:
    # The settings of plug-ins are checked by their own `Options`.
    assert {key for key in WRONG if key != "engine.python"} | set(FREE) == set(_keys(Recipe))


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_name_is_found_before_anything_starts(key: str) -> None:
    wrong, says = WRONG[key]
    assert says not in _found(*BESIDE.get(key, []))
    assert says in _found(*BESIDE.get(key, []), f"{key}={wrong}")


def test_a_recipe_with_defaults_alone_has_no_obstacle() -> None:
    recipe = load([], ["name=plain"])
    check(recipe)
    assert not list(obstacles(recipe))


def test_a_task_with_an_unknown_grader_is_an_obstacle(tmp_path: Path) -> None:
    (task,) = twin.make_tasks(tmp_path / "twin", split="heldout", count=1, seed=0)
    graded = replace(task, grading=replace(task.grading, grader="pytst"))
    write_tasks(tmp_path / "tasks.jsonl", [graded])
    assert "unknown grader 'pytst'" in _found(f"tasks.source={tmp_path / 'tasks.jsonl'}")


def test_every_plug_in_section_is_looked_up() -> None:
    assert {f"{section}.type" for section in PLUGIN_SECTIONS} <= set(WRONG)
    assert {*PLUGIN_SECTIONS.values()} < {*plugins.KINDS}


def test_a_rendering_that_contradicts_the_model_is_an_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    found = _found(f"model.path={tmp_path}", "model.family=tiny")
    assert "is not a tokenizer" in found


@pytest.mark.parametrize(
    ("flags", "mismatch", "found"),
    [
        (["--quantization", "fp8"], "none", "--quantization: the engine would sample from another"),
        (["--kv-cache-dtype=fp8_e4m3"], "none", "--kv-cache-dtype: the engine would sample"),
        (["--quantization", "fp8"], "token-tis", ""),
        (["--speculative-algorithm", "NGRAM"], "token-tis", "--speculative-algorithm: the log-pr"),
        (["--mem-fraction-static", "0.8"], "none", ""),
    ],
)
def test_flags_that_change_what_is_sampled_need_a_correction_or_are_refused(
    flags: list[str], mismatch: str, found: str
) -> None:
    given = [f"engine.flags={json.dumps(flags)}", f"algorithm.mismatch={mismatch}"]
    recipe = load([], ["name=flags", "engine.type=sglang", "algorithm.type=gspo", *given])
    with pytest.raises(RecipeError, match=found) if found else nullcontext():
        check_flags(recipe)


MIX = 'harness=[{type="builtin"},%s]'


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ('{type="bultin"}', "harness.1.type: unknown agent 'bultin'"),
        ('{type="builtin",name="b",max_trns=3}', "unknown recipe key harness.1.'max_trns'"),
        ('{type="builtin"}', "two agents of [[harness]] have the name 'builtin'"),
        ('{type="builtin",name="../b"}', "recipe key harness.1.name"),
        ('{type="builtin",weight=0}', "recipe key harness.1.weight = 0"),
        ('{type="builtin",held_out=1.5}', "recipe key harness.1.held_out = 1.5"),
        ("{weight=2}", "the recipe has no 'harness.1.type'"),
    ],
)
def test_every_agent_of_a_mix_is_looked_up(agent: str, says: str) -> None:
    assert says in _found(MIX % agent)
    assert not _found(MIX % '{type="builtin",name="b",weight=2,held_out=true,max_turns=3}')


def test_a_mix_trains_at_least_one_agent() -> None:
    assert "held out of training" in _found('harness=[{type="builtin",held_out=true}]')
    assert "harness = []" in _found("harness=[]")


def test_a_setting_of_one_agent_replaces_the_whole_mix() -> None:
    recipe = load([], ["name=a", MIX % '{type="pi",weight=3}', "harness.type=pi"])
    assert [each.type for each in recipe.agents] == ["pi"]
    assert recipe.agent_shares == (1.0,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.lr=inf"], "trainer.lr = inf"),
        (["rollout.temperature=nan"], "rollout.temperature = nan"),
        (["rollout.shaping.overlong=inf"], "rollout.shaping.overlong = inf"),
        (["cost.prices={h100_hour=inf}"], "cost.prices.h100_hour = inf"),
        (["algorithm.type=grpo", "algorithm.kl_coef=inf"], "algorithm.kl_coef = inf"),
        (["engine.type=sglang", "engine.start_timeout_s=inf"], "engine.start_timeout_s = inf"),
        (["algorithm.type=dapo", "algorithm.clip_low=2"], "algorithm.clip_low = 2"),
        (["steps=true"], "steps = True"),
        (["engine.type=torch-cpu", "engine.threads=true"], "engine.threads = True"),
        (["algorithm.type=gspo", "algorithm.clip_hgih=1"], "did you mean clip_high"),
        (["tasks.num_train=7"], "rollout.groups_per_step = 8, but there are 7 tasks"),
        (["tasks.source=two.jsonl"], "rollout.groups_per_step = 8, but there are 2 tasks"),
        (["trainer.warmup_steps=100"], "trainer.warmup_steps = 100, but the run has 45"),
        (["rollout.episodes_per_group=1"], "compares the episodes of a group"),
        (["budgets.tool_s=500"], "budgets.tool_s = 500 must be below budgets.agent_s = 120"),
        (["budgets.model_call_s=60"], "model_call_s = 60 must be below budgets.tool_s = 60"),
        (["budgets.sandbox_s=100"], "episode_s = 300 must be below budgets.sandbox_s = 100"),
        (["budgets.episode_s=200"], "agent_s + grading_s = 270 exceed episode_s = 200"),
        (["cluster.sandbox_cpus=4"], "cluster.sandbox_cpus = 4 with cluster.launcher = 'local'"),
        (
            ["cluster.sandbox_cpus=4", "cluster.launcher=ray", "sandbox.type=e2b"],
            "sandboxes of sandbox.type = 'e2b' run elsewhere",
        ),
        (["trainer.routing_replay=true"], "the engine does not record its experts"),
        (["schedule.mode=async", "cluster.gpus_per_node=8"], "needs engines beside the trainer"),
        (
            ["schedule.mode=async", "engine.type=sglang", "engine.pause_mode=abort"],
            "would cut off replies",
        ),
        (["engine.type=vllm", "cluster.gpus_per_node=8"], "uses no GPUs of the run"),
        (['sft.sources=["."]'], "compares new attempts"),
        (["sft.max_per_task=1"], "sft.sources names no folder"),
        (['sft.sources=["."]', "schedule.mode=async"], "is for new Episodes"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = GradingSpec(grader="command")
    write_tasks(Path("two.jsonl"), [Task(f"t{n}", "r", "i", "/w", "p", spec) for n in range(2)])
    with pytest.raises(RecipeError) as error:
        check(load([], ["name=r", *settings]))
    assert message in error.value.explained()


@pytest.mark.parametrize(
    "settings",
    [
        ["steps=2", "trainer.recompute=true", "trainer.warmup_steps=2"],
        ["cluster.sandbox_cpus=4", "cluster.launcher=ray"],
        ["schedule.mode=async", "engine.type=sglang"],
    ],
)
def test_settings_that_have_a_meaning_are_accepted(settings: list[str]) -> None:
    check_settings(load([], ["name=r", *settings]))
