"""The search of `swerl train tune` finds better plans, and only those that fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.errors import InputError, RecipeError
from swerl.plan import tune
from swerl.plan.plan import plan
from swerl.plan.simulation import simulate as simulation
from swerl.plan.simulation.episodes import EpisodeLoad, RecordedLoads, TurnLoad
from swerl.plan.simulation.fit import fit_run, measured
from swerl.plan.simulation.simulate import simulate
from swerl.plan.tune import PlanSearch, changed
from swerl.recipe.load import load

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "qwen4b_1node.toml"
SMALL = ("rollout.groups_per_step=2", "rollout.episodes_per_group=4", "rollout.concurrency=8")


@pytest.fixture(autouse=True)
def _few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_TURNS", 20_000)


def run(*arguments: str) -> str:
    sets = [part for each in SMALL for part in ("--set", each)]
    command = ["train", "tune", *arguments, *sets]
    shown = CliRunner().invoke(typer_app, command, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def test_a_search_finds_a_faster_plan_that_fits_and_repeats() -> None:
    search = PlanSearch(load([RECIPE], SMALL), num_steps=3)
    found = search.best()
    assert search.own and found[0].episodes_per_hour > 1.2 * search.own.episodes_per_hour
    for each in found:
        planned = plan(each.recipe)
        assert planned.memory is not None and planned.memory.fits
    again = PlanSearch(load([RECIPE], SMALL), num_steps=3).best()
    assert [each.changes for each in again] == [each.changes for each in found]


def test_a_search_starts_from_plans_that_fit() -> None:
    """Only six of eight GPUs hold this trainer apart from the engines; the middle is four."""
    settings = ("model.path=/models/Qwen3-30B-A3B", *SMALL)
    search = PlanSearch(load([RECIPE.with_name("qwen35b_1node.toml")], settings), num_steps=3)
    search.best()
    shares = {(each.recipe.cluster.colocate, each.recipe.trainer.ranks) for each in search.found}
    assert (False, 6) in shares and len(shares) > 1


def test_the_trainer_of_a_share_is_the_fastest_that_fits() -> None:
    search = PlanSearch(load([RECIPE], SMALL), num_steps=3)
    recipe = search.recipe
    chosen = search._trainer(recipe)
    assert chosen is not None
    best = search._step_s(changed(recipe, chosen))
    assert best == min(search._step_s(changed(recipe, each)) for each in search._fitting(recipe))


def test_kept_keys_stay() -> None:
    keep = ("cluster.colocate", "trainer.recompute", "rollout.groups_per_step")
    search = PlanSearch(load([RECIPE], SMALL), keep, num_steps=3)
    search.best()
    assert len(search.plans) > 3
    assert not any(key in each.changes for each in search.found for key in keep)


def test_a_kept_schedule_leaves_the_gpus_to_share() -> None:
    search = PlanSearch(
        load([RECIPE], SMALL), ("schedule.mode", "cluster.gpus_per_engine"), num_steps=3
    )
    assert search.best()
    assert {each.recipe.schedule.mode for each in search.found} == {"sync"}
    assert {each.recipe.cluster.colocate for each in search.found} == {True, False}


def test_a_written_recipe_has_only_the_changed_keys_and_passes_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    printed = run(str(RECIPE), "--dollars", "300", "-o", str(out), "--json")
    best = json.loads(printed)["plans"][0]
    assert "was" in out.read_text() and best["changes"]["cost.max_dollars"] == 300
    recipe = load([RECIPE, out])  # --set is a part of the file
    for key, value in best["changes"].items():
        assert tune.value_of(recipe, key) == value
    plan(recipe)
    with pytest.raises(InputError, match="exists already"):
        run(str(RECIPE), "-o", str(out))


def test_files_that_only_a_setting_completes_are_tuned(tmp_path: Path) -> None:
    part, out = tmp_path / "part.toml", tmp_path / "tuned.toml"
    part.write_text("\n".join(x for x in RECIPE.read_text().splitlines() if "name =" not in x))
    flags = ("--set", "name=whole", "--set", "engine.flags=['--log-level=error']")
    run(str(part), *flags, "-o", str(out), "--json")
    assert 'name = "whole"  # was not set' in out.read_text()
    assert load([part, out]).engine.options["flags"] == ["--log-level=error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.toml",), "cannot read recipe nothing.toml"),
        ((str(RECIPE), "--gpus", "0"), "--gpus 0 is no number of nodes"),
        ((str(RECIPE), "--gpus", "12"), "--gpus 12 is no number of nodes"),
        ((str(RECIPE.with_name("twin_cpu.toml")),), "no GPUs to sample on"),
        ((str(RECIPE), "--keep", "trainer.rank"), "no recipe key 'trainer.rank'"),
        ((str(RECIPE), "--dollars", "0.01"), "does not pay one step"),
        ((str(RECIPE.with_name("glm_8node.toml")), "--gpus", "8"), "the nearest needs"),
    ],
)
def test_input_that_cannot_be_tuned_is_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(*arguments)


def _recorded(folder: Path, *, seconds: float, steps: int) -> Path:
    """Write a run whose Episodes have two turns and whose steps train for two seconds."""
    folder.mkdir()
    events: list[dict[str, object]] = []
    for step, number in ((step, number) for step in range(steps) for number in range(8)):
        name, began = f"{step:05d}/t.{number}", 100.0 * step
        for turn in range(2):
            events.append(
                {"event": "TurnEnded", "episode": name, "seconds": seconds, "output_tokens": 10}
                | {"time": began + (turn + 1) * (seconds + 1), "prompt_tokens": 20 + 40 * turn}
            )
        phases = {"boot": 0.5, "agent": 2 * seconds + 2, "grade": 1.0}
        events += [
            {"event": "PhaseEnded", "episode": name, "phase": phase, "seconds": each, "time": 0}
            for phase, each in phases.items()
        ]
        events.append({"event": "EpisodeEnded", "episode": name, "time": 0})
        if number == 7:
            metrics = {"step_s": 3.5 + 2 * seconds + 5, "train_s": 2.0, "publish_s": 0.25}
            events.append({"event": "StepEnded", "step": step, "time": 0, "metrics": metrics})
    recipe = load([ROOT / "recipes" / "twin_cpu.toml"], SMALL)
    (folder / "recipe.resolved.json").write_text(recipe.model_dump_json())
    (folder / "meta.json").write_text('{"format": 1}')
    (folder / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    return folder


@pytest.mark.parametrize("seconds", [0.05, 4.0])
def test_a_fit_reproduces_the_run_that_it_is_fitted_to(tmp_path: Path, seconds: float) -> None:
    folder = _recorded(tmp_path / "run", seconds=seconds, steps=2)
    planned = plan(load([ROOT / "recipes" / "twin_cpu.toml"], SMALL))
    source, value = fit_run(folder, planned)
    settings = [f"{key}={number!r}" for key, number in value.items()]
    known = planned.recipe, planned.shape, planned.layout, None
    found = simulate(*known, settings=settings, recorded=source, num_steps=4).own
    assert found.step_s == pytest.approx(measured(folder)["step_s"], rel=0.02)
    assert found.mean("train_s") == pytest.approx(2.0, rel=0.01)


def test_more_sandboxes_than_cores_help_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sandboxes recorded on two cores took four times as long as one alone."""
    monkeypatch.setattr(simulation, "cpu_count", lambda: 2)
    folder = _recorded(tmp_path / "run", seconds=0.1, steps=2)
    planned = plan(load([ROOT / "recipes" / "twin_cpu.toml"], SMALL))
    source, value = fit_run(folder, planned)

    def step_s(concurrency: int, *settings: str) -> float:
        recipe = changed(planned.recipe, {"rollout.concurrency": concurrency})
        fitted = (*(f"{key}={number!r}" for key, number in value.items()), *settings)
        known = recipe, planned.shape, planned.layout, None
        return simulate(*known, settings=fitted, recorded=source, num_steps=4).own.step_s

    assert step_s(8) == pytest.approx(measured(folder)["step_s"], rel=0.02)
    assert step_s(8) < step_s(2) < 1.1 * step_s(8)
    assert step_s(8, "cores=0") < step_s(8) - 1.0


def test_a_new_run_on_cpu_is_tuned_in_schedule_and_batch(tmp_path: Path) -> None:
    folder = _recorded(tmp_path / "run", seconds=0.5, steps=2)
    twin = str(ROOT / "recipes" / "twin_cpu.toml")
    found = json.loads(run(twin, "--from", str(folder), "--gpus", "0", "--json"))
    changes = {key for each in found["plans"] for key in each["changes"]}
    assert "schedule.mode" in changes and not any(key.startswith("cluster.") for key in changes)


def test_a_shorter_budget_is_proposed_and_never_a_plan() -> None:
    recipe = load([RECIPE], SMALL)
    slow_s = 0.8 * recipe.budgets.agent_s
    turns = [(TurnLoad(100, 10, tool_s),) for tool_s in (1.0, 1.0, 1.0, slow_s)]
    source = RecordedLoads(tuple(EpisodeLoad(each, 1.0, 1.0) for each in turns))
    search = PlanSearch(recipe, ("schedule.mode",), source=source, num_steps=3)
    best = search.best()[0]
    shorter = search.shorter(best)
    assert shorter is not None and shorter.run.timed_out > best.run.timed_out
    assert not any("budgets.agent_s" in each.changes for each in search.best())


def test_a_run_is_tuned_only_in_what_a_resume_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    _recorded(tmp_path / "runs/twin", seconds=0.5, steps=2)
    monkeypatch.chdir(tmp_path)
    twin = str(ROOT / "recipes" / "twin_cpu.toml")
    found = json.loads(run(twin, "--from", "twin", "--sandboxes", "16", "--json"))
    changes = [key for each in found["plans"] for key in each["changes"]]
    assert set(changes) <= {each.partition("=")[0] for each in SMALL}
    with pytest.raises(InputError, match="no ended step"):
        run(twin, "--from", str(_recorded(tmp_path / "other", seconds=1, steps=0)))
    with pytest.raises(InputError, match="unknown run 'twim'"):
        run(twin, "--from", "twim")
    gpus = str(ROOT / "recipes" / "qwen4b_1node.toml")
    simulated = ["cost", "simulate", gpus, "--steps", "1", "--json", "--from", "twin"]
    assert CliRunner().invoke(typer_app, simulated, catch_exceptions=False).exit_code == 0


def test_recorded_episodes_need_no_plan() -> None:
    with pytest.raises(RecipeError):
        run(str(ROOT / "recipes" / "sft_twin.toml"))
