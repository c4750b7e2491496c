"""`swerl doctor RECIPE`: what a launch needs is checked before anything loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swerl.checks import launch
from swerl.checks.launch import first_day, model_faults
from swerl.cli.main import typer_app
from swerl.cluster.checks import FindingState, MachineFinding
from swerl.cluster.node import LocalNode
from swerl.cluster.open import Nodes
from swerl.core.task import write_tasks
from swerl.plan.plan import RecipePlan, plan
from swerl.recipe.load import load
from swerl.tasks import twin

RECIPES = Path(__file__).parents[3] / "recipes"
HERE = (LocalNode(name="n1"),)


def planned(name: str, *settings: str) -> RecipePlan:
    return plan(load([RECIPES / f"{name}.toml"], settings))


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(typer_app, ["doctor", *arguments], catch_exceptions=False)


async def _engine(*settings: str) -> list[MachineFinding]:
    checks = launch.check_engine(planned("qwen4b_1node", *settings), Nodes(HERE, HERE))
    return [finding async for finding in checks]


def test_the_twins_launch_passes_on_this_machine(tmp_path: Path) -> None:
    result = doctor(str(RECIPES / "twin_cpu.toml"), "--runs", str(tmp_path), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert report["fits"] is True
    checks = {row["check"] for row in report["checks"]}
    assert {"recipe", "cores", "disk", "model", "sandbox", "gateway"} <= checks


def test_what_is_missing_is_listed_with_its_remedy(tmp_path: Path) -> None:
    recipe = str(RECIPES / "qwen4b_1node.toml")
    result = doctor(recipe, "--runs", str(tmp_path))
    assert result.exit_code == 1
    for text in ("hf download Qwen/Qwen3-4B", "swerl tasks vet", "nvidia-smi: not installed"):
        assert text in result.output
    assert "the first day by the plan" in result.output


def test_a_model_folder_is_complete_only_with_all_its_weights(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(bytes(100))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_faults(tmp_path) == ([f"{tmp_path} lacks b.safetensors"], 100)
    (tmp_path / "b.safetensors").write_bytes(bytes(20))
    assert model_faults(tmp_path) == ([], 120)
    assert model_faults(tmp_path / "none") == ([f"{tmp_path / 'none'} does not exist"], 0)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.saf')
    with pytest.raises(Exception, match=r"cannot read .*index\.json"):
        model_faults(tmp_path)


async def test_the_engines_interpreter_must_import_sglang(tmp_path: Path) -> None:
    (finding,) = await _engine("engine.python=/no/python")
    assert finding.state is FindingState.FAIL and "No such file" in finding.detail
    (finding,) = await _engine(f"engine.python={sys.executable}")
    assert finding.state is FindingState.FAIL and "sglang" in finding.detail
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\necho SGLang 0.5.21, torch 2.13.0, NCCL 2.29.7\n")
    stand_in.chmod(0o755)
    (finding,) = await _engine(f"engine.python={stand_in}")
    assert finding.state is FindingState.OK and "SGLang 0.5.21" in finding.detail
    stand_in.write_text("#!/bin/sh\necho SGLang 0.5.2, torch 2.8.0, NCCL 2.27.3\n")
    (finding,) = await _engine(f"engine.python={stand_in}")
    assert finding.state is FindingState.FAIL and ">=0.5.21" in finding.detail
    assert not await _engine("engine.url=http://127.0.0.1:1")


async def test_sglang_itself_judges_the_plans_flags(tmp_path: Path) -> None:
    model, stand_in = tmp_path / "Qwen3-4B", tmp_path / "python"
    model.mkdir()
    stand_in.write_text(
        '#!/bin/sh\ncase "$*" in *--tp-size=4*) echo "error: unknown flag" >&2; exit 2;; esac\n'
        "echo SGLang 0.5.21\n"
    )
    stand_in.chmod(0o755)
    settings = (f"engine.python={stand_in}", f"model.path={model}")
    _, flags = await _engine(*settings)
    assert (flags.state, flags.detail) == (FindingState.FAIL, "error: unknown flag")
    _, flags = await _engine(*settings, "cluster.gpus_per_engine=2")
    assert flags.state is FindingState.OK


def test_tasks_without_certificates_fail_with_the_command_to_vet(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, twin.make_tasks(tmp_path / "twin", split="heldout", count=2, seed=0))
    found = planned("twin_cpu", f"tasks.source={tasks}")
    (finding,) = launch.check_tasks(found)
    assert (finding.state, finding.detail) == (FindingState.FAIL, "2 tasks, 0 with a certificate")
    assert finding.fix == f"swerl tasks vet {tasks}"


@pytest.mark.parametrize("steps", [1, 1000])
def test_the_first_day_is_at_most_the_run(steps: int) -> None:
    day = first_day(planned("qwen35b_8node", f"steps={steps}"))
    assert day is not None
    assert day.steps == pytest.approx(min(steps, 24 * 60 / day.step_minutes))
    assert day.dollars > 0 and day.disk_gb > 400


def test_a_run_on_cpu_has_no_first_day() -> None:
    assert first_day(planned("twin_cpu")) is None
