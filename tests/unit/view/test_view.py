"""`swerl view`: every page of live, finished, damaged and hostile runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from html.parser import HTMLParser
from itertools import chain, repeat
from pathlib import Path
from urllib.parse import urljoin
from xml.etree import ElementTree

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer
from markupsafe import escape
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.chat import Finish
from swerl.core.episode import Episode, Group, Status
from swerl.core.errors import InputError
from swerl.core.events import EvalEnded, StepEnded
from swerl.core.files import write_json
from swerl.core.grade import Grade, TestStatus, Verdict
from swerl.core.sample import to_samples
from swerl.core.turn import Trajectory, Turn
from swerl.engines.families.tiny import byte_tokenizer, save_tokenizer
from swerl.rollout import record
from swerl.runs import index, prompts, tables
from swerl.runs.evaluation import TaskResult, summary
from swerl.runs.history import EventLog
from swerl.view import charts, conversation, server, tokens
from swerl.view.site import GROUPS_A_PAGE, Site, _templates

HOSTILE = (
    '<script>document.title="owned"</script><img src=x onerror=alert(1)>\0\udc80\x1b[31mred'
    "</pre></main>{{ 7 * 7 }}"
)
TOKEN = "a-token-of-a-test"
PATCH = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = '<b>'\n"


def _ids(text: str) -> tuple[int, ...]:
    sendable = text.encode("utf-8", "replace").decode()
    return tuple(byte_tokenizer().encode(sendable, add_special_tokens=False).ids)


def _episode(stage: str, task: str, number: int, *, said: str = "Done.") -> Episode:
    prompt = _ids("<|im_start|>user\nFix it.<|im_end|>\n<|im_start|>assistant\n")
    result = f"<|im_start|>user\n<tool_response>\n{said}\n</tool_response>\n<|im_end|>\n"
    reply = _ids("<think>\nHmm.\n</think>\n\nI look.<|im_end|>")
    turns = (
        Turn(0, None, prompt, reply, (-0.1,) * len(reply), Finish.TOOL_CALLS, "v1", 0.5, 1.0),
        Turn(1, 0, _ids(result), reply, (-2.5,) * len(reply), Finish.STOP, "v1", 2.0, 1.0),
        Turn(2, 0, _ids(result), reply, (-0.1,) * len(reply), Finish.STOP, "v1", 3.0, 1.0),
    )
    name = f"{stage}/{task}.{number}"
    verdict = Verdict.SOLVED if number else Verdict.UNSOLVED
    tests = {"test_a": TestStatus.PASSED, "test_<b>": TestStatus.FAILED}
    return Episode(
        id=name,
        task_id=task,
        status=Status.COMPLETED,
        grade=Grade(verdict, said, tests=tests, restored=("tests/test_a.py",), log=said),
        reward=float(number),
        trajectory=Trajectory(name, turns, dropped={"aborted": 3}),
        patch=PATCH,
        timings={"boot": 0.4, "agent": 4.0, "grade": 1.0, "total": 5.4},
        log=said,
    )


def _gaps() -> Iterator[float]:
    return chain([-1.0], repeat(0.25))


def make_run(root: Path, *, name: str = "a run", said: str = "Done.") -> Path:
    """Write a run of two steps with the writers of `swerl train`."""
    run = root / name
    run.mkdir(parents=True)
    write_json(run / "recipe.resolved.json", {"name": name, "steps": 5})
    save_tokenizer(byte_tokenizer(), run / "initial_model")
    write_json(run / "initial_model" / "config.json", {"model_type": "qwen3"})
    with EventLog(run / "events.jsonl") as log:
        for step in range(2):
            stage = f"{step:05d}"
            episodes = tuple(_episode(stage, "some/task", n, said=said) for n in range(2))
            for episode in episodes:
                folder = run / "episodes" / stage / f"some_task.{episode.id[-1]}"
                record.write(folder, episode)
            entry = prompts.entry(step, Group("some/task", episodes), prompts.Fate.TRAINED)
            prompts.append(run / "prompts.jsonl", [entry])
            rows = [
                row for e in episodes for row in to_samples(e.trajectory, episode=e.id, task="t")
            ]
            (run / "samples").mkdir(exist_ok=True)
            tables.write_samples(run / "samples" / f"{stage}.parquet", rows, [1.0] * len(rows), {})
            # The trainer differs by a quarter, and by more on the first token of each row.
            tables.write_logprobs(
                run / "logprobs" / f"{stage}.parquet",
                [
                    (row.episode, [gap + lp for gap, lp in zip(_gaps(), trained, strict=False)])
                    for row in rows
                    for trained in [
                        [lp for lp, on in zip(row.logprobs, row.mask, strict=True) if on]
                    ]
                ],
            )
            log(StepEnded(step, {"reward": 0.5, "solve_rate": 0.5, "kl": 0.1, "odd": float("nan")}))
            log(EvalEnded(step, "heldout", 0.5, 10, 0.3, 0.7))
            log(EvalEnded(step, "heldout", 0.25 + step / 2, 10, 0.3, 0.7, agent="unseen-agent"))
    write_json(run / "state.json", {"step": 2, "finished": False, "evals_done": []})
    return run


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[TestClient]:
    app = server.application(Site(tmp_path), TOKEN)
    async with TestClient(TestServer(app)) as opened:
        yield opened


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            if key in ("href", "src") and value and not value.startswith("#"):
                self.found.append(value)
            if key == "style" or key.startswith("on"):
                self.inline.append(f"{tag} {key}")


def _links(page: str) -> _Links:
    parser = _Links()
    parser.feed(page)
    return parser


@pytest.fixture
def shown(client: TestClient, tmp_path: Path) -> TestClient:
    """The pages of one run."""
    make_run(tmp_path)
    return client


async def _crawl(client: TestClient, start: str = f"/{TOKEN}/index.html") -> dict[str, str]:
    """Return address -> text of every page that links lead to; each must exist."""
    todo, pages = [start], {}
    while todo:
        address = todo.pop()
        if address in pages:
            continue
        answer = await client.get(address)
        assert answer.status == 200, address
        pages[address] = await answer.text()
        if answer.content_type == "text/html":
            found = _links(pages[address]).found
            todo += [urljoin(address, link).split("#")[0] for link in found]
    return pages


async def test_every_link_leads_to_a_page_without_script_or_inline_style(shown: TestClient) -> None:
    pages = await _crawl(shown)
    assert sum("/t2.html" in address for address in pages) == 4
    for address, page in pages.items():
        if address.endswith(".html"):
            assert not _links(page).inline and "script" not in _links(page).tags, address


async def test_a_run_of_several_agents_shows_their_solve_rates(shown: TestClient) -> None:
    page = await (await shown.get(f"/{TOKEN}/r/a%20run/index.html")).text()
    matrix = page[page.index('id="agents"') :]
    row = re.search(r'<th scope="row">unseen-agent</th><td class="num">([^<]*)</td>', matrix)
    assert row and row[1] == "0.25 → 0.75"


async def test_a_step_shows_verdict_advantage_and_tokens_without_colour(shown: TestClient) -> None:
    pages = await _crawl(shown)
    step = next(page for address, page in pages.items() if address.endswith("/s/00001.html"))
    assert "attempt 1: solved" in step and "✓" in step and "✗" in step
    assert "trained in step 1" in step


async def test_an_episode_shows_conversation_patch_tests_and_losses(shown: TestClient) -> None:
    address = f"/{TOKEN}/r/a run/e/00001/some_task.1/index.html"
    page = await (await shown.get(address)).text()
    for text in ("Fix it.", "Hmm.", "I look.", "restored before grading", "3 sampled tokens"):
        assert text in page
    assert "sampled, not trained</dt><dd>none" in page
    assert "test_&lt;b&gt;" in page and "&lt;b&gt;" in page and "<b>'" not in page
    assert '<span class="chip">branch 2' in page


async def test_two_attempts_are_shown_from_where_they_part(
    client: TestClient, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    other = _episode("00001", "some/task", 1, said="Another result.")
    record.write(run / "episodes" / "00001" / "some_task.1", other)
    address = f"/{TOKEN}/r/a run/e/00001/some_task.0/vs/a run/00001/some_task"
    page = await (await client.get(f"{address}.1.html")).text()
    assert "The first turn is the same" in page and "already see something different" in page
    assert "Another result." in page and "Fix it." not in page
    page = await (await client.get(f"{address}.0.html")).text()
    assert "The first 3 turns are the same. The attempts do not differ" in page
    assert (await client.get(f"{address}.9.html")).status == 404


async def test_attempts_of_two_runs_are_shown_side_by_side(
    client: TestClient, tmp_path: Path
) -> None:
    make_run(tmp_path)
    make_run(tmp_path, name="other", said="Another result.")
    address = f"/{TOKEN}/r/a run/e/00001/some_task.0/vs/other/00000/some_task.1.html"
    page = await (await client.get(address)).text()
    assert "The first turn is the same" in page and "Another result." in page
    assert ">a run, 00001<" in page and ">other, 00000<" in page
    assert 'href="../../../../../../../../r/other/e/00000/some_task.1/index.html"' in page


async def test_a_run_shows_its_recipe_and_the_logs_with_errors_first(
    client: TestClient, tmp_path: Path
) -> None:
    logs = make_run(tmp_path) / "logs" / "attempt-01"
    logs.mkdir(parents=True)
    (logs / "engine.log").write_text("all is well\n")
    (logs / "trainer-rank0.log").write_text("x" * 9000 + "\nValueError: <b>\n")
    page = await (await client.get(f"/{TOKEN}/r/a run/index.html")).text()
    assert "steps = 5" in page
    assert page.index("Log trainer-rank0.log") < page.index("Log engine.log")
    assert "ValueError: &lt;b&gt;" in page and "x" * 5000 not in page


async def test_tokens_have_exact_ids_and_log_probabilities(shown: TestClient) -> None:
    page = await (await shown.get(f"/{TOKEN}/r/a run/e/00000/some_task.0/t2.html")).text()
    episode = _episode("00000", "some/task", 0)
    turn = episode.trajectory.turns[1]
    shown = re.search(r'id="ids">([\d ]+)<', page)
    assert shown and tuple(map(int, shown[1].split())) == turn.prompt_ids + turn.output_ids
    both = "sampled · log-probability -2.50000 by the engine, -2.25000 by the trainer, "
    assert page.count(f"{both}difference +0.25000 · advantage +0.00 · v1") == len(turn.output_ids)
    assert "tok p0 far" not in page and "mask 1" in page


async def test_a_token_on_which_engine_and_trainer_differ_is_framed(shown: TestClient) -> None:
    page = await (await shown.get(f"/{TOKEN}/r/a run/e/00000/some_task.0/t1.html")).text()
    assert page.count("tok p4 far") == 2  # the token, and the legend
    assert "difference -1.00000" in page
    # A Turn that two rows share is trained in the first alone, and the third in the second row.
    page = await (await shown.get(f"/{TOKEN}/r/a run/e/00000/some_task.0/t3.html")).text()
    assert page.count("tok p4 far") == 2


async def test_log_probabilities_that_are_missing_or_damaged_cost_their_own_part(
    client: TestClient, tmp_path: Path
) -> None:
    path = make_run(tmp_path) / "logprobs" / "00000.parquet"
    address = f"/{TOKEN}/r/a run/e/00000/some_task.0/t1.html"
    whole, other = path.read_bytes(), [("00000/some/task.0", [-1.0, float("nan")])]

    async def page() -> str:
        answer = await client.get(address)
        assert answer.status == 200
        return await answer.text()

    path.write_bytes(whole[: len(whole) // 2])
    assert "cannot read the samples" in await page()
    tables.write_logprobs(path, other)
    assert "do not match 00000/some/task.0" in await page()
    path.unlink()
    shutil.rmtree(path.parent)
    shown = await page()
    assert "the trainer has no record" in shown and "log-probability -0.10000 ·" in shown


def test_a_token_of_any_text_and_number_is_shown() -> None:
    class Odd:
        def text(self, ids: Sequence[int]) -> str:
            return {1: "\0", 2: "\udc80", 3: "<b>"}[ids[0]]

    nan, inf = float("nan"), float("inf")
    turn = Turn(0, None, (1,), (2, 3, 1), (-0.1, nan, -inf), Finish.STOP, "v1")
    found = tokens.strip(turn, Odd(), 0, (-0.1, -1.0, -2.0))  # type: ignore[arg-type]
    assert [conversation.clean(token.text) for token in found] == ["␀", "\\udc80", "<b>", "␀"]
    assert [token.level for token in found] == [4, 4, 0, 0]
    assert [token.is_far for token in found] == [False, False, True, True]


def make_evaluation(root: Path, name: str, *solved: int) -> Path:
    """Write a run of `swerl eval` with two attempts at each of some Tasks, by its own writers."""
    folder = root / name
    results = []
    for number, count in enumerate(solved):
        task, stage = f"org/task-{number}", f"digest-{number}"
        verdicts = ["solved"] * count + ["unsolved"] * (2 - count)
        results.append(TaskResult(task, 2, count, tuple(verdicts), f"org/r{number % 2}", 10))
        for k in range(2):
            path = folder / "episodes" / stage / f"org_task-{number}.{k}"
            record.write(path, _episode(stage, task, k))
    write_json(folder / "recipe.resolved.json", {"name": name, "steps": 45})
    about = {"agent": "builtin", "engine": "openai=http://x", "model": "m", "dollars": 0.5}
    missing = {"missing": ["token ids", "log-probabilities"]}
    (folder / "evals").mkdir()
    write_json(folder / "evals" / "eval.json", about | missing | summary(results, 2))
    return folder


async def test_evaluations_are_shown_task_by_task_and_side_by_side(
    client: TestClient, tmp_path: Path
) -> None:
    make_evaluation(tmp_path, "eval-a", 0, 1, 2)
    make_evaluation(tmp_path, "eval-b", 2, 1, 2, 0)
    pages = await _crawl(client)
    start = pages[f"/{TOKEN}/index.html"]
    assert start.count(">evaluated<") == 2 and "untouched" not in start
    listed = pages[f"/{TOKEN}/evals.html"]
    assert "50.0 %" in listed and "62.5 %" in listed
    page = pages[f"/{TOKEN}/r/eval-b/v/eval.html"]
    assert "The engine gives no token ids, log-probabilities" in page
    assert 'href="../../../r/eval-b/e/digest-0/org_task-0.1/index.html"' in page
    assert 'href="../../../r/eval-b/e/digest-0/org_task-0.0/index.html">org/task-0</a>' in page
    assert "✗ unsolved <b>3</b>" in page
    assert '<td>org/r0</td><td class="num">2</td>' in page and "<td>org/r1</td>" in page
    pair = pages[f"/{TOKEN}/r/eval-a/v/eval/vs/eval-b/eval.html"]
    assert pair.index("org/task-0") < pair.index("org/task-1") < pair.index("org/task-3")
    beside = "r/eval-a/e/digest-0/org_task-0.0/vs/eval-b/digest-0/org_task-0.0.html"
    assert f'href="../../../../../../{beside}">side by side' in pair
    assert start.count("50.0 %") == 1
    for text in ("+33.3", "not evaluated", "noise floor", "for each point gained", "org/r1"):
        assert text in pair, text


async def test_an_evaluation_without_a_report_or_with_a_damaged_one_says_so(
    client: TestClient, tmp_path: Path
) -> None:
    for name in ("eval-a", "eval-b", "eval-c", "eval-d"):
        make_evaluation(tmp_path, name, 1)
    (tmp_path / "eval-a" / "evals" / "eval.json").unlink()
    (tmp_path / "eval-b" / "evals" / "eval.json").write_text('{"tasks": [')
    path = tmp_path / "eval-c" / "evals" / "eval.json"
    write_json(path, json.loads(path.read_text()) | {"pass_at_1": 3})
    page = await (await client.get(f"/{TOKEN}/r/eval-a/index.html")).text()
    assert "unfinished" in page and "the same command continues" in page and "digest-0" in page
    for path in ("index.html", "evals.html", "r/eval-b/index.html"):
        assert (await client.get(f"/{TOKEN}/{path}")).status == 200
    listed = await (await client.get(f"/{TOKEN}/evals.html")).text()
    assert listed.count("cannot read") == listed.count("not readable") == 1
    assert "50.0 %" in listed
    for name in ("eval-b", "eval-c", "eval-a"):
        answer = await client.get(f"/{TOKEN}/r/{name}/v/eval.html")
        assert answer.status == 404 and "Traceback" not in await answer.text()


async def test_an_evaluation_inside_training_has_the_same_page(
    client: TestClient, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    name = "eval-heldout-00002"
    record.write(run / "episodes" / name / "some_task.0", _episode(name, "some/task", 0))
    found = summary([TaskResult("some/task", 1, 0, ("unsolved",))], 1)
    (run / "evals").mkdir()
    write_json(run / "evals" / f"{name}.json", {"step": 2, "split": "heldout", **found})
    pages = await _crawl(client)
    page = pages[f"/{TOKEN}/r/a%20run/v/{name}.html"]
    assert f'href="../../../r/a%20run/e/{name}/some_task.0/index.html"' in page
    assert name in pages[f"/{TOKEN}/r/a%20run/index.html"]


async def test_a_hostile_transcript_is_text(client: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path, said=HOSTILE)
    for address, page in (await _crawl(client)).items():
        if address.endswith(".html"):
            assert set(_links(page).tags) & {"script", "img", "iframe", "object"} == set()
            assert "\0" not in page and "{{" not in page.replace("{{ 7 * 7 }}", "")
    page = await (await client.get(f"/{TOKEN}/r/a run/e/00001/some_task.1/index.html")).text()
    assert "&lt;script&gt;" in page and "␀" in page


async def test_only_the_token_opens_and_nothing_leaves_the_folder(
    client: TestClient, tmp_path: Path
) -> None:
    make_run(tmp_path)
    (tmp_path.parent / "secret.html").write_text("secret")
    for address in ("/", "/index.html", f"/{TOKEN}x/index.html", f"/{TOKEN[:-1]}/index.html"):
        assert (await client.get(address)).status == 404
    for path in (
        "../secret.html", "..%2f..%2fsecret.html", "r/../../secret.html", "style.css/../x",
        "r/a run/s/..%2f..%2fsecret.html", "r/a run/e/../../index.html", "r/%00/index.html",
        "r/a run/e/00000/..%2f00001/index.html", "r/a run/e/..%2f..%2f../x/index.html",
        "r/a run/e/00000/some_task.0/t9.html", "r/a run/e/00000/some_task.0/t0.html",
        "r/a run/s/00000~x.html", "r/a run/s/%00.html", "site.py", "templates/base.html",
    ):  # fmt: skip
        answer = await client.get(f"/{TOKEN}/{path}")
        text = await answer.text()
        assert answer.status == 404 and "secret</" not in text and "Traceback" not in text
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")


async def test_damage_is_shown_as_what_it_is(client: TestClient, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    stage = run / "episodes" / "00001"
    (stage / "some_task.0" / "episode.json").unlink()
    (stage / "some_task.1" / "trajectory.json").write_bytes(b'{"turns": [')
    (stage / "some_task.1" / "grade.json").write_text("[]")
    (stage / "half.0").mkdir()
    (run / "samples" / "00001.parquet").write_bytes(b"PAR1")
    (run / "events.jsonl").open("a").write('{"event": "StepEnded", "step": 9\n{"event": "StepE')
    (run / "prompts.jsonl").open("ab").write(b"\xff{}\n[]\n")
    (stage / "odd.0").mkdir()
    (stage / "odd.0" / "episode.json").write_text('{"timings": 3, "reward": "x", "turns": []}')
    make_run(tmp_path, name="no state").joinpath("state.json").write_text("{")
    make_run(tmp_path, name="no recipe").joinpath("recipe.resolved.json").write_text("[1")
    (tmp_path / "empty" / "x").mkdir(parents=True)
    pages = await _crawl(client)
    shown = "\n".join(pages.values())
    assert "Traceback" not in shown
    assert "not finished: its summary was never written" in shown
    assert "trajectory.json" in shown and "is damaged" in shown
    assert "state.json: Expecting" in shown and "recipe.resolved.json: Expecting" in shown


async def test_json_that_is_nested_too_deeply_costs_its_own_part(
    client: TestClient, tmp_path: Path
) -> None:
    run, deep = make_run(tmp_path), '{"event": "StepEnded", "a": ' + "[" * 50_000
    episodes = run / "episodes" / "00000"
    files = [episodes / "some_task.0" / name for name in ("episode.json", "grade.json")]
    files += [episodes / "some_task.1" / "trajectory.json", run / "state.json"]
    for file in files:
        file.write_text(deep)
    for name in ("events.jsonl", "prompts.jsonl"):
        with (run / name).open("a") as lines:
            lines.write(f"{deep}\n")
    pages = await _crawl(client)
    assert "unreadable" not in pages[f"/{TOKEN}/r/a%20run/s/00001.html"]
    assert "maximum recursion" in pages[f"/{TOKEN}/r/a%20run/e/00000/some_task.1/index.html"]


async def test_results_of_rollouts_and_sessions_are_shown(
    client: TestClient, tmp_path: Path
) -> None:
    record.write(tmp_path / "rollouts" / "some_task.0", _episode("x", "some/task", 1))
    served = tmp_path / "serve" / "0" / "1"
    served.mkdir(parents=True)
    said = {"role": "assistant", "text": "Hello there.", "tool_calls": []}
    line = {"turn": 1, "parent": None, "prompt": [{"role": "user", "text": "Hi!"}], "said": said}
    (served / "transcript.jsonl").write_text(json.dumps(line) + '\n{"turn": 2')
    pages = await _crawl(client)
    shown = "\n".join(pages.values())
    assert "Hello there." in shown and "Hi!" in shown
    assert "recorded without a grade" in shown
    assert "does not name the model" in shown


async def test_an_empty_folder_says_how_to_begin(client: TestClient) -> None:
    assert "swerl train twin_cpu" in await (await client.get(f"/{TOKEN}/")).text()


def test_a_stage_of_many_groups_reads_one_page_of_them(tmp_path: Path) -> None:
    for number in range(GROUPS_A_PAGE + 1):
        folder = tmp_path / "many" / f"t{number}.0"
        folder.mkdir(parents=True)
        (folder / "episode.json").write_text('{"task_id": "t", "verdict": "solved"}')
    # The last one is beyond the first page, so its damage is not even met.
    (folder / "episode.json").write_text("{")
    site = Site(tmp_path)
    assert "damaged" not in site.page("r/many/s/all.html").body.decode()
    assert "cannot read" in site.page("r/many/s/all~2.html").body.decode()


def test_a_folder_at_rest_is_listed_once_and_a_new_episode_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tmp_path / "stage"
    record.write(stage / "task.0", _episode("stage", "task", 0))
    long_ago = stage.stat().st_mtime - 60
    os.utime(stage, (long_ago, long_ago))
    listed: list[Path] = []
    plain = index._folders
    monkeypatch.setattr(index, "_folders", lambda folder: listed.append(folder) or plain(folder))
    for _ in range(3):
        assert index.groups(stage) == {"task": ["task.0"]}
    assert listed == [stage]
    record.write(stage / "task.1", _episode("stage", "task", 1))
    assert index.groups(stage) == {"task": ["task.0", "task.1"]}


def test_a_run_of_an_older_version_draws_the_metrics_that_it_has(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    line = {"event": "StepEnded", "step": 0, "metrics": {"odd": 1.0}}
    (run / "events.jsonl").write_text(json.dumps(line) + "\n")
    page = Site(tmp_path).page("r/a run/index.html").body.decode()
    assert "odd" in page and "Verdicts" not in page


@pytest.mark.parametrize("text", ["x = '" + "a\\" * 90_000, "a=" * 90_000, "(" * 180_000])
def test_a_very_long_line_has_no_colours(text: str) -> None:
    patch = f"--- a/a.py\n+++ b/a.py\n@@ -1 +1,2 @@\n+import os\n+{text}\n"
    begin = time.perf_counter()
    shown = conversation.coloured_patch(patch)
    assert time.perf_counter() - begin < 1
    assert '<span class="kn">import</span>' in shown
    assert f"+{escape(text)}" in shown


def test_commands_in_a_remedy_are_code_and_nothing_else_is_markup() -> None:
    text = "{% import 'macros.html' as m %}{{ m.marked('<b> `swerl why` or `<i>`') }}"
    shown = _templates().from_string(text).render()
    assert shown == "&lt;b&gt; <code>swerl why</code> or <code>&lt;i&gt;</code>"


def test_an_episode_is_drawn_over_time() -> None:
    def turn(number: int, started_s: float, finish: str) -> conversation.ShownTurn:
        facts = {"started_s": started_s, "seconds": 1.0}
        return conversation.ShownTurn(number, number - 1 or None, finish=finish, facts=facts)

    timings = {"boot": 2.0, "hide_future": 1.0, "agent": 9.0, "grade": 2, "total": 17.0}
    turns = [turn(1, 4.0, "tool_calls"), turn(2, 6.0, "stop"), turn(3, 9.0, "stop")]
    lanes = charts.lanes(timings, turns)
    assert lanes and lanes.total_s == 13.0
    places = {
        lane: [(bar.label, round(bar.x / charts.WIDTH * 13, 1), bar.seconds) for bar in bars]
        for lane, bars in lanes.lanes.items()
    }
    assert places["phases"] == [("boot", 0.0, 2.0), ("agent", 2.0, 9.0), ("grade", 11.0, 2)]
    assert places["model"] == [("model", at, 1.0) for at in (4.0, 6.0, 9.0)]
    assert places["tools"] == [("tool", 5.0, 1.0)]
    assert charts.lanes({}, []) is None
    assert charts.lanes({"total": 0.0, "boot": "x"}, []) is None


def test_a_change_by_an_editor_is_shown_as_a_diff() -> None:
    change = conversation.edit({"path": "a.py", "old_str": "a\n<b>", "new_str": "a\nc"})
    assert change == (
        '<span class="row same"> a</span><span class="row del">-&lt;b&gt;</span>'
        '<span class="row add">+c</span>'
    )
    long = conversation.edit({"old_string": "x\n" * 3000, "new_string": ""})
    assert str(long).count("row del") == 3001
    assert conversation.edit({"path": "a.py", "new_str": "x"}) is None


def test_prompts_of_both_template_families_split_by_role() -> None:
    chatml = (
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response>"
    )
    glm = "[gMASK]<sop><|system|>\nBe.<|user|>\nHi<|observation|>\nout<|assistant|>"
    assert [(p.role, p.text) for p in conversation.split(chatml)] == [
        ("system", "Be."),
        ("tool", "1"),
    ]
    shown = [(p.role, p.text) for p in conversation.split(glm)]
    assert shown == [("system", "Be."), ("user", "Hi"), ("tool", "out")]
    assert [p.role for p in conversation.split("no markers")] == ["context"]


def test_the_reward_is_written_as_an_image(tmp_path: Path) -> None:
    root = make_run(tmp_path / "runs")
    out = tmp_path / "reward.svg"
    done = CliRunner().invoke(typer_app, ["view", str(root), "-o", str(out)])
    assert done.exit_code == 0, done.output
    image = ElementTree.fromstring(out.read_text())
    paths = [path.get("d") for path in image.iter("{http://www.w3.org/2000/svg}path")]
    assert "M0.0 80.0L600.0 80.0" in paths
    texts = [text.text for text in image.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "reward 0.5" and texts[-4:] == ["step 0", "step 1", "1", "0"]
    empty = CliRunner().invoke(typer_app, ["view", str(tmp_path), "-o", str(tmp_path / "x.svg")])
    assert "no finished step" in str(empty.exception)


async def test_a_taken_port_is_two_lines(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((server.HOST, 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot listen") as error:
            async with server.serving(Site(tmp_path), taken.getsockname()[1]):
                pass
    assert "--port" in error.value.hint


def test_a_folder_without_permission_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    closed = make_run(tmp_path, name="closed")
    whole = index.os.scandir

    def scandir(path: Path) -> object:
        if str(path).startswith(str(closed)):
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(index.os, "scandir", scandir)
    assert run.name in Site(tmp_path).page("index.html").body.decode()
