"""Measure `swerl why`: 24 planted faults and healthy runs of a small twin.

    python bench/why.py                      everything; minutes of two idle cores
    python bench/why.py --only lr-zero       one fault, by its name
    python bench/why.py --half odd           the faults of odd, or even, number
    python bench/why.py --healthy 20         short healthy runs of other seeds, no fault

Each fault is planted in the real twin (agent, gateway, engine, sandboxes, tests, trainer) of three
steps, or, where it says `record`, in the records of a healthy run, as the fault would change them.
All runs share one trainer and one engine, which are reset to the warm-started weights before each;
only faults of the optimizer have their own. Prints a table and writes why.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from _why_faults import FAULTS, VARIANTS, Case

from swerl.core.contracts import EngineSetup
from swerl.core.events import fan_out, ignore
from swerl.engines import torch_cpu
from swerl.recipe.schema import Recipe
from swerl.rollout.wiring import algorithm_of, family_of, gateway_of, parts_of, tasks_of
from swerl.runs import evidence, why
from swerl.runs.history import EventLog, RunHistory
from swerl.runs.layout import open_run
from swerl.runs.status import own_run
from swerl.training import loop
from swerl.training.efficiency import CostMeter
from swerl.training.step_metrics import StepTimer
from swerl.training.train import open_training
from swerl.training.warm_start import warm_start

STEPS = 3
SMALL: dict[str, Any] = {
    "name": "why",
    "steps": STEPS,
    "tasks": {"num_train": 32, "num_heldout": 6, "num_unseen": 0},
    "rollout": {"groups_per_step": 6, "episodes_per_group": 4, "concurrency": 4},
    "trainer": {"ranks": 1, "warmup_steps": 2, "save_every": 1000},
}


class _TwoEngines:
    """Engine of every other session is one that gets no new weights, and does not say so."""

    def __init__(self, updated: Any, stale: Any) -> None:
        self._updated, self._stale = updated, stale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updated, name)

    async def generate(self, ids: Any, sampling: Any, session: str) -> Any:
        if session[-1] in "02468":
            return await self._updated.generate(ids, sampling, session)
        version = self._updated.pool.served[-1].version
        return replace(await self._stale.generate(ids, sampling, session), weight_version=version)


class _Kept:
    """The session's trainer for one run: checkpoints are not written."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def save(self, step: int, *, kept: Sequence[int] = ()) -> None:
        pass

    async def saved(self) -> None:
        return None


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings; later ones win."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = found.get(key)
            both = isinstance(old, dict) and isinstance(value, Mapping)
            found[key] = merged(old, value) if both else value
    return found


@asynccontextmanager
async def session(out: Path, model: Path, trainer: Mapping[str, Any]) -> AsyncIterator[Any]:
    """Open trainer, engine and sandboxes once; yield a function that runs one case on them."""
    base = merged(SMALL, {"model": {"path": str(model), "family": "tiny"}})
    recipe = Recipe.model_validate(merged(base, {"trainer": trainer, "name": "session"}))
    root = out / f".session-{len(list(out.glob('.session-*')))}"
    with open_run(root, recipe.model_dump(mode="json")) as folder:
        costs = CostMeter(recipe, ignore, RunHistory())
        async with own_run(root) as owner, open_training(recipe, folder, costs, owner) as opened:
            await opened.trainer.save(0)
            await opened.trainer.saved()

            async def run(case: Case) -> Path:
                chosen = {"seed": case.seed, "name": case.folder, "trainer": trainer}
                made = Recipe.model_validate(merged(base, chosen, case.recipe))
                await opened.trainer.restore(0)
                await run_case(case, made, out, opened, model)
                return out / case.folder

            yield run


async def run_case(case: Case, recipe: Recipe, out: Path, opened: Any, model: Path) -> None:
    """Run one case in a folder of its own; a run that ends by an error keeps its records."""
    root = out / case.folder
    shutil.rmtree(root, ignore_errors=True)
    async with AsyncExitStack() as planted:
        folder = planted.enter_context(open_run(root, recipe.model_dump(mode="json")))
        log = planted.enter_context(EventLog(folder.events))
        train, evals = tasks_of(recipe, out / ".tasks")
        case.tasks(train, evals, out / ".tasks")
        for patch in case.patches():
            planted.enter_context(patch)
        engine, timer = opened.engine, StepTimer(opened.engine)
        emit = fan_out(timer, log)
        setup = EngineSetup(family=family_of(recipe, model), log_dir=root / "logs", model=model)
        if case.second_engine:
            second = torch_cpu.open(torch_cpu.Options(), setup)
            engine = _TwoEngines(engine, await planted.enter_async_context(second))
        gateway = await planted.enter_async_context(gateway_of(recipe, engine, setup, emit))
        backend = opened.parts.provisioner._backend
        training = replace(
            opened,
            recipe=recipe,
            folder=folder,
            train=train,
            evals=evals,
            engine=engine,
            trainer=_Kept(opened.trainer),
            algorithm=algorithm_of(recipe),
            parts=parts_of(recipe, gateway, emit, backend),
            timer=timer,
        )
        try:
            async with own_run(root):
                await loop.run(training)
        except Exception as error:  # noqa: BLE001  the records of a failed run are judged, too
            print(f"  {case.name} ended by {type(error).__name__}: {error}", flush=True)


def judged(case: Case, root: Path) -> dict[str, Any]:
    """Diagnose a run as it was after each step; return the row of the table."""
    expected = case.cause or "healthy"
    after = []
    for step in range(1, case.recipe.get("steps", STEPS) + 1):
        found = why.diagnose(root, until=step)
        after.append(found.findings[0].cause if found.findings else "healthy")
    started = time.process_time()
    found = why.diagnose(root)
    seconds = time.process_time() - started
    steps = [each.get("step_s", 0.0) for each in evidence.read(root).metrics.values()]
    return {
        "number": case.number,
        "fault": case.name,
        "how": case.how,
        "expected": expected,
        "after": after,
        "others": [each.cause for each in found.findings[1:]],
        "right": after[-1] == expected if case.cause else set(after) == {"healthy"},
        "step": after.index(expected) + 1 if expected in after else None,
        "why_cpu_s": round(seconds, 3),
        "step_s": round(sum(steps) / max(len(steps), 1), 2),
        "findings": [asdict(each) for each in found.findings],
        "problems": list(found.problems),
    }


async def run_all(cases: Sequence[Case], out: Path) -> list[dict[str, Any]]:
    """Run the cases, those with one trainer together; changed records come last."""
    rows = []
    recipe = Recipe.model_validate(SMALL)
    model = await warm_start(recipe, log_dir=out / ".warm-start", emit=ignore)
    healthy = Case("healthy-0")
    wanted = [case for case in cases if case.how == "run"]
    if any(case.how == "record" for case in cases) and healthy.name not in _names(wanted):
        wanted.insert(0, healthy)
    by_trainer: dict[str, list[Case]] = {}
    for case in wanted:
        by_trainer.setdefault(json.dumps(case.trainer), []).append(case)
    for settings, group in by_trainer.items():
        todo = [case for case in group if not (out / case.folder / "done").exists()]
        if todo:
            async with session(out, model, json.loads(settings)) as run:
                for case in todo:
                    root = await run(case)
                    (root / "done").touch()
                    show(judged(case, root))
    for case in cases:
        root = out / case.folder
        if case.how == "record":
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(out / healthy.folder, root, symlinks=True)
            case.mutate(root)
        rows.append(judged(case, root))
    return rows


def _names(cases: Sequence[Case]) -> set[str]:
    return {case.name for case in cases}


def show(row: Mapping[str, Any]) -> None:
    mark = "ok " if row["right"] else "NO "
    others = f"; also {', '.join(row['others'])}" if row["others"] else ""
    print(
        f"{mark}{row['number']:>3} {row['fault']:22} {row['how']:6} "
        f"{' > '.join(each for each, _ in groupby(row['after']))}{others}; "
        f"{row['why_cpu_s']:.2f} s CPU, a step {row['step_s']:.1f} s",
        flush=True,
    )


def main() -> None:
    """Run the chosen cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--half", choices=("odd", "even"))
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("--variants", action="store_true", help="other forms of the faults")
    parser.add_argument("--steps", type=int, default=STEPS, help="of healthy runs")
    parser.add_argument("--out", type=Path, default=Path("why-runs"), help="reused if it exists")
    chosen = parser.parse_args()
    long = {"recipe": {"steps": chosen.steps}} if chosen.steps != STEPS else {}
    cases = [Case(f"healthy-{seed}", seed=seed, **long) for seed in range(chosen.healthy)]
    if not chosen.healthy:
        known = VARIANTS if chosen.variants else FAULTS
        cases = [case for case in known if not chosen.only or case.name in chosen.only]
        rest = {"odd": 1, "even": 0}.get(chosen.half)
        cases = [case for case in cases if rest is None or case.number % 2 == rest]
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows = asyncio.run(run_all(cases, chosen.out.resolve()))
    print()
    for row in rows:
        show(row)
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(rows)} right")
    Path("why.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
