"""The built-in agent, against a real HTTP server and real files."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from swerl.chat import Message
from swerl.errors import SandboxLostError
from swerl.harnesses.builtin import Builtin, Options, build
from swerl.interfaces import Endpoint, Listener
from swerl.patch import FileEdit
from swerl.sandbox import Exec
from swerl.task import GradingSpec, Task


@dataclass
class FolderSandbox:
    """A Sandbox without walls: commands run in a folder of this machine."""

    folder: Path
    id: str = "folder"

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
    ) -> Exec:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate(stdin)
        except TimeoutError:
            process.kill()
            await process.wait()
            return Exec(124, b"", b"", timed_out=True)
        assert process.returncode is not None
        return Exec(process.returncode, out, err)

    async def read(self, path: str) -> bytes:
        return Path(path).read_bytes()

    async def write(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    async def expose(self, listener: Listener) -> str:
        raise AssertionError("the agent lives outside")


class LostSandbox(FolderSandbox):
    """A Sandbox that died."""

    async def read(self, path: str) -> bytes:
        raise SandboxLostError("the sandbox is gone")


@dataclass
class Model:
    """A server that gives prepared replies and keeps what it was asked."""

    replies: list[list[dict[str, Any]]]
    stop_reason: str = "end_turn"
    delay_s: float = 0.0
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.connections.add(request.transport)
        await asyncio.sleep(self.delay_s)
        content = self.replies[len(self.bodies) - 1] if self.status == 200 else []
        body = {"content": content, "stop_reason": self.stop_reason}
        return web.json_response(body, status=self.status)

    def results(self) -> list[str]:
        """Every tool result that the agent sent back, in order."""
        blocks = self.bodies[-1]["messages"][2::2]
        return [block["content"] for message in blocks for block in message["content"]]


_NUMBERS = itertools.count()


def use(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"call_{next(_NUMBERS)}", "name": name, "input": arguments}


def edit(command: str, **arguments: Any) -> dict[str, Any]:
    return use("str_replace_editor", command=command, **arguments)


@asynccontextmanager
async def serve(model: Model) -> AsyncIterator[Endpoint]:
    app = web.Application()
    app.router.add_post("/v1/messages", model.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield Endpoint(f"http://{host}:{port}", "key-1", "policy")
    finally:
        await runner.cleanup()


def task_at(folder: Path) -> Task:
    return Task("t", "r", "host", str(folder), "Fix it.", GradingSpec("command"))


async def calls(folder: Path, *uses: dict[str, Any], **options: Any) -> list[str]:
    """Let a model make these calls one a turn; return what it read."""
    model = Model([[one] for one in uses] + [[{"type": "text", "text": "Done."}]])
    async with serve(model) as endpoint:
        agent = build(Options(**options))
        done = await agent.run(FolderSandbox(folder), task_at(folder), endpoint, 20)
    assert done.code == 0, done.log
    return model.results()


async def test_a_scripted_edit_is_made_and_submitted(tmp_path: Path) -> None:
    (tmp_path / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    edits = [
        FileEdit("calc.py", "    return a - b\n", "    return a + b\n"),
        FileEdit("new/notes.txt", "", "one\n"),
    ]
    agent = Builtin(Options())
    replies = [_blocks(message) for message in agent.script(edits, str(tmp_path))]
    model = Model(replies)
    async with serve(model) as endpoint:
        done = await agent.run(FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20)
    assert (done.code, done.limit, done.timed_out) == (0, False, False)
    assert (tmp_path / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert (tmp_path / "new/notes.txt").read_text() == "one\n"
    assert len(model.bodies) == len(replies) == 4
    assert model.results() == ["def add(a, b):\n    return a - b", "ok", "ok"]


def _blocks(message: Message) -> list[dict[str, Any]]:
    return [use(call.name, **dict(call.arguments)) for call in message.tool_calls]


async def test_the_request_is_an_anthropic_message_with_the_session_key(tmp_path: Path) -> None:
    model = Model([[{"type": "text", "text": "Hello."}]])
    async with serve(model) as endpoint:
        await build(Options(system_prompt="Be brief.")).run(
            FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20
        )
    body = model.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Fix it."}]
    assert (body["model"], body["system"]) == ("policy", "Be brief.")
    assert [tool["name"] for tool in body["tools"]] == ["bash", "str_replace_editor", "submit"]
    assert model.headers[0]["x-api-key"] == "key-1"


async def test_an_empty_system_prompt_is_left_out(tmp_path: Path) -> None:
    model = Model([[{"type": "text", "text": ""}]])
    async with serve(model) as endpoint:
        await build(Options(system_prompt="")).run(
            FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20
        )
    assert "system" not in model.bodies[0]


async def test_a_reply_without_a_call_ends_the_run_and_a_cut_one_says_so(tmp_path: Path) -> None:
    for stop_reason, limit in (("end_turn", False), ("max_tokens", True)):
        model = Model([[{"type": "text", "text": "I"}]], stop_reason=stop_reason)
        async with serve(model) as endpoint:
            done = await build(Options()).run(
                FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20
            )
        assert (done.code, done.limit) == (0, limit)


async def test_the_turn_limit_stops_a_model_that_never_submits(tmp_path: Path) -> None:
    model = Model([[use("bash", command="true")]] * 5)
    async with serve(model) as endpoint:
        done = await build(Options(max_turns=2)).run(
            FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20
        )
    assert done.limit
    assert len(model.bodies) == 2


async def test_several_calls_of_one_reply_are_answered_together(tmp_path: Path) -> None:
    first, second = use("bash", command="echo 1"), use("bash", command="echo 2")
    model = Model([[first, second], [use("submit")]])
    async with serve(model) as endpoint:
        await build(Options()).run(FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20)
    results = model.bodies[1]["messages"][2]["content"]
    assert [(r["tool_use_id"], r["content"]) for r in results] == [
        (first["id"], "1"),
        (second["id"], "2"),
    ]


async def test_the_budget_stops_a_slow_model_and_keeps_the_log(tmp_path: Path) -> None:
    model = Model([[use("bash", command="true")]], delay_s=5)
    async with serve(model) as endpoint:
        done = await build(Options()).run(
            FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 0.05
        )
    assert done.timed_out
    assert json.loads(done.log.splitlines()[0])["content"] == "Fix it."


async def test_an_answer_with_an_error_ends_the_run_as_failed(tmp_path: Path) -> None:
    async with serve(Model([], status=529)) as endpoint:
        done = await build(Options()).run(FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20)
    assert done.code == 1
    assert "529" in done.log


async def test_a_gateway_that_is_gone_ends_the_run_as_failed(tmp_path: Path) -> None:
    async with serve(Model([])) as endpoint:
        pass
    done = await build(Options()).run(FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20)
    assert done.code == 1


async def test_a_lost_sandbox_is_not_the_models_mistake(tmp_path: Path) -> None:
    model = Model([[edit("view", path="a.py")]])
    async with serve(model) as endpoint:
        with pytest.raises(SandboxLostError):
            await build(Options()).run(LostSandbox(tmp_path), task_at(tmp_path), endpoint, 20)


async def test_runs_at_the_same_time_share_one_http_session_that_ends_with_them(
    tmp_path: Path,
) -> None:
    agent = Builtin(Options())
    model = Model([[{"type": "text", "text": ""}]] * 4)
    async with serve(model) as endpoint:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(
                    agent.run(FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20)
                )
        assert agent._client._session is None
        done = await agent.run(FolderSandbox(tmp_path), task_at(tmp_path), endpoint, 20)
    assert done.code == 0


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo out; echo err >&2", "out\nerr"),
        ("true", "ok"),
        ("echo no; exit 3", "no\nexit code 3"),
        ("pwd | xargs basename", "{name}"),
    ],
)
async def test_bash_answers_with_what_the_command_printed(
    tmp_path: Path, command: str, expected: str
) -> None:
    assert await calls(tmp_path, use("bash", command=command)) == [
        expected.format(name=tmp_path.name)
    ]


async def test_a_bash_call_past_its_time_is_stopped_and_said_so(tmp_path: Path) -> None:
    (text,) = await calls(tmp_path, use("bash", command="exec sleep 20"), tool_timeout_s=0.1)
    assert text == "timed out after 0.1 s"


async def test_the_middle_of_a_long_output_is_left_out(tmp_path: Path) -> None:
    (text,) = await calls(tmp_path, use("bash", command="seq 1000"), max_output_chars=20)
    assert text.startswith("1\n2\n3\n")
    assert text.endswith("1000")
    assert "characters left out" in text


async def test_old_str_must_occur_exactly_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\ny = 2\n")
    missing, twice, empty, once = await calls(
        tmp_path,
        edit("str_replace", path="a.py", old_str="z", new_str="w"),
        edit("str_replace", path="a.py", old_str="x = 1", new_str="x = 3"),
        edit("str_replace", path="a.py", old_str="", new_str="w"),
        edit("str_replace", path="a.py", old_str="y = 2\n"),
    )
    assert "does not occur" in missing
    assert "occurs 2 times" in twice
    assert "does not occur" in empty
    assert once == "ok"
    assert (tmp_path / "a.py").read_text() == "x = 1\nx = 1\n"


async def test_insert_puts_a_line_after_the_given_one_within_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo")
    assert (
        await calls(
            tmp_path,
            edit("insert", path="a.py", insert_line=1, new_str="middle"),
            edit("insert", path="a.py", insert_line=99, new_str="last\n"),
            edit("insert", path="a.py", insert_line=0, new_str="first"),
        )
        == ["ok"] * 3
    )
    assert (tmp_path / "a.py").read_text() == "first\none\nmiddle\ntwo\nlast\n"


async def test_view_numbers_lines_and_lists_folders(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/a.py").write_text("one\ntwo\nthree\n")
    (tmp_path / ".hidden").write_text("")
    whole, part, listing = await calls(
        tmp_path,
        edit("view", path="pkg/a.py"),
        edit("view", path=str(tmp_path / "pkg/a.py"), view_range=[2, -1]),
        edit("view", path="."),
    )
    assert whole.split() == ["1", "one", "2", "two", "3", "three"]
    assert part.split() == ["2", "two", "3", "three"]
    assert listing.splitlines() == [str(tmp_path / p) for p in ("", "pkg", "pkg/a.py")]


async def test_create_refuses_what_exists_and_makes_parents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    refused, folder, made = await calls(
        tmp_path,
        edit("create", path="a.py", file_text="y"),
        edit("create", path=".", file_text="y"),
        edit("create", path="new/b.py", file_text="z"),
    )
    assert "exists" in refused
    assert "exists" in folder
    assert made == "ok"
    assert (tmp_path / "a.py").read_text() == "x"
    assert (tmp_path / "new/b.py").read_text() == "z"


@pytest.mark.parametrize(
    "call",
    [
        lambda: use("python", code="1"),
        lambda: use("bash"),
        lambda: use("bash", command=["ls"]),
        lambda: use("bash", command="a\0b"),
        lambda: edit("undo", path="a.py"),
        lambda: edit("view"),
        lambda: edit("view", path=""),
        lambda: edit("view", path="missing.py"),
        lambda: edit("view", path="a.py", view_range="1"),
        lambda: edit("view", path="a.bin"),
        lambda: edit("create", path="b.py"),
        lambda: edit("str_replace", path="missing.py", old_str="a"),
        lambda: edit("insert", path="a.py", insert_line="first", new_str="x"),
    ],
)
async def test_a_wrong_call_is_answered_with_text_not_an_end(
    tmp_path: Path, call: Callable[[], dict[str, Any]]
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    (text,) = await calls(tmp_path, call())
    assert text.startswith("error: ")


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_turn"):
        Options.model_validate({"max_turn": 3})
