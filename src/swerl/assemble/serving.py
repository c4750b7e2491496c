"""The side that samples: family, engine, the gate before it, and the gateway before both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from swerl import plugins
from swerl.assemble.plugin import plugin
from swerl.cluster.open import Nodes
from swerl.cluster.sglang_servers import serve_on
from swerl.engines import sglang
from swerl.errors import RecipeError
from swerl.gateway.app import Gateway
from swerl.gateway.orders import WorkerSetup
from swerl.gateway.pool import GatewayPool
from swerl.gateway.speakers import HistoryPolicy
from swerl.interfaces import ChatEngine, Engine, EngineSetup, Family, ParserChoice, SharedEngine
from swerl.recipe.schema import Recipe
from swerl.rollout.gate import Gate
from swerl.run.events import Emit, Notice, ignore
from swerl.run.expert_spool import ExpertSpool


def family_of(recipe: Recipe, model: Path | None) -> Family:
    """Build the recipe's family for the model in this folder. Raises InputError."""
    return plugins.family(recipe.model.family, model, _parser_of(recipe))


def _parser_of(recipe: Recipe) -> ParserChoice | None:
    chosen = recipe.model
    if chosen.parser == "builtin":
        return None
    return ParserChoice(chosen.parser, chosen.parser_python)


@asynccontextmanager
async def open_engine(
    recipe: Recipe, nodes: Nodes, setup: EngineSetup, emit: Emit
) -> AsyncIterator[Engine]:
    """Open the recipe's engine; SGLang's servers of a cluster run on its machines."""
    chosen = recipe.engine
    setup = replace(setup, tell=lambda said: emit(Notice(said)))
    on_nodes = chosen.type == "sglang" and recipe.cluster.launcher != "local"
    if not on_nodes or chosen.options.get("url") or setup.model is None:
        async with plugin(recipe, "engine", setup) as engine:
            yield engine
        return
    options = sglang.Options.model_validate(chosen.options)
    async with (
        serve_on(
            nodes.engines,
            options,
            setup.model,
            cluster=recipe.cluster,
            logs=setup.log_dir,
        ) as hosts,
        sglang.open_hosts(hosts, options, setup) as engine,
    ):
        yield engine


def gate_of(recipe: Recipe, engine: Engine) -> Gate | None:
    """Return the gate that the schedule's rule for replies under way needs."""
    schedule = recipe.schedule
    if schedule.mode != "async" or schedule.replies == "keep":
        return None
    return Gate(engine, schedule.replies)


def gateway_of(
    recipe: Recipe,
    engine: Engine | ChatEngine,
    setup: EngineSetup,
    emit: Emit = ignore,
    *,
    spool: ExpertSpool | None = None,
) -> Gateway | GatewayPool:
    """Return the recipe's gateway in front of an engine opened with `setup`, to be entered.

    Experts that the engine records go to `spool`, or stay in memory where there is none. Raises
    RecipeError where the gateway's processes could not reach the engine.
    """
    if recipe.gateway.processes > 1:
        return _pool_of(recipe, engine, setup, emit, spool)
    return Gateway(
        engine=engine,
        family=setup.family,
        model_name=recipe.name,
        host=recipe.gateway.bind,
        port=recipe.gateway.port,
        history=HistoryPolicy(recipe.gateway.history),
        on_load=emit,
        spool=spool,
    )


def _pool_of(
    recipe: Recipe,
    engine: Engine | ChatEngine,
    setup: EngineSetup,
    emit: Emit,
    spool: ExpertSpool | None,
) -> GatewayPool:
    chosen = recipe.gateway
    if not isinstance(engine, SharedEngine):
        message = f"gateway.processes = {chosen.processes}, and only one can reach this engine"
        hint = f"engine.type = {recipe.engine.type!r} has no URL; set gateway.processes = 1"
        raise RecipeError(message, hint=hint)
    return GatewayPool(
        WorkerSetup(
            engine=engine.address(),
            family=recipe.model.family,
            model=setup.model,
            model_name=recipe.name,
            history=HistoryPolicy(chosen.history),
            log_dir=setup.log_dir,
            parser=_parser_of(recipe),
            spool=spool,
        ),
        num_processes=chosen.processes,
        host=chosen.bind,
        port=chosen.port,
        on_load=emit,
        on_death=lambda told: emit(Notice(told)),
    )
