"""A recipe's simulation agrees with the recipe's assumptions and reacts to changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.errors import InputError, RecipeError, UnknownNameError
from swerl.plan.layout import layout
from swerl.plan.memory import GPUS
from swerl.plan.parameters import row_cost
from swerl.plan.plan import plan
from swerl.plan.shape import shape_of
from swerl.plan.simulation.episodes import RecordedLoads, read_recorded
from swerl.plan.simulation.simulate import Simulation, assumptions, simulate, values
from swerl.plan.simulation.training import TrainerSpeed, trainer_speed
from swerl.recipe.load import load

RECIPE = Path(__file__).parents[4] / "recipes" / "qwen35b_8node.toml"


def simulated(
    *settings: str, assume: tuple[str, ...] = (), recipe: Path = RECIPE, **options: object
) -> Simulation:
    found = load([recipe], settings)
    planned = plan(found)
    assert planned.memory is not None
    return simulate(
        found,
        planned.shape,
        planned.layout,
        planned.memory.cache,
        settings=assume,
        **options,  # type: ignore[arg-type]
    )


def test_the_8_node_run_lies_within_its_recipes_assumptions() -> None:
    found = simulated().own
    low, _, high = load([RECIPE]).cost.step_minutes
    assert low <= found.step_s / 60 <= high
    seconds = load([RECIPE]).cost.sandbox_seconds
    assert seconds is not None
    assert 0.9 * seconds[0] <= found.sandbox_s <= seconds[2]
    assert found.row_tokens == pytest.approx(31_600, rel=0.1)


def test_8_node_run_waits_for_tools_and_other_schedules_help() -> None:
    found = simulated(compare=True, num_steps=5)
    assert found.own.bottleneck == "tools"
    assert found.split
    hours = {run.mode: run.hours(100) for run in (found.own, *found.others)}
    assert hours["async"] < 0.7 * hours["sync"]


def trainer(*settings: str, recipe: Path = RECIPE, **assume: float) -> TrainerSpeed:
    found = load([recipe], settings)
    shape, value = shape_of(found.model), {**values(assumptions(found)), **assume}
    return trainer_speed(found, shape, layout(found, shape), GPUS[found.cluster.gpu], value)


def test_training_time_is_arithmetic_over_rate_starts_and_exchanges() -> None:
    fast = {"network_bytes_per_s": 1e30, "link_share": 1e30}
    settings = ("trainer.offload_optimizer=false", "trainer.recompute=false")
    plain = {"train_mfu": 0.1, "imbalance": 0.0, "train_layer_s": 0.0, **fast}
    rows = [100] * 4
    found = trainer(*settings, **plain)
    arithmetic = row_cost(shape_of(load([RECIPE]).model)).of(100) / (
        16 * GPUS["h100"].bf16_flops * 0.1
    )
    assert found(rows) == pytest.approx(arithmetic)
    assert found([100] * 6) == pytest.approx(2 * arithmetic)  # two ranks have two rows each
    repeated = trainer(settings[0], "trainer.recompute=true", **plain)
    assert repeated(rows) == pytest.approx(arithmetic * 4 / 3)
    partly = trainer(settings[0], "trainer.recompute=10", **plain)
    assert partly(rows) == pytest.approx(arithmetic * (1 + 10 / 40 / 3))
    started = trainer(*settings, **{**plain, "train_layer_s": 0.5})
    assert started(rows) == pytest.approx(arithmetic + 40 * 0.5)
    assert started([48_000] * 9) > started([48_000] * 8) + 40 * 0.5  # three micro-batches a rank


def test_a_shared_prefix_is_computed_once_in_a_micro_batch() -> None:
    plain = {"train_layer_s": 0.0, "first_prompt": 10_000.0}
    apart, once = (
        trainer(f"trainer.shared_prefixes={flag}", **plain) for flag in ("false", "true")
    )
    rows = [30_000] * 4  # one on each data rank: nothing is shared
    assert once(rows) == pytest.approx(apart(rows))
    prefix, whole = apart.row.of(10_000), apart.row.of(30_000)
    found = (
        once([30_000] * 16) - once.step_s
    )  # micro-batches of 96,000 tokens hold the prefix and four rows
    assert found == pytest.approx(prefix + 4 * (whole - prefix))
    assert apart([30_000] * 16) - apart.step_s == pytest.approx(4 * whole)
    # A step of short rows has no more of the prefix than they have.
    assert once([100] * 8) < apart([100] * 8)


def test_a_pipeline_waits_for_its_first_and_last_micro_batch() -> None:
    recipe = RECIPE.with_name("qwen4b_1node.toml")
    settings = ("trainer.pipeline_parallel=4", "trainer.tensor_parallel=1")
    one = trainer(*settings, recipe=recipe, link_share=1e30)
    assert (one.stages, one.copies) == (4, 2)
    full = [one.budget] * 2
    rows = one([*full]) - one.step_s
    assert one(full * 4) - one.step_s == pytest.approx(rows / 4 * (4 + 3))


def test_exchanges_are_those_of_the_counted_roofline() -> None:
    """docs/measurements/gpu-roofline.md: 62.7 GB over NVLink and 7.0 GB between nodes."""
    fast = {"train_mfu": 1e30, "network_bytes_per_s": 1e30}
    found = trainer("trainer.recompute=true", link_share=1.0, **fast)
    assert found.row.per_token * 96_000 * 450e9 == pytest.approx(62.7e9, rel=0.05)


def test_layouts_of_equal_size_differ() -> None:
    again = "trainer.recompute=true"
    inside = ("trainer.context_parallel=4", "trainer.tokens_per_micro_batch=24000", again)
    rows = [31_000] * 64
    assert trainer(*inside)(rows) < 0.97 * trainer(again)(rows)


def test_experts_are_as_slow_on_one_expert_rank() -> None:
    found = load([RECIPE], ["trainer.expert_parallel=1"])
    assert values(assumptions(found)) == values(assumptions(load([RECIPE])))


@pytest.mark.parametrize(
    ("settings", "assume"),
    [
        (("rollout.concurrency=16",), ()),
        ((), ("tool_s.median=5",)),
        ((), ("turns.median=60",)),
        ((), ("train_mfu=0.01",)),
        ((), ("layer_s=0.001",)),
        ((), ("grading_s.median=300",)),
        (("rollout.group_filter=zero-variance",), ()),
    ],
)
def test_a_harder_run_takes_longer(settings: tuple[str, ...], assume: tuple[str, ...]) -> None:
    hard, plain = simulated(*settings, assume=assume, num_steps=2), simulated(num_steps=2)
    assert hard.own.seconds > plain.own.seconds


def test_wrong_assumptions_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="assumption"):
        simulated(assume=("train_mfo=1",))
    with pytest.raises(InputError, match="is not key=number"):
        simulated(assume=("train_mfu=-1",))


def test_gpu_of_unknown_speed_is_refused() -> None:
    with pytest.raises(RecipeError, match="the speed of a 'mi355x' is unknown"):
        simulated("cluster.gpu=mi355x")


def _run(folder: Path, *events: dict[str, object]) -> Path:
    folder.mkdir()
    lines = [json.dumps(event) for event in events]
    (folder / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "cut sh')
    return folder


def _turn(time: float, seconds: float, prompt: int, output: int) -> dict[str, object]:
    counts = {"prompt_tokens": prompt, "output_tokens": output}
    return {"event": "TurnEnded", "episode": "a", "time": time, "seconds": seconds} | counts


def _phase(name: str, seconds: float) -> dict[str, object]:
    return {"event": "PhaseEnded", "episode": "a", "phase": name, "seconds": seconds, "time": 0}


def test_episodes_of_a_real_run_are_read_from_its_events(tmp_path: Path) -> None:
    run = _run(
        tmp_path / "run",
        _phase("hide_future", 1),
        _phase("boot", 2),
        _turn(100, 1, 500, 20),
        _turn(110, 3, 540, 10),
        _turn(112, 1, 200, 5),  # another conversation: a second row
        _phase("agent", 15),
        _phase("diff", 0.5),
        _phase("grade", 4),
        _phase("test", 3),
        {"event": "EpisodeEnded", "episode": "a", "time": 0},
        _turn(200, 1, 500, 20) | {"episode": "unfinished"},
    )
    [found] = read_recorded(run)
    assert [turn.tool_s for turn in found.turns] == [7, 1, 2]
    assert (found.boot_s, found.grading_s) == (2, 4.5)
    assert list(found.rows()) == [550, 205]
    outcome = simulated(recorded=RecordedLoads((found,)), num_steps=1).own
    assert outcome.row_tokens == 755


@pytest.mark.parametrize("text", [None, "", '{"event": "StepEnded"}'])
def test_folder_without_episodes_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "events.jsonl").write_text(text)
    with pytest.raises(InputError) as caught:
        read_recorded(tmp_path)
    assert caught.value.hint


def test_command_prints_assumptions_and_every_schedule() -> None:
    arguments = ["simulate", str(RECIPE), "--steps", "2", "--assume", "train_mfu=0.2"]
    shown = CliRunner().invoke(typer_app, ["cost", *arguments], catch_exceptions=False).output
    for text in ("train_mfu", "--assume", "one-step-off*", "async*", "waits longest for"):
        assert text in shown


def test_command_refuses_a_run_on_cpu() -> None:
    twin = RECIPE.with_name("twin_cpu.toml")
    with pytest.raises(RecipeError, match="runs on CPU"):
        CliRunner().invoke(typer_app, ["cost", "simulate", str(twin)], catch_exceptions=False)
