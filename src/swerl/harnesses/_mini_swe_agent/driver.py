"""Runs mini-swe-agent inside a sandbox, with its own loop, prompts and formats.

What it is to do comes as one JSON object on standard input, so that neither the task's size nor
the session's key matters. Every message goes to standard output as a line of JSON, and at last an
object with `exit_status`. The agent's LiteLLM is left out: its model class asks the gateway, and
asks again only where the gateway says that it did not answer.
"""

from __future__ import annotations

import http.client
import inspect
import json
import logging
import os
import platform
import shlex
import ssl
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

_RETRIED = {408, 429, *range(500, 600)}
_ENDED = {"Submitted", "LimitsExceeded", "TimeExceeded", "RepeatedFormatError"}
"""How the agent ends by itself."""
_MAX_ERROR_CHARS = 500
_TOOL_TIMEOUT_S = 30
"""The agent's own default for one command."""
_MARKER = "/testbed"
"""The working directory that the agent's SWE-bench prompt names."""


class RefusedError(Exception):
    """The gateway refused a request, for good."""


class BusyError(Exception):
    """The gateway has no answer at the moment."""


def main() -> int:
    """Work on the task of standard input; return the exit code."""
    job: dict[str, Any] = json.load(sys.stdin)
    _forget_how_it_was_started(job["packages"])
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": folder}
        agent = _agent(job)
        for name in ("MSWEA_SILENT_STARTUP", "MSWEA_GLOBAL_CONFIG_DIR"):
            del os.environ[name]
    result = agent.run(job["prompt"])
    status = str(result.get("exit_status"))
    if status == "Submitted":
        _remove_submission(Path(job["workdir"], "patch.txt"), str(result.get("submission")))
    _say({"exit_status": status})
    return 0 if status in _ENDED else 1


def _forget_how_it_was_started(packages: str) -> None:
    """Leave the model's commands the environment and the standard input that an image gives."""
    sys.path.insert(0, packages)
    variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(variable.startswith(b"LC_CTYPE=") for variable in variables):
        os.environ.pop("LC_CTYPE", None)  # Python adds it by itself
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _agent(job: dict[str, Any]) -> Any:
    """Return the agent; its packages are imported once its settings are in the environment."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec

    logging.getLogger("minisweagent").handlers.clear()

    class Agent(DefaultAgent):  # type: ignore[misc]
        """Tells every message as it comes."""

        def add_messages(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
            for message in messages:
                _say({name: value for name, value in message.items() if name != "extra"})
            added: list[dict[str, Any]] = super().add_messages(*messages)
            return added

    config: dict[str, Any] = get_config_from_spec(job["config"])
    settings = config["agent"]
    settings["instance_template"] = settings["instance_template"].replace(_MARKER, job["workdir"])
    return Agent(_Model(config["model"], job), _environment(config["environment"], job), **settings)


class _Model:
    """Asks the gateway. Implements mini-swe-agent's Model, by its own LiteLLM model's rules."""

    def __init__(self, config: dict[str, Any], job: dict[str, Any]) -> None:
        self.config = SimpleNamespace(**config)
        self._url = urlsplit(job["url"])
        self._model = job["model"]
        self._headers = {
            "Authorization": f"Bearer {job['key']}",
            "Content-Type": "application/json",
        }

    def query(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        """Return the next message, with the commands that it asks for."""
        from minisweagent.models.utils.actions_toolcall import BASH_TOOL, parse_toolcall_actions
        from minisweagent.models.utils.retry import retry

        body = {
            "model": self._model,
            "messages": [
                {k: v for k, v in message.items() if k != "extra"} for message in messages
            ],
            "tools": [BASH_TOOL],
            "parallel_tool_calls": True,
        }
        log = logging.getLogger("minisweagent")
        for attempt in retry(logger=log, abort_exceptions=[RefusedError, OSError, ValueError]):
            with attempt:
                reply = self._post(json.dumps(body).encode())
        choice = reply["choices"][0]
        message: dict[str, Any] = choice["message"]
        calls = [
            SimpleNamespace(id=call["id"], function=SimpleNamespace(**call["function"]))
            for call in message.get("tool_calls") or ()
        ]
        more = {"template_kwargs": {"finish_reason": choice["finish_reason"]}}
        message["extra"] = {
            "actions": parse_toolcall_actions(
                calls,
                format_error_template=self.config.format_error_template,
                **_taken(parse_toolcall_actions, more),
            ),
            "cost": 0.0,
            "timestamp": time.time(),
        }
        return message

    def format_message(self, **message: Any) -> dict[str, Any]:
        return message

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: Any = None
    ) -> list[dict[str, Any]]:
        """Return what the model reads of its commands' outputs."""
        from minisweagent.models.utils.actions_toolcall import format_toolcall_observation_messages

        messages: list[dict[str, Any]] = format_toolcall_observation_messages(
            actions=message.get("extra", {}).get("actions", []),
            outputs=outputs,
            observation_template=self.config.observation_template,
            template_vars=template_vars,
        )
        return messages

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        """Return what templates may use of the model's settings."""
        return vars(self.config)

    def serialize(self) -> dict[str, Any]:
        return {"info": {"config": {"model": vars(self.config)}}}

    def _post(self, body: bytes) -> dict[str, Any]:
        connection = self._connect()
        try:
            connection.request("POST", f"{self._url.path}/v1/chat/completions", body, self._headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status == 200:
            reply: dict[str, Any] = json.loads(data)
            return reply
        may_retry = answer.getheader("x-should-retry") != "false"
        kind = BusyError if may_retry and answer.status in _RETRIED else RefusedError
        text = data.decode("utf-8", "replace")[:_MAX_ERROR_CHARS]
        raise kind(f"the gateway answered {answer.status}: {text}")

    def _connect(self) -> http.client.HTTPConnection:
        """Connect to the gateway directly, without the image's proxy and without a time limit."""
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "http":
            return http.client.HTTPConnection(host, port)
        roots = Path(sys.prefix, "etc", "cert.pem")
        context = ssl.create_default_context(cafile=str(roots) if roots.exists() else None)
        return http.client.HTTPSConnection(host, port, context=context)


def _environment(config: dict[str, Any], job: dict[str, Any]) -> Any:
    """Return the sandbox as the agent's Docker environment shows a container."""
    from minisweagent.environments.local import LocalEnvironment

    interpreter = config.get("interpreter", ["sh", "-c"])
    variables = config.get("env", {})
    if "BASH_ENV" in variables:  # it names root's; the same file of whoever this is
        variables["BASH_ENV"] = f"{os.environ.get('HOME', '/root')}/.bashrc"

    class Environment(LocalEnvironment):  # type: ignore[misc]
        """Runs commands as the Docker environment does: through its interpreter."""

        def execute(self, action: dict[str, Any], cwd: str = "", **options: Any) -> Any:
            words = shlex.join([*interpreter, action.get("command", "")])
            return super().execute(action | {"command": f"exec {words}"}, cwd, **options)

        def get_template_vars(self, **more: Any) -> dict[str, Any]:
            return {**self.config.model_dump(), **platform.uname()._asdict(), **more}

    timeout = job["tool_timeout_s"] or config.get("timeout", _TOOL_TIMEOUT_S)
    return Environment(cwd=job["workdir"], env=variables, timeout=timeout)


def _taken(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those arguments that a function of this release takes."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _remove_submission(path: Path, submission: str) -> None:
    """Remove the patch file that the agent's prompt asks for; the work tree itself is graded."""
    try:
        if submission.strip() and path.read_text(errors="replace").strip() == submission.strip():
            path.unlink()
    except OSError:
        return


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
