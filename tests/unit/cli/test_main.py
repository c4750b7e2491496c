"""The command line as a whole: exit codes, and one clear error with what to do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swerl.cli.main import whole_command

ROOT = Path(__file__).resolve().parents[3]


def _swerl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swerl", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_names_every_command() -> None:
    done = _swerl("--help")
    assert done.returncode == 0
    names = ("train", "rollout", "convert", "doctor", "sandbox", "images", "agents", "cost")
    assert all(name in done.stdout for name in names)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom swerl.cli.main import typer_app\n"
        "assert 'rollout' in CliRunner().invoke(typer_app, ['--help']).stdout\n"
        "heavy = {'torch', 'megatron', 'pyarrow', 'aiohttp', 'pydantic', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_command_runs_with_garbage_collection() -> None:
    code = (
        "import gc, sys\n"
        "from swerl.__main__ import main\n"
        "sys.argv = ['swerl', 'recipes']\n"
        "try:\n    main()\nfinally:\n    print(gc.isenabled(), gc.get_freeze_count() > 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "True True"


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["train", "recipes/twin_cpuu.toml"], "cannot read recipe", "twin_cpu.toml"),
        (["train", "recipes/twin_cpu.toml", "--set", "stesp=3"], "'stesp'", "steps"),
        (["train", "recipes/twin_cpu.toml", "--set", "engine.type=tgi"], "'tgi'", "torch-cpu"),
        (
            ["train", "recipes/twin_cpu.toml", "--set", "budgets.tool_s=500"],
            "budgets.tool_s = 500",
            "agent_s",
        ),
        (["train", "recipes/twin_cpu.toml", "--set", "model.path=/none"], "/none", "Hugging Face"),
        (
            ["train", "recipes/twin_cpu.toml", "--set", "trainer.tokens_per_micro_batch=100"],
            "cannot hold a context of",
            "set trainer.tokens_per_micro_batch to",
        ),
        (["rollout", "--tasks", "nowhere.jsonl"], "nowhere.jsonl", "swerl convert"),
        (["convert", "swe-gim", "--rows", "x.jsonl"], "swe-gim", "swe-gym"),
        (["why", "--rnus", "x"], "No such option: --rnus", "why --help"),
        (["tasks", "show", "t.jsonl", "--limit", "abc"], "'--limit'", "tasks show --help"),
        (["tasks", "show"], "Missing argument", "tasks show --help"),
        (["rollout", "--engine"], "requires an argument", "swerl --help"),
        (["trian"], "Did you mean 'train'", "swerl --help"),
    ],
)
def test_wrong_input_is_one_error_one_hint_and_exit_code_two(
    tmp_path: Path, arguments: list[str], error: str, hint: str
) -> None:
    runs = ["--runs", str(tmp_path)] if arguments[0] == "train" else []
    done = _swerl(*arguments, *runs)
    assert done.returncode == 2
    first, second, *rest = done.stderr.strip().splitlines()
    assert first.startswith("error:") and error in first
    assert second.startswith("hint:") and hint in second
    assert not rest
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("group", "main_form"), [("train", "recipes..."), ("eval", "tasks")])
def test_the_help_of_a_group_shows_its_main_form_first(group: str, main_form: str) -> None:
    text = _swerl(group, "--help").stdout
    places = [text.index(part) for part in ("Examples:", main_form)]
    assert places == sorted(places)
    assert text.index("--set") < text.index("Commands")


def test_a_group_alone_prints_its_help() -> None:
    done = _swerl("tasks")
    assert done.returncode == 2
    assert "solve-rate" in done.stdout + done.stderr
    assert "error:" not in done.stderr


def test_a_full_disk_behind_the_output_is_two_lines() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "swerl", "recipes"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert "No space left" in done.stderr


def test_an_output_that_lacks_characters_is_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swerl", "recipes"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_shell_completion_is_offered() -> None:
    assert "--install-completion" in _swerl("--help").stdout


def test_every_command_that_a_text_of_swerl_names_exists() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.html")]
    text = "\n".join(file.read_text() for file in [*files, *(ROOT / "recipes").glob("*.toml")])
    whole = whole_command()
    for name, word in set(re.findall(r"`swerl ([a-z]+)(?: ([a-z-]+))?(?=[ `])", text)):
        assert name in whole.commands, name
        below = getattr(whole.commands[name], "commands", None)
        if below is not None and word and name not in ("train", "eval"):  # a recipe, a task file
            assert word in below, f"swerl {name} {word}"


def test_a_missing_package_is_one_error_with_its_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules['pyarrow'] = None\n"
        "from swerl.cli.main import app\n"
        "sys.argv = ['swerl', 'export', '.', '--samples', '-o', 'x']\n"
        "import swerl.runs.export as export\n"
        "export._steps_of = lambda run: __import__('pyarrow')\n"
        "app()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install" in done.stderr and "[twin]'" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_a_page_that_a_hint_names_can_be_opened_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swerl", "train", "twin_cpu", "--set", "seed=x"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    [page] = re.findall(r"\S+docs/\S+\.md", done.stderr)
    assert Path(page).is_absolute() and Path(page).is_file()
