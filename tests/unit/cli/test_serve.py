"""`swerl serve` as a user runs it: the vendors' clients come in, Ctrl-C ends it, all is kept."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from swerl.cli.serve import serve
from swerl.core.errors import InputError
from swerl.training import batch
from tests.unit.sandboxes.e2b_server.helpers import eventually

HI: Any = {"role": "user", "content": "Say hello."}
PATIENCE_S = 60.0


@dataclass
class Serving:
    """A running command: what it printed so far, and how to come in."""

    process: subprocess.Popen[str]
    folder: Path
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        return re.findall(r"answers at (\S+)", self.text)[0]

    @property
    def key(self) -> str:
        found = re.search(r"SWERL_KEY=(\S+)\n", self.text)
        assert found
        return found[1]

    def shows(self, pattern: str) -> None:
        """Wait until a line that matches was printed."""
        eventually(lambda: re.search(pattern, self.text), PATIENCE_S)

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and return the exit code, with everything printed."""
        self.process.send_signal(how)
        code = self.process.wait(PATIENCE_S)
        self.reader.join(PATIENCE_S)
        return code

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        self.lines.extend(iter(self.process.stdout.readline, ""))


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Serving]:
    """Start the command in a folder of its own and wait until it says how to come in."""
    argv = [sys.executable, "-m", "swerl", "serve", "--port", "0", "-o", "out", *options]
    process = subprocess.Popen(
        argv,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    made = Serving(process, folder / "out")
    try:
        eventually(lambda: "finish" in made.text or process.poll() is not None, PATIENCE_S)
        assert process.poll() is None, made.text
        yield made
    finally:
        process.kill()
        process.wait()
        made.reader.join(PATIENCE_S)


def transcript(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "transcript.jsonl").read_text().splitlines()]


def test_the_vendors_clients_come_in_and_ctrl_c_keeps_what_they_said(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        with anthropic.Anthropic(base_url=served.url, api_key=served.key) as claude:
            with claude.messages.stream(model="any", max_tokens=500, messages=[HI]) as stream:
                first = stream.get_final_message()
            said: Any = {"role": "assistant", "content": first.content}
            claude.messages.create(model="any", max_tokens=500, messages=[HI, said, HI])
        with openai.OpenAI(base_url=served.url + "/v1", api_key=served.key) as gpt:
            gpt.chat.completions.create(model="any", messages=[HI])
            gpt.responses.create(model="any", input="Say something else.")
        served.shows(r"1\.3 +4 ")
        code = served.end()

    assert code == 130
    lines = re.findall(r" (1\.\d) +(\d) .* stop ", served.text)
    assert lines == [("1.1", "1"), ("1.1", "2"), ("1.2", "3"), ("1.3", "4")]
    sampled = sum(turn["tokens_out"] for turn in transcript(served.folder / "1"))
    assert f"4 turns in 3 branches, 3 samples; {sampled} of {sampled} sampled" in served.text
    assert "(100.0%)" in served.text
    assert "out/1\n" in served.text
    samples = batch.read(served.folder / "1" / "samples.parquet").samples
    assert sum(sample.num_trained_tokens for sample in samples) == sampled
    turns = json.loads((served.folder / "1" / "trajectory.json").read_text())["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, None, None]


def test_the_printed_commands_work_as_they_stand(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        command = next(line for line in served.lines if line.startswith("curl "))
        script = f"export SWERL_KEY={shlex.quote(served.key)}; {command.rstrip()} -sS"
        curl = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        calls = [line.strip() for line in served.lines if re.match(r"(anthropic|openai)\.", line)]
        code = "import anthropic, openai, os\n" + "\n".join(f"print({call})" for call in calls)
        env = {**os.environ, "SWERL_KEY": served.key}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        )

    assert "Hello!" in json.loads(curl.stdout)["content"][0]["text"]
    assert len(calls) == 2
    assert "Hello!" in done.stdout
    assert "not a model" in done.stdout


def test_wrong_keys_and_broken_requests_are_shown(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        with (
            anthropic.Anthropic(base_url=served.url, api_key="wrong") as stranger,
            pytest.raises(anthropic.AuthenticationError),
        ):
            stranger.messages.create(model="any", max_tokens=5, messages=[HI])
        with (
            anthropic.Anthropic(base_url=served.url, api_key=served.key) as claude,
            pytest.raises(anthropic.BadRequestError),
        ):
            claude.messages.create(model="any", max_tokens=5, messages=[])
        served.shows("- +refused +no open session")
        served.shows("1 +refused +messages: at least one")
        served.end()

    assert "0 turns" in served.text
    assert not served.folder.exists()


def test_sigterm_is_an_ordinary_end_and_kill_9_leaves_the_words(tmp_path: Path) -> None:
    for how, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        folder = tmp_path / how.name
        folder.mkdir()
        with serving(folder) as served:
            with anthropic.Anthropic(base_url=served.url, api_key=served.key) as claude:
                claude.messages.create(model="any", max_tokens=500, messages=[HI])
            served.shows(r"1\.1 ")
            assert served.end(how) == code
        (turn,) = transcript(served.folder / "1")
        assert turn["prompt"] == "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"


def test_each_key_of_a_file_has_a_session_and_is_not_printed(tmp_path: Path) -> None:
    keys = ["sk-mine-0123456789", "sk-yours-0123456789"]
    (tmp_path / "keys").write_text("\n".join(keys) + "\n")
    with serving(tmp_path, "--key-file", "keys") as served:
        for key in keys:
            with anthropic.Anthropic(base_url=served.url, api_key=key) as claude:
                claude.messages.create(model="any", max_tokens=500, messages=[HI])
        served.shows(r" 2\.1 ")
        told = re.findall(r"export SWERL_KEY=(.*)\n", served.text)
        script = "\n".join(f"echo {shown}" for shown in told)
        shown = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        served.end()

    assert shown.stdout.split() == keys
    assert not any(key in served.text for key in keys)
    assert {path.name for path in served.folder.iterdir()} == {"1", "2"}


def test_an_idle_session_is_written_and_its_key_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, "--idle-minutes", "0.02") as served:
        with anthropic.Anthropic(base_url=served.url, api_key=served.key) as claude:
            first = claude.messages.create(model="any", max_tokens=500, messages=[HI])
            served.shows("1 +was idle: kept in out/1")
            assert (served.folder / "1" / "samples.parquet").exists()
            said: Any = {"role": "assistant", "content": first.content}
            claude.messages.create(model="any", max_tokens=500, messages=[HI, said, HI])
        served.shows(r" 2\.1 ")
        served.end()

    (turn,) = transcript(served.folder / "2")
    assert (turn["parent"], turn["prompt"].count("<|im_end|>")) == (None, 3)
    assert "2 turns in 2 branches, 2 samples" in served.text


def test_a_session_that_the_disk_refuses_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    keys = ["sk-mine-0123456789", "sk-yours-0123456789"]
    (tmp_path / "keys").write_text("\n".join(keys))
    with serving(tmp_path, "--key-file", "keys") as served:
        (served.folder / "1" / "trajectory.json" / "in the way").mkdir(parents=True)
        for key in keys:
            with anthropic.Anthropic(base_url=served.url, api_key=key) as claude:
                claude.messages.create(model="any", max_tokens=500, messages=[HI])
        code = served.end()

    assert code == 1
    assert re.search(r"1 +refused +cannot write .*trajectory\.json", served.text)
    assert "out/2\n" in served.text
    assert (served.folder / "2" / "samples.parquet").exists()


async def test_an_engine_without_token_ids_serves_but_trains_nothing(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        choice = {"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 12, "completion_tokens": 3}
        return web.json_response({"id": "1", "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)

    def talk(upstream: str) -> Serving:
        with serving(tmp_path, "--engine", f"openai={upstream}", "--model", "m") as served:
            with anthropic.Anthropic(base_url=served.url, api_key=served.key) as claude:
                claude.messages.create(model="any", max_tokens=500, messages=[HI])
            served.shows(r"1\.1 ")
            served.end()
        return served

    async with TestServer(app) as server:
        served = await asyncio.to_thread(talk, str(server.make_url("/v1")))
    assert "nothing is trainable" in served.text
    assert "1 turn in 1 branch, 0 samples; 0 of 3 sampled tokens trainable" in served.text
    assert not (served.folder / "1" / "samples.parquet").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--key-file"),
        (["--host", "::"], "--key-file"),
        (["--key-file", "/no/such/file"], "one key per line"),
        (["--key-file", "short"], "line 1 of short"),
        (["--key-file", "double"], "a key twice"),
        (["--key-file", "empty"], "holds no key"),
        (["--engine", "scripted:gold"], "scripted:demo"),
        (["--engine", "torch-cpu"], "needs --model"),
        (["-o", "."], "is not empty"),
        (["--set", "gatewy.history=exact"], "unknown recipe key"),
        (["--set", "model.family=qwen"], "did you mean qwen3"),
    ],
)
def test_bad_input_is_one_error_with_a_hint(
    options: Sequence[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = "0123456789abcdef"
    texts = {"short": "short\n", "double": f"{key}\n{key}\n", "empty": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    app = typer.Typer()
    app.command()(serve)

    error = CliRunner().invoke(app, options).exception

    assert isinstance(error, InputError)
    assert error.hint
    assert words in f"{error} {error.hint}"
