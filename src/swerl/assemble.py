"""From a Recipe to wired objects: the one place that knows which part goes where."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from swerl import plugins
from swerl.cluster.node import Node
from swerl.cluster.open import Nodes, open_nodes
from swerl.cluster.preflight import require_fit
from swerl.cluster.sglang_servers import serve_on
from swerl.engines import sglang
from swerl.errors import RankLostError, RecipeError
from swerl.gateway.app import Gateway
from swerl.gateway.orders import WorkerSetup
from swerl.gateway.pool import GatewayPool
from swerl.gateway.sessions import SessionSource
from swerl.gateway.speakers import HistoryPolicy
from swerl.images.ondemand import on_demand
from swerl.interfaces import (
    ChatEngine,
    Engine,
    EngineSetup,
    Family,
    ParserChoice,
    SandboxBackend,
    SharedEngine,
)
from swerl.ledger import reap
from swerl.ledger.store import default_ledger
from swerl.ledger.tracked import tracked
from swerl.recipe.check import PLUGIN_SECTIONS, plugin_options
from swerl.recipe.schema import Recipe
from swerl.rollout.gate import Gate
from swerl.rollout.parts import Parts
from swerl.rollout.provision import Provisioner
from swerl.rollout.reward import rule
from swerl.run import history
from swerl.run.events import Emit, Notice, Progress, fan_out, ignore
from swerl.run.history import EventLog, History
from swerl.run.layout import RunFolder, open_run
from swerl.run.presence import Part, Presence, present
from swerl.run.standing import require_alone
from swerl.sandbox import Limits
from swerl.task import Task, read_tasks
from swerl.tasks import twin
from swerl.tasks.admission import of_difficulty, require_certified, require_time
from swerl.training import loop
from swerl.training.accounts import Accounts
from swerl.training.disk import plan_disk
from swerl.training.meter import Meter
from swerl.training.metrics import open_sinks
from swerl.training.options import TrainerOptions
from swerl.training.picture import draw
from swerl.training.shape import shape_of
from swerl.training.trainable import check_trainable
from swerl.training.trainer import MegatronTrainer
from swerl.training.warmstart import warm_start
from swerl.training.weight_sync import choose_way


async def train(recipe: Recipe, root: Path, show: Emit) -> History:
    """Run a recipe in its run folder to the end, or on from where it stands."""
    if recipe.tasks.source != "twin" and not root.exists():
        await asyncio.to_thread(tasks_of, recipe, root)  # what is refused leaves no run behind
    require_alone(root)
    with open_run(root, recipe.model_dump(mode="json")) as folder, EventLog(folder.events) as log:
        if folder.read_state().finished:
            return history.read(folder.events)
        with open_sinks(recipe, root) as sinks:
            accounts = Accounts(recipe, fan_out(log, show, sinks), history.read(folder.events))
            async with present(root) as presence:
                await reap_leftovers(recipe, accounts)
                past = await _despite_deaths(recipe, folder, accounts, presence)
    draw(root, past)
    return past


async def _despite_deaths(
    recipe: Recipe, folder: RunFolder, emit: Accounts, presence: Presence
) -> History:
    """Train to the end; where a rank is lost, start again as often as the recipe allows."""
    left = recipe.trainer.restarts
    while True:
        try:
            async with _machine(recipe, folder, emit, presence) as machine:
                return await loop.run(machine)
        except (RankLostError, ExceptionGroup) as error:
            if not left or not _is_a_lost_rank(error):
                raise
            left -= 1
            emit(Notice(f"{error}; starting again from the last checkpoint, {left} more times"))


def _is_a_lost_rank(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_a_lost_rank(each) for each in error.exceptions)
    return isinstance(error, RankLostError)


def tasks_of(recipe: Recipe, scratch: Path) -> tuple[list[Task], dict[str, list[Task]]]:
    """Return the training Tasks, and the evaluation Tasks by split.

    Generated repositories are written under `scratch`. Raises RecipeError on training Tasks that
    the recipe does not admit.
    """
    chosen = recipe.tasks
    if chosen.source != "twin":
        heldout = {"heldout": list(read_tasks(Path(chosen.heldout)))} if chosen.heldout else {}
        tasks = list(read_tasks(Path(chosen.source)))
        if not tasks:
            message = f"{chosen.source} holds no task"
            raise RecipeError(message, hint="`swerl convert` says why rows were rejected")
        if not chosen.uncertified:
            require_certified(tasks, chosen.source)
        require_time(tasks, recipe.budgets.grading_s)
        if chosen.solve_rate:
            tasks = of_difficulty(tasks, chosen.solve_rate, chosen.source)
        return tasks, heldout
    sizes = {"train": chosen.num_train, "heldout": chosen.num_heldout, "unseen": chosen.num_unseen}
    made = {
        split: twin.make_tasks(scratch, split=split, count=count, seed=recipe.seed)
        for split, count in sizes.items()
        if count
    }
    return made.pop("train"), made


def family_of(recipe: Recipe, model: Path | None) -> Family:
    """Build the recipe's family for the model in this folder. Raises InputError."""
    return plugins.family(recipe.model.family, model, _parser_of(recipe))


def _parser_of(recipe: Recipe) -> ParserChoice | None:
    chosen = recipe.model
    if chosen.parser == "builtin":
        return None
    return ParserChoice(chosen.parser, chosen.parser_python)


def gateway_of(
    recipe: Recipe, engine: Engine | ChatEngine, setup: EngineSetup, emit: Emit = ignore
) -> Gateway | GatewayPool:
    """Return the recipe's gateway in front of an engine opened with `setup`, to be entered.

    Raises RecipeError where its processes could not reach the engine.
    """
    if recipe.gateway.processes > 1:
        return _pool_of(recipe, engine, setup, emit)
    return Gateway(
        engine=engine,
        family=setup.family,
        model_name=recipe.name,
        host=recipe.gateway.bind,
        port=recipe.gateway.port,
        history=HistoryPolicy(recipe.gateway.history),
        on_load=emit,
    )


def _pool_of(
    recipe: Recipe, engine: Engine | ChatEngine, setup: EngineSetup, emit: Emit
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
        ),
        num_processes=chosen.processes,
        host=chosen.bind,
        port=chosen.port,
        on_load=emit,
        on_death=lambda told: emit(Notice(told)),
    )


def parts_of(recipe: Recipe, gateway: SessionSource, emit: Emit) -> Parts:
    """Wire what Episodes share."""
    limits = Limits(**recipe.limits.model_dump(), lifetime_s=recipe.budgets.sandbox_s)
    return Parts(
        gateway=gateway,
        provisioner=Provisioner(
            sandbox_backend(recipe, emit), limits, concurrency=recipe.rollout.concurrency
        ),
        harness=plugin(recipe, "harness"),
        reward=rule(recipe.rollout.reward),
        rollout=recipe.rollout,
        budgets=recipe.budgets,
        seed=recipe.seed,
        emit=emit,
    )


async def reap_leftovers(recipe: Recipe, emit: Emit) -> None:
    """Remove the sandboxes that a killed start of the same run left, and say so."""
    left = await reap.reap_leftovers(default_ledger(), recipe.name)
    removed = sum(each.outcome is reap.Outcome.REMOVED for each in left)
    if removed:
        emit(Notice(f"removed {removed} sandboxes that an earlier start left"))
    problems = [each.problem for each in left if each.outcome is reap.Outcome.FAILED]
    if problems:
        emit(
            Notice(
                f"{len(problems)} sandboxes of an earlier start are left: {problems[0]}; "
                "mend that, then `swerl sandbox reap`"
            )
        )


@asynccontextmanager
async def _machine(
    recipe: Recipe, folder: RunFolder, show: Accounts, presence: Presence
) -> AsyncIterator[loop.Machine]:
    logs = folder.new_attempt()
    show(Progress("reading or writing tasks", 0, 1))
    train_tasks, evals = await asyncio.to_thread(tasks_of, recipe, folder.scratch)
    model = await _model(recipe, folder, logs, show)
    family = family_of(recipe, model)
    check_trainable(family, model)
    setup = EngineSetup(family=family, log_dir=logs, model=model)
    async with (
        open_nodes(recipe, logs) as nodes,
        _fit(recipe, nodes, folder, show),
        _trainer(recipe, folder, model, logs, nodes.trainer) as trainer,
        _engine(recipe, nodes, setup, show) as engine,
    ):
        presence.has(_parts_at_work(trainer))
        meter = Meter(engine)
        emit = fan_out(meter, show)
        choose_way(recipe.cluster, engine, emit)
        gate = _gate(recipe, engine)
        async with gateway_of(recipe, gate or engine, setup, emit) as gateway:
            yield loop.Machine(
                recipe=recipe,
                folder=folder,
                train=train_tasks,
                evals=evals,
                engine=engine,
                trainer=trainer,
                algorithm=plugin(recipe, "algorithm"),
                parts=parts_of(recipe, gateway, emit),
                meter=meter,
                gate=gate,
                stopping=lambda: presence.stopping() or show.is_spent(),
            )


@asynccontextmanager
async def _fit(recipe: Recipe, nodes: Nodes, folder: RunFolder, show: Emit) -> AsyncIterator[None]:
    """Look at the machines of a cluster before anything starts there. Raises ClusterError."""
    if recipe.cluster.launcher != "local":
        show(Progress("checking machines", 0, len(nodes.all)))
        disk_bytes = plan_disk(recipe, shape_of(recipe.model)).most
        await require_fit(recipe, nodes, folder.root, disk_bytes=disk_bytes)
    yield


@asynccontextmanager
async def _engine(
    recipe: Recipe, nodes: Nodes, setup: EngineSetup, show: Emit
) -> AsyncIterator[Engine]:
    """Open the recipe's engine; SGLang's servers of a cluster run on its machines."""
    chosen = recipe.engine
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
            emit=show,
        ) as urls,
        sglang.open(options.model_copy(update={"url": tuple(urls)}), setup) as engine,
    ):
        yield engine


def _parts_at_work(trainer: MegatronTrainer) -> tuple[Part, ...]:
    found = enumerate(zip(trainer.pids, trainer.hosts, strict=True))
    return tuple(Part(f"trainer-rank{rank}", pid, host) for rank, (pid, host) in found)


def _gate(recipe: Recipe, engine: Engine) -> Gate | None:
    """Return the gate that the schedule's rule for replies under way needs."""
    schedule = recipe.schedule
    if schedule.mode != "async" or schedule.replies == "keep":
        return None
    return Gate(engine, schedule.replies)


async def _model(recipe: Recipe, folder: RunFolder, logs: Path, emit: Emit) -> Path:
    """Return the run's initial model, copied into its folder so that the cache may go."""
    if recipe.model.path is not None:
        return recipe.model.path
    kept = folder.root / "initial_model"
    if not kept.exists():
        made = await warm_start(recipe, log_dir=logs, emit=emit)
        partial = kept.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(made, partial)
        partial.replace(kept)
    return kept


def _trainer(
    recipe: Recipe, folder: RunFolder, model: Path, logs: Path, nodes: Sequence[Node]
) -> MegatronTrainer:
    return MegatronTrainer(
        nodes=nodes,
        model=model,
        family=recipe.model.family,
        algorithm=recipe.algorithm.type,
        algorithm_options=recipe.algorithm.options,
        options=TrainerOptions(
            **recipe.trainer.model_dump(),
            steps=recipe.steps * recipe.trainer.updates_per_batch,
            seed=recipe.seed,
            temperature=recipe.rollout.temperature,
            checkpoint_dir=folder.checkpoints,
            publish_dir=folder.weights,
            log_dir=logs,
            weight_bucket_mib=recipe.cluster.weight_bucket_mib,
            weight_bucket_s=recipe.cluster.weight_bucket_s,
        ),
    )


def sandbox_backend(recipe: Recipe, emit: Emit) -> SandboxBackend:
    """Build what the recipe's sandbox section names."""
    options = plugin_options("sandboxes", recipe.sandbox, section="sandbox")
    return open_backend(
        recipe.sandbox.type, options, run=recipe.name, warn=lambda text: emit(Notice(text))
    )


def open_backend(
    backend: str,
    options: BaseModel | None,
    *,
    run: str,
    warn: Callable[[str], None] = lambda _: None,
) -> SandboxBackend:
    """Build a backend that pulls images where its settings say so and writes the ledger.

    `run` says what its sandboxes are used for; `warn` hears what stops nothing.
    """
    return on_demand(tracked(backend, options, run=run, warn=warn), options)


def plugin(recipe: Recipe, section: str, *needs: Any) -> Any:
    """Build (an engine: open) what a recipe's section names, with its validated settings."""
    chosen = getattr(recipe, section)
    kind = PLUGIN_SECTIONS[section]
    module = plugins.load(kind, chosen.type)
    options = plugin_options(kind, chosen, section=section)
    make = module.open if section == "engine" else module.build
    return make(*([] if options is None else [options]), *needs)
