"""Build the rollout parts of a Recipe: Tasks, family, engine, gateway, sandboxes, Parts.

`training/` adds the trainer. Commands that need only some parts build them from here, so the
cluster is imported inside the two functions that training alone calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from pydantic import BaseModel

from swerl.core import plugins
from swerl.core.contracts import (
    Algorithm,
    ChatEngine,
    Engine,
    EngineSetup,
    Family,
    Harness,
    SandboxBackend,
)
from swerl.core.errors import InputError, RecipeError
from swerl.core.events import Emit, Notice, ignore
from swerl.core.experts import ExpertSpool
from swerl.core.sandbox import Limits
from swerl.core.task import Task, read_tasks
from swerl.gateway.prompting import HistoryPolicy
from swerl.gateway.server import Gateway
from swerl.grading.audit import Audit
from swerl.images.ondemand import on_demand
from swerl.recipe.check import PLUGIN_SECTIONS, plugin_options
from swerl.recipe.schema import Recipe
from swerl.recipe.sections import AgentSection, PluginSection
from swerl.rollout.parts import MixedAgent, Parts
from swerl.rollout.reward import reward_of
from swerl.rollout.sandbox_pool import SandboxPool
from swerl.sandboxes import ledger
from swerl.sandboxes.ledger import tracked
from swerl.tasks import twin
from swerl.tasks.admission import admitted

if TYPE_CHECKING:
    from swerl.cluster.node import Node
    from swerl.cluster.open import Nodes
    from swerl.engines import sglang

T = TypeVar("T")


def family_of(recipe: Recipe, model: Path | None) -> Family:
    """Build the recipe's family for the model in this folder. Raises InputError."""
    return plugins.family(recipe.model.family, model)


@asynccontextmanager
async def open_engine(
    recipe: Recipe, nodes: Nodes, setup: EngineSetup, emit: Emit
) -> AsyncIterator[Engine]:
    """Open the recipe's engine; with GPUs or a cluster, SGLang servers run on its nodes."""
    chosen, cluster = recipe.engine, recipe.cluster
    setup = replace(setup, notify=lambda text: emit(Notice(text)))
    placed = cluster.launcher != "local" or cluster.gpus_per_node > 0
    on_nodes = chosen.type == "sglang" and placed
    # With `url` the servers run already, and without a model a server has nothing to load.
    if not on_nodes or chosen.options.get("url") or setup.model is None:
        async with engine_of(recipe, setup) as opened:
            if not hasattr(opened, "generate"):
                raise RecipeError(
                    f"engine.type = {chosen.type!r} returns no token ids, so it cannot be trained",
                    hint="train with sglang, vllm or torch-cpu; `swerl rollout` takes this engine",
                )
            yield cast(Engine, opened)
        return
    from swerl.cluster.sglang_servers import serve_on
    from swerl.engines import sglang

    options, flags = sglang_launch(recipe)
    async with (
        serve_on(
            nodes.engines,
            options,
            setup.model,
            cluster=cluster,
            logs=setup.log_dir,
            flags=flags,
        ) as hosts,
        sglang.open_hosts(hosts, options, setup) as engine,
    ):
        yield engine


def sglang_launch(recipe: Recipe) -> tuple[sglang.Options, tuple[str, ...]]:
    """Return the settings of a run's SGLang servers, and the flags that its plan adds.

    Raises RecipeError on settings that only apply to servers without a cluster, and on a recipe
    without a plan.
    """
    from swerl.engines import sglang
    from swerl.plan.plan import plan

    options = sglang.Options.model_validate(recipe.engine.options)
    if recipe.cluster.gpus_per_node and (options.servers > 1 or options.gpus_per_server):
        raise RecipeError(
            "engine.servers and engine.gpus_per_server do nothing beside cluster.gpus_per_node",
            hint="remove them; cluster.gpus_per_engine sets size and number of the servers",
        )
    return options, plan(recipe).engine_flags


def gateway_of(
    recipe: Recipe,
    engine: Engine | ChatEngine,
    setup: EngineSetup,
    emit: Emit = ignore,
    *,
    spool: ExpertSpool | None = None,
) -> Gateway:
    """Return the recipe's gateway, not yet entered, in front of an engine opened with `setup`.

    Recorded experts go to `spool`, or stay in memory without one.
    """
    return Gateway(
        engine=engine,
        family=setup.family,
        model_name=recipe.name,
        history=HistoryPolicy(recipe.gateway.history),
        on_load=emit,
        spool=spool,
    )


def parts_of(
    recipe: Recipe, gateway: Gateway, emit: Emit, backend: SandboxBackend | None = None
) -> Parts:
    """Build the parts that Episodes share; the default backend is that of the recipe."""
    mix = _mix_of(recipe)
    return Parts(
        gateway=gateway,
        sandboxes=sandbox_pool_of(recipe, backend or sandbox_backend(recipe, emit)),
        harness=mix[0].harness if mix else harness_of(recipe),
        agent=mix[0].name if mix else recipe.agents[0].title,
        mix=mix,
        reward=reward_of(recipe.rollout.reward),
        rollout=recipe.rollout,
        budgets=recipe.budgets,
        seed=recipe.seed,
        emit=emit,
        audit=Audit(recipe.grading.audit, recipe.grading.flags),
    )


def sandbox_pool_of(recipe: Recipe, backend: SandboxBackend) -> SandboxPool:
    """Return the pool of the recipe's sandboxes."""
    # A sandbox lives no longer than its budget, even if this process is killed.
    limits = Limits(**recipe.limits.model_dump(), lifetime_s=recipe.budgets.sandbox_s)
    return SandboxPool(backend, limits, concurrency=recipe.rollout.concurrency)


def harness_of(recipe: Recipe, agent: PluginSection | None = None) -> Harness:
    """Build an agent's harness with its validated settings; the default is the only one.

    Raises RecipeError if there are several and none is named.
    """
    if agent is None and len(recipe.agents) > 1:
        names = ", ".join(section.type for section in recipe.agents)
        hint = "name one: --set harness.type=…"
        raise RecipeError(f"the recipe has several agents, and one is needed: {names}", hint=hint)
    chosen = agent or recipe.agents[0]
    options = plugin_options("harnesses", chosen, section="harness")
    module = plugins.load("harnesses", chosen.type)
    built = module.build(*([] if options is None else [options]))
    return _whole(built, Harness, f"agent {chosen.type}", optional=("script",))


def _whole(part: T, protocol: type, name: str, optional: Collection[str] = ()) -> T:
    """Return a part that has all members of its Protocol. Raises InputError if it has not."""
    members = {*protocol.__annotations__, *vars(protocol)} - {*optional}
    public = sorted(member for member in members if not member.startswith("_"))
    if lacking := [member for member in public if not hasattr(part, member)]:
        raise InputError(
            f"the {name} has no {', '.join(lacking)}",
            hint="docs/reference/contracts.md lists what it needs",
        )
    return part


def _mix_of(recipe: Recipe) -> tuple[MixedAgent, ...]:
    """Build the agents of `[[harness]]`; none for a single `[harness]`."""
    return tuple(
        MixedAgent(section.title, harness_of(recipe, section), share)
        for section, share in zip(recipe.agents, recipe.agent_shares, strict=True)
        if isinstance(section, AgentSection)
    )


def algorithm_of(recipe: Recipe) -> Algorithm:
    """Build the recipe's algorithm with its validated settings."""
    name = recipe.algorithm.type
    built = plugins.load("algorithms", name).build(*_options(recipe, "algorithm"))
    return _whole(built, Algorithm, f"algorithm {name}")


def engine_of(
    recipe: Recipe, setup: EngineSetup
) -> AbstractAsyncContextManager[Engine | ChatEngine]:
    """Open the recipe's engine with its validated settings."""
    module = plugins.load("engines", recipe.engine.type)
    return module.open(*_options(recipe, "engine"), setup)


def _options(recipe: Recipe, section: str) -> list[BaseModel]:
    options = plugin_options(PLUGIN_SECTIONS[section], getattr(recipe, section), section=section)
    return [] if options is None else [options]


def sandbox_backend(recipe: Recipe, emit: Emit) -> SandboxBackend:
    options = plugin_options("sandboxes", recipe.sandbox, section="sandbox")
    return open_backend(
        recipe.sandbox.type, options, run=recipe.name, warn=lambda text: emit(Notice(text))
    )


@asynccontextmanager
async def open_sandboxes(
    recipe: Recipe, nodes: Sequence[Node], *, logs: Path, emit: Emit
) -> AsyncIterator[SandboxBackend]:
    """Yield the backend of a run: on the controller's machine, or spread over the nodes.

    A node's server records its sandboxes in that node's ledger.
    """
    if not recipe.cluster.sandbox_cpus:
        yield sandbox_backend(recipe, emit)
        return
    from swerl.cluster.sandbox_servers import serve_sandboxes

    async with serve_sandboxes(nodes, recipe, logs=logs, emit=emit) as spread:
        yield spread


def open_backend(
    backend: str,
    options: BaseModel | None,
    *,
    run: str,
    warn: Callable[[str], None] = lambda _: None,
) -> SandboxBackend:
    """Build a backend that writes the ledger; `local` also pulls images that the store lacks.

    `run` names the user of its sandboxes in the ledger; `warn` receives harmless problems.
    """
    return on_demand(backend, tracked(backend, options, run=run, warn=warn))


async def reap_leftovers(recipe: Recipe, emit: Emit) -> None:
    """Remove the sandboxes that an earlier, killed start of the same run left."""
    results = await ledger.reap_leftovers(ledger.default_ledger(), recipe.name)
    removed = sum(result.outcome is ledger.Outcome.REMOVED for result in results)
    if removed:
        emit(Notice(f"removed {removed} sandboxes that an earlier start left"))
    problems = [result.reason for result in results if result.outcome is ledger.Outcome.FAILED]
    if problems:
        text = f"{len(problems)} sandboxes of an earlier start are left: {problems[0]}; "
        emit(Notice(text + "fix that, then run `swerl sandbox reap`"))


def tasks_of(recipe: Recipe, scratch: Path) -> tuple[list[Task], dict[str, list[Task]]]:
    """Return the training Tasks, and the evaluation Tasks by split.

    Generated repositories are written under `scratch`. Recorded Episodes need no training Task.
    Raises RecipeError if the recipe does not admit the training Tasks.
    """
    heldout, recorded = recipe.tasks.heldout, bool(recipe.sft.sources)
    if recorded and not recipe.sft.evaluate:
        return [], {}
    if recipe.tasks.source == "twin" and not (recorded and heldout):
        return _generated(recipe, scratch)
    evals = {"heldout": list(read_tasks(Path(heldout)))} if heldout else {}
    return [] if recorded else admitted(recipe), evals


def _generated(recipe: Recipe, scratch: Path) -> tuple[list[Task], dict[str, list[Task]]]:
    chosen = recipe.tasks
    sizes = {"train": chosen.num_train, "heldout": chosen.num_heldout, "unseen": chosen.num_unseen}
    splits = {
        split: twin.make_tasks(scratch, split=split, count=count, seed=recipe.seed)
        for split, count in sizes.items()
        if count
    }
    return splits.pop("train"), splits
