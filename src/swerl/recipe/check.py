"""Check a recipe across its sections: nested budgets, installed plug-ins, valid settings."""

from __future__ import annotations

import difflib
import importlib.util
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ValidationError

from swerl.core import plugins
from swerl.core.errors import AbsentError, InputError, RecipeError, install_command
from swerl.core.files import read_json
from swerl.core.task import read_tasks
from swerl.recipe.schema import (
    BudgetsSection,
    ModelSection,
    Recipe,
    SftSection,
    TrainerSection,
)
from swerl.recipe.sections import INITIAL_MODEL, AgentSection, PluginSection, require_plain

TWIN = "twin"
"""Value of `tasks.source` that stands for the generated Tasks."""

PLUGIN_SECTIONS = {
    "sandbox": "sandboxes",
    "harness": "harnesses",
    "engine": "engines",
    "algorithm": "algorithms",
}
_COMPARING = frozenset({"gspo", "grpo", "dr-grpo", "dapo", "cispo", "reinforce-pp"})
"""Algorithms with an advantage within a Group, which is 0 if all its Episodes are solved."""
_SPECULATES = "--speculative-"
_QUANTISES = frozenset({"--quantization", "--kv-cache-dtype", "--torchao-config"})
"""Flags of SGLang that lower the precision of weights, or of keys and values."""
WIDE_CLIP = 0.01
"""Several times the largest published difference between engine and trainer, 1.5e-3 in the mean."""


def check(recipe: Recipe) -> None:
    """Raise on the first setting that cannot run here; start nothing.

    Raises RecipeError, and UnknownNameError on an unknown `type`.
    """
    check_settings(recipe)
    trainer = recipe.trainer
    if trainer.ranks % trainer.tensor_parallel:
        raise RecipeError(
            f"trainer.ranks = {trainer.ranks} is not a multiple of trainer.tensor_parallel",
            hint=f"tensor_parallel is {trainer.tensor_parallel}",
        )
    for obstacle in obstacles(recipe):
        raise obstacle


def check_settings(recipe: Recipe) -> None:
    """Raise RecipeError on the first setting that no machine can run."""
    check_budgets(recipe.budgets)
    check_rollout(recipe)
    check_group(recipe)
    check_warmup(recipe)
    check_schedule(recipe)
    check_replay(recipe)
    check_clip(recipe)
    check_flags(recipe)
    check_sft(recipe)
    check_sandboxes(recipe)


def _given_sections(recipe: Recipe) -> Iterator[tuple[str, str, PluginSection]]:
    """Yield key, kind and section of the plug-ins that a recipe names.

    Defaults are valid, and checking one would import it: `swerl rollout` needs no algorithm.
    """
    for key, kind in PLUGIN_SECTIONS.items():
        section = getattr(recipe, key)
        if isinstance(section, tuple):
            yield from ((f"{key}.{number}", kind, part) for number, part in enumerate(section))
        elif key in recipe.model_fields_set:
            yield key, kind, section


def check_agents(recipe: Recipe) -> None:
    """Raise RecipeError unless several agents have different names and one of them is trained."""
    agents = [agent for agent in recipe.agents if isinstance(agent, AgentSection)]
    names = [agent.title for agent in agents]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        message = f"two agents of [[harness]] have the name {twice[0]!r}"
        raise RecipeError(message, hint="set `name` in one of the tables")
    if agents and all(agent.held_out for agent in agents):
        hint = "remove held_out from the agents to train"
        raise RecipeError("every agent of [[harness]] is held out of training", hint=hint)


def check_rollout(recipe: Recipe) -> None:
    """Raise RecipeError unless a reply leaves room for a prompt, and a step has Tasks enough."""
    rollout = recipe.rollout
    if recipe.tasks.source == TWIN:
        require_enough(recipe.tasks.num_train, _least_tasks(recipe))
    if rollout.max_new_tokens >= rollout.max_context_tokens:
        message = f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt"
        hint = f"set it below rollout.max_context_tokens = {rollout.max_context_tokens}"
        raise RecipeError(message, hint=hint)


def check_group(recipe: Recipe) -> None:
    """Raise RecipeError if Groups are too small for an algorithm that compares their Episodes."""
    size = recipe.rollout.episodes_per_group
    if recipe.algorithm.type in _COMPARING and size < 2:
        raise RecipeError(
            f"rollout.episodes_per_group = {size}: algorithm.type = {recipe.algorithm.type!r} "
            "compares the episodes of a group, so nothing would be learned",
            hint="set rollout.episodes_per_group to 2 or more; 8 is usual",
        )


def check_warmup(recipe: Recipe) -> None:
    """Raise RecipeError if the learning rate would never reach its peak."""
    trainer = recipe.trainer
    num_updates = recipe.steps * trainer.updates_per_batch
    default = TrainerSection().warmup_steps  # short tries of a recipe need no other key
    if trainer.warmup_steps > max(num_updates, default):
        message = f"trainer.warmup_steps = {trainer.warmup_steps}, but the run has {num_updates}"
        raise RecipeError(message, hint="lower it: the learning rate would never reach trainer.lr")


def check_replay(recipe: Recipe) -> None:
    """Raise RecipeError if replay is on but the model has no experts or no one records them."""
    if not recipe.trainer.routing_replay:
        return
    if not recipe.engine.options.get("routed_experts"):
        message = "trainer.routing_replay = true, but the engine does not record its experts"
        hint = "set engine.type = 'sglang' and engine.routed_experts = true, or turn replay off"
        raise RecipeError(message, hint=hint)
    path = recipe.model.path
    if path is not None and (path / "config.json").exists() and not _num_experts(path):
        raise RecipeError(
            f"trainer.routing_replay = true, but {path} has no experts",
            hint="turn it off: replay is for mixture-of-experts models",
        )


def check_clip(recipe: Recipe) -> None:
    """Raise RecipeError if GSPO's clip would act on the engine's rounding instead of the policy.

    In bf16 an engine's mean log-probability of a row differs from the trainer's by 6e-4 to 1.5e-3,
    more than the usual clip, and always to the same side: rows with a negative advantage would lose
    their gradient.
    """
    algorithm, options = recipe.algorithm, recipe.algorithm.options
    corrected = options.get("mismatch", "none") != "none"
    if algorithm.type != "gspo" or recipe.trainer.dtype == "fp32" or corrected:
        return
    if min(float(options.get(key, 0)) for key in ("clip_low", "clip_high")) < WIDE_CLIP:
        message = (
            f"algorithm.type = 'gspo' with trainer.dtype = {recipe.trainer.dtype!r} clips the "
            "difference between engine and trainer: rows with a negative advantage would not learn"
        )
        hint = f"set algorithm.mismatch = 'token-tis', or both clips to {WIDE_CLIP:g} or more"
        raise RecipeError(message, hint=hint)


def check_flags(recipe: Recipe) -> None:
    """Raise RecipeError if a flag of SGLang makes its log-probabilities those of another policy.

    Quantised weights or keys and values are another policy, which a correction accounts for. Tokens
    of speculative decoding may lack log-probabilities or have those of its draft model.
    """
    algorithm, hint = recipe.algorithm, "leave the flag out of engine.flags"
    is_corrected = algorithm.options.get("mismatch", "none") != "none" or algorithm.type == "sft"
    for argument in recipe.engine.options.get("flags", ()):
        flag = argument.partition("=")[0]
        if flag.startswith(_SPECULATES):
            message = f"{flag}: the log-probabilities may not be the sampled tokens'"
            raise RecipeError(message, hint=hint)
        if flag in _QUANTISES and not is_corrected:
            message = f"{flag}: the engine would sample from another policy than the trainer's"
            raise RecipeError(message, hint=f"set algorithm.mismatch = 'token-tis', or {hint}")


def _num_experts(model: Path) -> int:
    """Return the number of experts in a model folder's config.json; 0 for a dense model."""
    config = read_json(model / "config.json")
    text = config.get("text_config") or config
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((text[name] for name in names if text.get(name)), 0)


def check_schedule(recipe: Recipe) -> None:
    """Raise RecipeError if rollouts and steps cannot use the machines as the recipe requires."""
    cluster = recipe.cluster
    is_shared = cluster.gpus_per_node > 0 and cluster.colocate
    launches = not recipe.engine.options.get("url")
    is_placed = launches and (cluster.gpus_per_node > 0 or cluster.launcher != "local")
    if recipe.engine.type == "vllm" and (is_shared or is_placed):
        message = "engine.type = 'vllm' uses no GPUs of the run, and lends none to its trainer"
        raise RecipeError(message, hint="set engine.url and cluster.colocate = false")
    if recipe.schedule.mode == "sync":
        return
    if is_shared:
        raise RecipeError(
            "schedule.mode = 'async' needs engines beside the trainer",
            hint="set cluster.colocate = false, or mode = 'sync'",
        )
    if recipe.engine.options.get("pause_mode") == "abort":
        raise RecipeError(
            "engine.pause_mode = 'abort' would cut off replies in schedule.mode = 'async'",
            hint="set another pause_mode, or schedule.mode = 'sync'",
        )


def check_sft(recipe: Recipe) -> None:
    """Raise RecipeError if recorded Episodes are to be trained in a way that needs new ones."""
    if not recipe.sft.sources:
        if recipe.sft != SftSection():
            raise RecipeError(
                "[sft] chooses Episodes, but sft.sources names no folder",
                hint='for example sft.sources = ["runs/twin"]',
            )
        return
    if recipe.schedule.mode != "sync":
        raise RecipeError(
            f"schedule.mode = {recipe.schedule.mode!r} is for new Episodes, not for sft.sources",
            hint="remove it: recorded Episodes wait for nothing",
        )
    if recipe.algorithm.type in _COMPARING:
        raise RecipeError(
            f"algorithm.type = {recipe.algorithm.type!r} compares new attempts with each other",
            hint="set algorithm.type = 'sft' to train on sft.sources",
        )


def check_sandboxes(recipe: Recipe) -> None:
    """Raise RecipeError if sandboxes cannot run on the cluster's machines."""
    if not recipe.cluster.sandbox_cpus:
        return
    asked = f"cluster.sandbox_cpus = {recipe.cluster.sandbox_cpus}"
    if recipe.cluster.launcher == "local":
        raise RecipeError(
            f"{asked} with cluster.launcher = 'local'",
            hint="set cluster.launcher = 'ray', or leave it 0",
        )
    if recipe.sandbox.type in ("e2b", "kubernetes"):
        message = f"{asked}, but sandboxes of sandbox.type = {recipe.sandbox.type!r} run elsewhere"
        hint = "set sandbox.type = 'local' or 'docker', or cluster.sandbox_cpus = 0"
        raise RecipeError(message, hint=hint)


def obstacles(recipe: Recipe) -> Iterator[InputError]:
    """Yield the reasons why a valid recipe cannot be launched here.

    Each is a name that nothing has, or an AbsentError. Raises RecipeError on agents without a name
    of their own, and on settings that an installed plug-in refuses.
    """
    check_agents(recipe)
    for key, kind, section in _given_sections(recipe):
        try:
            plugin_options(kind, section, section=key)
        except RecipeError:
            raise
        except InputError as error:
            yield _at(f"{key}.type", error)
    looked_up: tuple[tuple[str, Callable[[], object]], ...] = (
        ("rollout.reward", lambda: plugins.reward(recipe.rollout.reward)),
        ("model", lambda: _require_model(recipe.model)),
        ("tasks.source", lambda: _require_tasks(recipe.tasks.source, _least_tasks(recipe))),
        ("tasks.heldout", lambda: _require_tasks(recipe.tasks.heldout or TWIN)),
        ("sft.sources", lambda: _require_sources(recipe.sft.sources)),
    )
    for key, look_up in looked_up:
        try:
            look_up()
        except InputError as error:
            yield _at(key, error)
    yield from _missing_programs(recipe)
    for name in recipe.metrics.sinks:
        if importlib.util.find_spec(name) is None:
            message = f"metrics.sinks names {name!r}, which is not installed"
            yield RecipeError(message, hint=install_command(name))
    cluster = recipe.cluster
    if cluster.nodes > 1 and cluster.launcher == "local":
        message = f"cluster.nodes = {cluster.nodes} with cluster.launcher = 'local'"
        yield RecipeError(message, hint="set cluster.launcher = 'ray'")
    if 0 < cluster.gpus_per_node < cluster.gpus_per_engine and "url" not in recipe.engine.options:
        message = f"cluster.gpus_per_engine = {cluster.gpus_per_engine} is more than one node has"
        yield RecipeError(message, hint="swerl starts engines of one node at most")


def _at(key: str, error: InputError) -> InputError:
    """Return the error with the recipe key that it belongs to."""
    return type(error)(f"{key}: {error}", hint=error.hint)


def no_model(path: Path) -> RecipeError:
    """Build the error for a folder without a model."""
    hint = "give a folder in Hugging Face format"
    if path.name == INITIAL_MODEL:
        hint = f"the run {path.parent.name} makes it when it begins: train that run first"
    return AbsentError(f"model.path = {path} is not a model folder", hint=hint)


def _require_model(model: ModelSection) -> None:
    """Raise InputError unless the family is known and can read the model."""
    if model.family != plugins.AUTO_FAMILY:
        plugins.load("families", model.family)
    if model.path is None:
        return
    if not (model.path / "config.json").is_file():
        raise no_model(model.path)
    plugins.family(model.family, model.path)


def _least_tasks(recipe: Recipe) -> int:
    """Return the Tasks that a step takes; recorded Episodes take none."""
    return 0 if recipe.sft.sources else recipe.rollout.groups_per_step


def _require_tasks(source: str, least: int = 0) -> None:
    """Raise InputError unless the file has Tasks enough, and each names a grader that exists."""
    if source == TWIN:
        return
    if not Path(source).exists():
        message = f"cannot read task file {source}: it does not exist"
        raise AbsentError(message, hint="write it with `swerl convert` and `swerl tasks vet`")
    graders = Counter(task.grading.grader for task in read_tasks(Path(source)))
    if not graders:
        hint = "`swerl convert` prints why it rejects rows"
        raise RecipeError(f"{source} holds no task", hint=hint)
    for grader in sorted(graders):
        plugins.load("graders", grader)
    require_enough(graders.total(), least)


def require_enough(num_tasks: int, least: int) -> None:
    """Raise RecipeError if a step takes more Tasks than there are."""
    if num_tasks < least:
        message = f"rollout.groups_per_step = {least}, but there are {num_tasks} tasks"
        raise RecipeError(message, hint="lower it, or name more tasks")


def _require_sources(sources: Sequence[Path]) -> None:
    """Raise InputError unless each is a folder."""
    for path in sources:
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            hint = "give the folder of a run, or of `swerl rollout` or `serve`"
            raise AbsentError(f"{path} {what}", hint=hint)


def _missing_programs(recipe: Recipe) -> Iterator[InputError]:
    """Yield the interpreters and commands that this machine lacks."""
    if recipe.cluster.launcher != "local" or recipe.engine.options.get("url"):
        return
    program = recipe.engine.options.get("python")
    if program is not None and shutil.which(str(program)) is None:
        message = f"engine.python = {str(program)!r} is not a program on this machine"
        yield AbsentError(message, hint="give the path of an executable file")


def check_budgets(budgets: BudgetsSection) -> None:
    """Raise RecipeError unless every budget is below the one that contains it."""
    chain = [
        ("model_call_s", budgets.model_call_s),
        ("tool_s", budgets.tool_s),
        ("agent_s", budgets.agent_s),
        ("grading_s", budgets.grading_s),
        ("episode_s", budgets.episode_s),
        ("sandbox_s", budgets.sandbox_s),
    ]
    for (inner, inner_s), (outer, outer_s) in pairwise(chain):
        if inner_s >= outer_s:
            raise RecipeError(
                f"budgets.{inner} = {inner_s:g} must be below budgets.{outer} = {outer_s:g}",
                hint=f"raise {outer} or lower {inner}",
            )
    needed_s = budgets.agent_s + budgets.grading_s
    if needed_s > budgets.episode_s:
        raise RecipeError(
            f"agent_s + grading_s = {needed_s:g} exceed episode_s = {budgets.episode_s:g}",
            hint=f"set budgets.episode_s to {needed_s:g} or more",
        )


def plugin_options(kind: str, chosen: PluginSection, *, section: str) -> BaseModel | None:
    """Return the plug-in's validated `Options`, or None if it has none.

    Raises UnknownNameError on an unknown `type`, RecipeError on settings that it refuses.
    """
    model = plugins.options_of(kind, chosen.type)
    if model is None:
        if chosen.options:
            raise RecipeError(
                f"{section}.type = {chosen.type!r} has no settings",
                hint=f"remove {', '.join(chosen.options)}",
            )
        return None
    for key, value in chosen.options.items():
        try:
            require_plain(model, key, value)
        except ValueError as error:
            raise RecipeError(f"recipe key {section}.{key} = {value!r} {error}") from error
    try:
        return model.model_validate(chosen.options)
    except ValidationError as error:
        raise _explain(error, model, section) from error


def _explain(error: ValidationError, model: type[BaseModel], section: str) -> RecipeError:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, model.model_fields, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near or sorted(model.model_fields))}?"
        return RecipeError(f"unknown recipe key {section}.{name!r}", hint=hint)
    message = f"recipe key {section}.{name} = {first.get('input')!r}: {first['msg']}"
    return RecipeError(message, hint="docs/reference/recipe.md lists every key with its unit")
