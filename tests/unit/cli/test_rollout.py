"""`swerl rollout`: what it shows and keeps, its exit codes, one clear error for bad input."""

from __future__ import annotations

import json
from asyncio import to_thread
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from swerl.cli import rollout
from swerl.cli._options import read_engine
from swerl.cli.rollout import RolloutView
from swerl.core.errors import InputError
from swerl.core.events import PhaseEnded, TurnEnded
from swerl.core.task import Task, write_tasks
from swerl.engines.families import tiny
from swerl.rollout import record
from swerl.tasks import twin
from tests.unit.engines.test_openai import COMPLETION, answering


@dataclass(frozen=True, slots=True)
class Shown:
    """What one call of the command came to."""

    code: int
    text: str
    error: BaseException | None


Run = Callable[..., Shown]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("twin")
    return twin.make_tasks(folder, split="heldout", count=1, seed=0)[0]


@pytest.fixture
def run(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call the command on a file with one generated task, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path / "tasks.jsonl", [task])
    app = typer.Typer()
    app.command()(rollout.rollout)

    def call(*arguments: str, tasks: str = "tasks.jsonl") -> Shown:
        done = CliRunner().invoke(app, ["--tasks", tasks, *arguments])
        return Shown(done.exit_code, done.output, done.exception)

    return call


def test_gold_is_shown_turn_by_turn_and_solved(run: Run, task: Task, tmp_path: Path) -> None:
    shown = run("--instance", task.id, "--engine", "scripted:gold", "-o", "out")
    assert shown.code == 0, shown
    for part in (task.id, "boot", "agent", "turn 1", "str_replace", "SOLVED", "next"):
        assert part in shown.text
    kept = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"transcript.json", "patch.diff", "grade.json", "agent.log"} <= kept
    assert all(f"out/{name}" in shown.text for name in ("trajectory.json", "patch.diff"))


def test_noop_is_unsolved_and_no_failure_of_the_command(run: Run) -> None:
    shown = run("--engine", "scripted:noop")
    assert shown.code == 0, shown
    assert "UNSOLVED" in shown.text


def test_json_is_one_object_with_paths_that_exist(run: Run, tmp_path: Path) -> None:
    shown = run("--json")
    found = json.loads(shown.text)
    assert (found["verdict"], found["trainable"]) == ("solved", True)
    assert all((tmp_path / path).exists() for path in found["artefacts"].values())


def test_transcript_and_tokens_tell_the_same_turns(run: Run, tmp_path: Path) -> None:
    run("-o", "out")
    words = json.loads((tmp_path / "out" / "transcript.json").read_text())
    tokens = json.loads((tmp_path / "out" / "trajectory.json").read_text())["turns"]
    assert [turn["turn"] for turn in words] == [turn["index"] + 1 for turn in tokens]
    assert [turn["tokens_out"] for turn in words] == [len(turn["output_ids"]) for turn in tokens]
    assert words[0]["said"]["tool_calls"]


def test_a_transcript_shows_the_prompt_that_the_model_saw(run: Run, tmp_path: Path) -> None:
    run("-o", "out")
    first, *_ = json.loads((tmp_path / "out" / "transcript.json").read_text())
    tokens = json.loads((tmp_path / "out" / "trajectory.json").read_text())["turns"]
    # The tiny family leaves the agent's system prompt and tools out.
    assert first["prompt"] == tiny.build(None).text(tokens[0]["prompt_ids"])
    assert first["prompt"].startswith("<|im_start|>user\n")


def test_an_error_in_the_users_reward_is_named_with_exit_code_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(attempt):\n    return attempt.nosuch\n")
    shown = run("--set", f"rollout.reward={tmp_path}/mine.py", "-o", "out")
    assert shown.code == 2, shown
    assert f"REWARD FAILED {tmp_path}/mine.py:2: AttributeError" in shown.text
    assert "INFRA" not in shown.text and "doctor" not in shown.text
    assert len(record.read(tmp_path / "out").trajectory.turns) > 1


AGENT = """
from swerl.core.contracts import Exit
class Own:
    dialect, inside = "openai_chat", False
    async def install(self, sandbox): pass
    async def run(self, sandbox, task, endpoint, budget_s): return Exit(0)
def build():
    return Own()
"""


def test_an_own_agent_without_a_needed_member_or_a_script_is_one_error(
    run: Run, tmp_path: Path
) -> None:
    mounts = "def mounts(self): return []\n    async def install"
    for text, message in (
        (AGENT, "lacking.py has no mounts"),
        (AGENT.replace("async def install", mounts), "has no `script`"),
    ):
        agent = tmp_path / f"{'silent' if mounts in text else 'lacking'}.py"
        agent.write_text(text)
        error = run("--agent", str(agent)).error
        assert isinstance(error, InputError) and message in str(error), error


def test_broken_machinery_is_shown_as_infra_with_exit_code_1(
    run: Run, task: Task, tmp_path: Path
) -> None:
    write_tasks(tmp_path / "gone.jsonl", [replace(task, image="dir:/no/such/folder")])
    shown = run(tasks="gone.jsonl")
    assert shown.code == 1
    assert "INFRA" in shown.text
    assert "no folder at /no/such/folder" in shown.text
    assert "swerl doctor" in shown.text


def test_turns_used_up_at_the_gateway_are_a_limit_and_the_work_is_graded(run: Run) -> None:
    found = json.loads(run("--json", "--set", "rollout.max_turns=2").text)
    assert (found["status"], found["verdict"], found["turns"]) == ("limit", "solved", 2)


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (["--instance", "twin__x"], "unknown instance", "did you mean"),
        (["--engine", "scriptd:gold"], "unknown engine 'scriptd'", "scripted"),
        (["--engine", "scripted:silver"], "is not an engine", "scripted:gold"),
        (["--engine", "torch-cpu"], "needs --model", "newest weights"),
        (["--engine", "torch-cpu", "--model", "nowhere"], "is not a model folder", "Hugging Face"),
        (["--agent", "claude-cod"], "unknown agent", "claude-code"),
        (["--set", "harnes.bare=true"], "unknown recipe key", "harness"),
        (["--agent", "claude-code", "--set", "harness.bar=true"], "unknown recipe key", "bare"),
    ],
)
def test_bad_input_is_one_error_with_a_hint(
    run: Run, arguments: Sequence[str], says: str, hint: str
) -> None:
    shown = run(*arguments)
    assert isinstance(shown.error, InputError)
    assert says in str(shown.error)
    assert hint in shown.error.hint


def test_gold_of_a_task_without_solution_says_what_to_use(
    run: Run, task: Task, tmp_path: Path
) -> None:
    write_tasks(tmp_path / "bare.jsonl", [replace(task, gold_patch="")])
    shown = run(tasks="bare.jsonl")
    assert isinstance(shown.error, InputError)
    assert "scripted:noop" in shown.error.hint


@pytest.mark.parametrize("config", ["{}", '{{"text_config": {}}}'])
def test_folder_of_a_run_stands_for_its_newest_weights(tmp_path: Path, config: str) -> None:
    for version in ("000009", "000010"):
        folder = tmp_path / "weights" / version
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config.format('{"max_position_embeddings": 1024}'))
        tiny.save_tokenizer(tiny.byte_tokenizer(), folder)
    engine = read_engine("torch-cpu", rollout._SCRIPTS)
    recipe = rollout._recipe("builtin", engine, str(tmp_path), ())
    assert recipe.model.path == tmp_path / "weights" / "000010"
    assert (recipe.rollout.max_context_tokens, recipe.rollout.max_new_tokens) == (1024, 256)


@pytest.mark.parametrize(
    "limits", ['"data": [{"max_model_len": 512}]', '"max_total_num_tokens": 999']
)
async def test_a_servers_context_is_not_exceeded(tmp_path: Path, limits: str) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    tiny.save_tokenizer(tiny.byte_tokenizer(), tmp_path)
    async with answering(200, f"{{{limits}}}") as url:
        engine = read_engine(f"sglang={url.removesuffix('/v1')}", rollout._SCRIPTS)
        recipe = await to_thread(rollout._recipe, "builtin", engine, str(tmp_path), ())
    assert (recipe.rollout.max_context_tokens, recipe.rollout.max_new_tokens) == (512, 128)


async def test_debugging_engine_runs_an_episode_that_is_marked_not_trainable(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with answering(200, COMPLETION) as url:
        engine = read_engine(f"openai={url}", rollout._SCRIPTS)
        recipe = rollout._recipe("builtin", engine, "some-model", ())
        with RolloutView(trainable=engine.trainable) as view:
            episode = await rollout.attempt(recipe, task, tmp_path, script=None, emit=view)
    assert episode.verdict == "unsolved"
    assert not any(turn.trainable for turn in episode.trajectory.turns)
    assert episode.trajectory.num_sampled_tokens == 5
    assert "5 out" in (shown := capsys.readouterr().out)
    assert "not trainable" in shown
    (turn,) = json.loads((tmp_path / "transcript.json").read_text())
    assert [message["role"] for message in turn["prompt"]] == ["system", "user"]


def test_terminal_commands_in_what_a_model_says_are_not_obeyed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = RolloutView()
    view(TurnEnded("e", 0, 1, 1, 0.1, "\x1b[2J[red]hi[/red]", ("bash(\x07)",)))
    view(PhaseEnded("e", "agent", 1.0))
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07"}.intersection(shown)
    assert "[red]hi[/red]" in shown


def test_a_sandbox_that_did_not_start_is_not_said_to_be_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    RolloutView()(PhaseEnded("e", "boot", 1.0, ok=False))
    shown = capsys.readouterr().out
    assert "failed" in shown and "sandbox up" not in shown


def test_a_task_of_a_file_that_was_never_vetted_is_warned_of(run: Run, task: Task) -> None:
    assert "not certified" not in run("--engine", "scripted:noop").text
    write_tasks(Path("other.jsonl"), [replace(task, dataset="someone/else")])
    shown = run("--engine", "scripted:noop", tasks="other.jsonl")
    assert shown.code == 0
    assert "is not certified: it was never vetted" in " ".join(shown.text.split())
