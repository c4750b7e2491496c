"""From a request to a recorded reply: its prompt, the engine's answer, the message for the client.

A reply joins the tree just before it is sent, so that the client's next request finds it, and
becomes a Turn once it was sent. One that is not received leaves the tree again and is counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from secrets import token_hex
from typing import TypeAlias, TypeVar

from swerl.core.chat import ChatReply, ChatRequest, Finish, Message, Role
from swerl.core.errors import BudgetError, EngineError, GatewayError, Refusal
from swerl.core.tree import Trajectory
from swerl.core.turn import Sampling, Turn
from swerl.gateway.answer import Answer, closed
from swerl.gateway.arguments import UNREADABLE, is_unreadable, usable_call
from swerl.gateway.history import History, Match, Node
from swerl.gateway.limits import Admission, SessionLimits
from swerl.gateway.retries import Asker, Twins
from swerl.gateway.speakers import Prompt, Speaker, Spoken

OnDelivered: TypeAlias = Callable[[Turn, Sequence[Message], ChatReply], None]
"""Told of each Turn, with the messages that were new and the reply."""

_T = TypeVar("_T")
_NOBODY = Asker()
_LONG_CHARS = 20_000
"""Characters from which a prompt is made in a thread; shorter ones take under 20 ms."""
_ABORT_S = 1.0
"""Seconds to wait for what an aborted reply came to, so that its tokens can be counted."""


class Conversation:
    """Everything that is said in one Session, in all its branches."""

    def __init__(
        self,
        session: str,
        speaker: Speaker,
        *,
        sampling: Sampling,
        limits: SessionLimits,
        on_delivered: OnDelivered | None,
    ) -> None:
        self.failure: EngineError | BudgetError | None = None
        self.admission = Admission(limits)
        self._session = session
        self._speaker = speaker
        self._sampling = sampling
        self.limits = limits
        self._on_delivered = on_delivered
        self._history = History(keeps_blank=not speaker.rereads)
        self._delivered: list[Node] = []
        self._dropped: Counter[str] = Counter()
        self._running: set[asyncio.Task[Spoken]] = set()
        self._answers: set[Answer] = set()
        self._twins = Twins()
        self._sent: dict[Node, Answer] = {}
        """Replies in the tree whose arrival is not yet certain."""
        self._opened_s = time.monotonic()
        self._salt = token_hex(4)
        self._num_minted = 0
        self._num_spoken = 0
        self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a reply is in the making, or was not delivered yet."""
        return bool(self._answers)

    async def count(self, request: ChatRequest) -> int:
        """Return the tokens of the prompt that this request would make."""
        self._check_open()
        match = self._history.match(request)
        return await self._aside(self._speaker.count, request, match)

    @asynccontextmanager
    async def answer(self, request: ChatRequest, asker: Asker = _NOBODY) -> AsyncIterator[Answer]:
        """Answer a request, or let a retry wait for the answer that is in the making.

        Leaving the context gives the reply up unless it was delivered or is asked for again.
        Raises GatewayError where the session's limits refuse the request.
        """
        self._check_open()
        match = self._history.match(request)
        answer = self._twin(match, request, asker) or await self._begin(match, request, asker)
        answer.hold()
        try:
            yield answer
        finally:
            answer.release()

    async def close(self) -> Trajectory:
        """Stop what is in the making and return the tree of what was delivered."""
        self._closed = True
        await self.stop(self._running)
        for answer in list(self._answers):
            answer.drop()
        turns = tuple(node.turn() for node in self._delivered)
        rewritten = sum(node.is_rewritten for node in self._delivered)
        return Trajectory(self._session, turns, dict(self._dropped), rewritten)

    def start(self, prompt: Prompt) -> asyncio.Task[Spoken]:
        """Let the engine answer in a task of its own."""
        task = asyncio.create_task(self._speak(prompt))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def stop(self, tasks: set[asyncio.Task[Spoken]]) -> None:
        """End these tasks. The engine hears of it where they are all that the session has."""
        tasks = set(tasks)
        if not tasks:
            return
        if tasks == self._running:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_ABORT_S):
                    await self._speaker.abort()
                    await asyncio.wait(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    def record(self, answer: Answer, spoken: Spoken) -> tuple[ChatReply, Node]:
        """Put a reply into the tree, with call ids of its own."""
        request = answer.prompt.request
        message = self._message(spoken, request)
        node = self._node(answer, spoken, message)
        reply = ChatReply(
            id=token_hex(12),
            message=message,
            finish=node.finish,
            usage=spoken.usage,
            model=request.model,
            malformed_calls=node.malformed_calls,
        )
        self._history.add(answer.prompt.match, message, node)
        self._sent[node] = answer
        return reply, node

    def commit(self, node: Node, answer: Answer, reply: ChatReply) -> None:
        """Make a delivered reply a Turn."""
        del self._sent[node]
        node.index = len(self._delivered)
        self._delivered.append(node)
        if self._on_delivered:
            self._on_delivered(node.turn(), answer.prompt.match.new, reply)

    def discard(self, node: Node, answer: Answer, reply: ChatReply) -> None:
        """Take an undelivered reply out of the tree."""
        del self._sent[node]
        self._history.discard(answer.prompt.match, reply.message, node)

    def settle(self, answer: Answer, *, delivered: bool) -> None:
        """Free the place of an answer whose fate is known."""
        self._answers.discard(answer)
        self.admission.leave(answered=delivered)
        if delivered:
            self._twins.deliver(answer.key, answer)
        else:
            self.hide(answer)

    def hide(self, answer: Answer) -> None:
        """Give an answer to nobody any more."""
        self._twins.remove(answer.key, answer)

    def count_dropped(self, reason: str, num_tokens: int) -> None:
        """Note sampled tokens that no Turn holds."""
        self._dropped[reason] += num_tokens

    def _twin(self, match: Match, request: ChatRequest, asker: Asker) -> Answer | None:
        """Return the answer that this request asks for again."""
        return self._twins.find(_key(match, request, asker), asker)

    async def _begin(self, match: Match, request: ChatRequest, asker: Asker) -> Answer:
        """Let the engine answer, once the session has a free place."""
        has_waited = await self.admission.enter()
        try:
            self._check_open()
            if has_waited:  # much may have been said since
                match = self._history.match(request)
            prompt = await self._prompt(match, request)
            self._check_open()
            if twin := self._twin(match, request, asker):
                self.admission.leave(answered=False)
                return twin
        except BaseException:
            self.admission.leave(answered=False)
            raise
        answer = Answer(self, prompt, _key(match, request, asker))
        self._answers.add(answer)
        self._twins.add(answer.key, answer)
        return answer

    async def _prompt(self, match: Match, request: ChatRequest) -> Prompt:
        if match.parent:
            match.parent.is_continued = True
        if match.parent in self._sent:
            self._sent[match.parent].delivered()
        prompt = await self._aside(self._speaker.prompt, request, match)
        try:
            self._speaker.check(prompt, self.limits)
        except GatewayError:
            self.admission.reached = "max_context_tokens"
            raise
        if self.admission.reached == "max_context_tokens":  # the agent has made room since
            self.admission.reached = ""
        return prompt

    async def _aside(
        self, work: Callable[[ChatRequest, Match], _T], request: ChatRequest, match: Match
    ) -> _T:
        """Do work on what a request says, in a thread where that is long: others must not wait."""
        whole = match.parent is None or self._speaker.rereads
        said = request.messages if whole else match.new
        if sum(len(message.text) for message in said) > _LONG_CHARS:
            return await asyncio.to_thread(work, request, match)
        return work(request, match)

    async def _speak(self, prompt: Prompt) -> Spoken:
        sampling = replace(self._sampling, seed=self._seed())
        budget_s = self.limits.model_call_s
        try:
            async with asyncio.timeout(budget_s):
                spoken = await self._speaker.speak(prompt, self.limits, sampling)
        except TimeoutError as error:
            message = f"the engine gave no reply within {budget_s:g} s"
            hint = "raise budgets.model_call_s, or lower rollout.max_new_tokens"
            self.failure = BudgetError(message, hint=hint)
            await self._abort_alone()
            raise self.failure from error
        except EngineError as error:
            self.failure = error
            raise
        except Exception as error:  # the edge at which an engine's own errors become ours
            message = f"the engine's client broke: {type(error).__name__}: {error}"
            self.failure = EngineError(message, hint="this is a bug of the engine's module")
            raise self.failure from error
        self.failure = None
        self.admission.spend(len(spoken.completion.ids))
        if spoken.completion.finish is Finish.ABORT:
            self.count_dropped("aborted", len(spoken.completion.ids))
            raise GatewayError("the reply was aborted", refusal=Refusal.OVERLOADED)
        return spoken

    def _node(self, answer: Answer, spoken: Spoken, message: Message) -> Node:
        completion = spoken.completion
        return Node(
            parent=answer.prompt.parent,
            prompt_ids=answer.prompt.tail,
            output_ids=array("i", completion.ids),
            logprobs=array("d", completion.logprobs),
            finish=_finish(completion.finish, message),
            weight_version=completion.weight_version,
            started_s=answer.started_s - self._opened_s,
            duration_s=time.monotonic() - answer.started_s,
            trainable=spoken.trainable,
            malformed_calls=spoken.parsed.malformed_calls,
            message=message if self._speaker.rereads else None,
            is_rewritten=answer.prompt.is_rewritten,
            weight_changes=completion.weight_changes,
            routed=completion.routed,
        )

    def _seed(self) -> int | None:
        """Return a seed for the next reply: the same draws for the same turn of the same run."""
        if self._sampling.seed is None:
            return None
        name = f"{self._sampling.seed}/{self._num_spoken}"
        self._num_spoken += 1
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 1

    def _message(self, spoken: Spoken, request: ChatRequest) -> Message:
        calls = []
        said = list(spoken.parsed.calls)
        if is_unreadable(spoken, request):
            said.append((UNREADABLE, {}))
        for name, arguments in said:
            self._num_minted += 1
            call_id = f"call_{self._salt}_{self._num_minted}"
            calls.append(usable_call(call_id, name, arguments, request))
        parsed = spoken.parsed
        return Message(Role.ASSISTANT, parsed.text, parsed.thinking, tuple(calls))

    async def _abort_alone(self) -> None:
        """Tell the engine to stop, unless that would stop another branch's reply too."""
        if len(self._running) == 1:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_ABORT_S):
                    await self._speaker.abort()

    def _check_open(self) -> None:
        if self._closed:
            raise closed()


def _finish(finish: Finish, message: Message) -> Finish:
    """Say that a reply ended with calls exactly where the client will see some."""
    if finish in (Finish.STOP, Finish.TOOL_CALLS):
        return Finish.TOOL_CALLS if message.tool_calls else Finish.STOP
    return finish


def _key(match: Match, request: ChatRequest, asker: Asker) -> Hashable:
    """Identify what is asked: twins ask the same at the same place."""
    return (match.root, match.parent, match.keys, request.max_tokens, asker.name)
