"""Any OpenAI-compatible server as a ChatEngine: to try agents, not to train."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict

from swerl.core.chat import ChatReply, ChatRequest, Finish, Json, Message, Role, ToolCall, Usage
from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, EngineLostError, GatewayError, InputError, Refusal
from swerl.core.secrets import secret

_FINISHES: Mapping[str, Finish] = {"tool_calls": Finish.TOOL_CALLS, "length": Finish.LENGTH}
_UNAVAILABLE = frozenset({408, 429, *range(500, 600)})
_REFUSED = frozenset({401, 403})
_ABSENT = frozenset({404})
_PROBE = {"role": "user", "content": "Hi"}
_LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of the reply's limit; OpenAI's newer models refuse the first, other servers the second."""
_THINKING = ("reasoning_content", "reasoning")
_TOO_LONG = re.compile(
    r"(?i)context.(length|window|size)|model length|prompt is too long|token limit|tokens allowed"
)
"""Words of the servers about a prompt for which their context has no room."""
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
"""Usual names of environment variables; any other text may be the key itself."""


class Options(BaseModel):
    """Settings of `engine.type = "openai"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    """URL of the API, including `/v1`."""
    model: str
    """Name of the model at the server."""
    api_key: str | None = None
    """Environment variable with the key; None sends no key: a local server needs none."""


@asynccontextmanager
async def open(options: Options, setup: EngineSetup) -> AsyncIterator[OpenAIEngine]:
    """Open the engine.

    Raises InputError if the variable with the key is not set, and EngineLostError if no server
    answers at `base_url`.
    """
    key = secret(options.api_key) if options.api_key else None
    if options.api_key and key is None:
        variable = f" {options.api_key}" if _VARIABLE.fullmatch(options.api_key) else ""
        raise InputError(
            f"the environment variable{variable} of engine.api_key is not set",
            hint="engine.api_key is the name of a variable; put the server's API key into it",
        )
    engine = OpenAIEngine(options, key)
    try:
        await engine.require_model()
        yield engine
    finally:
        await engine.close()


class OpenAIEngine:
    """Implements ChatEngine."""

    def __init__(self, options: Options, key: str | None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._base_url = options.base_url.rstrip("/")
        self._url = self._base_url + "/chat/completions"
        self._model = options.model
        self._limit = _LIMITS[0]
        self._thinking = ""
        """The server's name of thinking, which some require in the history; empty until known."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._http = aiohttp.ClientSession(headers=headers, timeout=timeout)

    async def require_model(self) -> None:
        """Raise EngineLostError if no server answers, EngineError if it refuses key or model.

        Not every server lists its models; only then one token is sampled.
        """
        models = self._base_url + "/models"
        try:
            async with self._http.get(models) as response:
                listed = await response.read()
            self._refuse(models, response.status, listed, statuses=_REFUSED)
            if response.status == 200 and self._model in _names(listed):
                return
            async with self._http.get(f"{models}/{quote(self._model)}") as response:
                if response.status == 200:
                    return
            body = {"model": self._model, "messages": [_PROBE], "max_tokens": 1}
            async with self._http.post(self._url, json=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, ValueError) as error:
            raise _lost(self._base_url, error) from error
        self._refuse(self._url, response.status, answer, statuses=_REFUSED | _ABSENT)

    def _refuse(self, url: str, status: int, answer: bytes, *, statuses: frozenset[int]) -> None:
        """Raise EngineError with a remedy if the status is one of these."""
        if status not in statuses:
            return
        if status in _REFUSED:
            hint = "set engine.api_key to the name of the environment variable with the key"
        else:
            hint = f"is {self._model!r} the model's name there, and does the URL end with /v1?"
        raise EngineError(_refusal(url, status, answer), hint=hint)

    async def chat(self, request: ChatRequest, session: str) -> ChatReply:
        """Return the next assistant message.

        Raises EngineLostError if no server answers, EngineError on a refusal or a broken answer,
        and GatewayError if the server's context has no room for the request.
        """
        fields = self._request(request)
        body = orjson.dumps(fields)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.post(self._url, data=body, headers=headers) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise _lost(self._url, error) from error
        if response.status != 200:
            message = _refusal(self._url, response.status, answer)
            if response.status in (400, 413) and _TOO_LONG.search(answer.decode(errors="replace")):
                raise GatewayError(f"prompt is too long: {message}", refusal=Refusal.CONTEXT)
            if response.status == 400 and _LIMITS[0] in fields and _LIMITS[1].encode() in answer:
                self._limit = _LIMITS[1]
                return await self.chat(request, session)
            if response.status in _UNAVAILABLE:
                hint = "the server is overloaded or starting; try again"
                raise EngineLostError(message, hint=hint)
            self._refuse(self._url, response.status, answer, statuses=_REFUSED | _ABSENT)
            raise EngineError(message, hint="check engine.base_url and engine.model")
        reply, name = _reply(answer, self._url)
        self._thinking = name or self._thinking
        return reply

    async def close(self) -> None:
        await self._http.close()

    def _request(self, request: ChatRequest) -> dict[str, Json]:
        # Some servers refuse a history with a blank reply, such as one of thinking only.
        messages = (
            message
            for message in request.messages
            if message.role is not Role.ASSISTANT or message.text.strip() or message.tool_calls
        )
        body: dict[str, Json] = {
            "model": self._model,
            "messages": [_message(message, self._thinking) for message in messages],
            self._limit: request.max_tokens,
        }
        functions: list[Json] = [
            {"name": tool.name, "description": tool.description, "parameters": {**tool.parameters}}
            for tool in (*request.tools, *request.late_tools)
        ]
        if functions:
            body["tools"] = [{"type": "function", "function": each} for each in functions]
        return body


def _refusal(url: str, status: int, answer: bytes) -> str:
    return f"{url} answered {status}: {answer[:200].decode(errors='replace')}"


def _names(listed: bytes) -> list[str]:
    """Return the names in an answer of `/models`; none if it has another form."""
    try:
        return [str(model["id"]) for model in orjson.loads(listed)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []


def _lost(url: str, error: Exception) -> EngineLostError:
    hint = "is the server running, and is engine.base_url right?"
    return EngineLostError(f"no answer from {url}: {error}", hint=hint)


def _message(message: Message, thinking: str) -> dict[str, Json]:
    """Return a message as the server reads it; `thinking` is its name of that, if known."""
    written: dict[str, Json] = {"role": message.role.value, "content": message.text}
    if message.role is Role.TOOL:
        written["tool_call_id"] = message.tool_call_id
    if message.role is Role.ASSISTANT and thinking:
        written[thinking] = message.thinking
    if message.tool_calls:
        written["content"] = message.text or None
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": orjson.dumps(dict(call.arguments)).decode(),
                },
            }
            for call in message.tool_calls
        ]
    return written


def _reply(answer: bytes, url: str) -> tuple[ChatReply, str]:
    """Read a reply; return it with the server's name of thinking, empty without any."""
    body: Any = None
    with contextlib.suppress(orjson.JSONDecodeError):
        body = orjson.loads(answer)
    if not isinstance(body, dict):
        raise EngineError(
            f"{url} did not answer in JSON: {answer[:80]!r}",
            hint="engine.base_url must end with /v1",
        )
    try:
        choice = body["choices"][0]
        message = choice["message"]
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        name = next((name for name in _THINKING if message.get(name)), "")
        content = message.get("content") or ""
        usage = body.get("usage") or {}
        prompt_details = usage.get("prompt_tokens_details") or {}
        output_details = usage.get("completion_tokens_details") or {}
        reply = ChatReply(
            id=str(body.get("id", "")),
            message=Message(
                Role.ASSISTANT,
                _text(content, "text"),
                message[name] if name else _text(content, "thinking"),
                tuple(call for call in calls if call is not None),
            ),
            finish=_FINISHES.get(choice.get("finish_reason"), Finish.STOP),
            usage=Usage(
                prompt_tokens=usage.get("prompt_tokens") or 0,
                completion_tokens=usage.get("completion_tokens") or 0,
                cached_tokens=prompt_details.get("cached_tokens") or 0,
                thinking_tokens=output_details.get("reasoning_tokens") or 0,
            ),
            malformed_calls=calls.count(None),
        )
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise EngineError(
            f"{url} sent no chat completion: {answer[:200].decode(errors='replace')}",
            hint="engine.base_url must be OpenAI-compatible",
        ) from error
    return reply, name


def _text(content: Any, kind: str) -> str:
    """Return the text of one kind in a content, which Mistral's servers divide into parts."""
    if isinstance(content, str):
        return content if kind == "text" else ""
    parts = [part[kind] for part in content if part["type"] == kind]
    return "".join(part if isinstance(part, str) else _text(part, "text") for part in parts)


def _call(call: dict[str, Any]) -> ToolCall | None:
    """Read a call; None if its arguments are not a JSON object."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    with contextlib.suppress(orjson.JSONDecodeError):  # some servers send the object itself
        arguments = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        return None
    return ToolCall(str(call.get("id", "")), str(function["name"]), arguments)
