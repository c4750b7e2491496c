"""One Session's requests and replies: prompt, engine, recorded Turn, retries.

A reply joins the tree just before it is sent, so that the client's next request finds it. It
becomes a Turn once it was sent. An undelivered reply leaves the tree; its tokens count as dropped.

Two requests are duplicates if one requester sends the same new messages at the same place, with the
same `max_tokens`. Sub-agents do so too, so a duplicate is given the first answer only if
- that answer is pending or undelivered, and its client has left or the requester has a name;
- it was delivered to a connection that broke, and no message followed; or it is marked as a retry.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_hex

from swerl.core.chat import ChatReply, ChatRequest, Finish, Message, Role
from swerl.core.errors import EngineError, EngineTimeoutError, GatewayError, Refusal
from swerl.core.turn import Sampling, Trajectory, Turn, reply_seed
from swerl.gateway.history import Match, MessageTree, ReplyNode, tools_digest
from swerl.gateway.limits import LongWork, SessionAdmission, SessionLimits, T, is_long
from swerl.gateway.prompting import MALFORMED_CALL, Prompt, Prompter, Sampled, usable_call

RETRY_S = 1.5
"""Seconds to keep a reply whose client left. Agents retry after 0.4 to 1.2 s."""
KEPT_S = 60.0
"""Seconds for which a retry can have a delivered reply again; clients back off for up to 8 s."""
_MOST_KEPT = 32
"""Delivered replies of one Session that a retry can have again."""
_ABORT_S = 1.0
"""Seconds to wait for the end of an aborted reply, so that its tokens can be counted."""
_ANSWER_S = 10.0
"""Seconds for an engine to answer at all."""

_NAME_HEADERS = ("x-claude-code-agent-id", "thread-id", "Idempotency-Key")
"""Headers that differ between the branches of an agent: of Claude Code, of Codex, of any client."""
_RETRY_HEADER = "x-stainless-retry-count"
"""Header in which the vendors' own clients count their attempts."""


@dataclass(frozen=True, slots=True)
class Requester:
    """The sender of a request, as far as the request's headers identify it."""

    name: str = ""
    """One branch of an agent, which never sends two requests at once; empty if not given."""
    is_retry: bool = False
    """True if the client marks the request as a retry."""


_UNNAMED = Requester()


def read_requester(headers: Mapping[str, str]) -> Requester:
    """Read the requester from a request's headers."""
    names = [headers.get(name, "") for name in _NAME_HEADERS]
    is_retry = headers.get(_RETRY_HEADER, "0").strip("0 ") != "" or bool(names[-1])
    return Requester("/".join(names).strip("/"), is_retry)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A Turn with the messages behind its tokens."""

    turn: Turn
    new_messages: tuple[Message, ...]
    """Messages that the client added after the Turn's parent."""
    reply: ChatReply


class Conversation:
    """All requests and replies of one Session, in all its branches."""

    def __init__(
        self,
        session: str,
        prompter: Prompter,
        *,
        sampling: Sampling,
        limits: SessionLimits,
        on_turn: Callable[[TurnRecord], None] | None,
        long_work: LongWork | None = None,
    ) -> None:
        """`long_work`: the threads that all Sessions share; None: threads of its own."""
        self.failure: EngineError | None = None
        """Error of the engine's last call; None if it worked."""
        self.limits = limits
        self.admission = SessionAdmission(limits)
        self.answers: set[Answer] = set()
        """Answers that are pending or not yet delivered."""
        self._session = session
        self._prompter = prompter
        self._sampling = sampling
        self._on_turn = on_turn
        self.long_work = long_work or LongWork()
        self._history = MessageTree(rereads=prompter.rereads)
        self._delivered: list[ReplyNode] = []
        self._dropped: Counter[str] = Counter()
        self._running: set[asyncio.Task[Sampled]] = set()
        self._duplicates = _Duplicates()
        self._sent: dict[ReplyNode, Answer] = {}
        """Replies in the tree that may not have arrived."""
        self._opened_s = time.monotonic()
        self._salt = token_hex(4)
        self._tools = ""
        self._num_calls = 0
        self._num_seeded = 0
        self._closed = False

    async def count(self, request: ChatRequest) -> int:
        """Return the number of tokens in the prompt of this request."""
        self._check_open()
        match = await self._match(request)
        return await self._off_loop(self._prompter.count, request, match)

    @asynccontextmanager
    async def answer(
        self, request: ChatRequest, requester: Requester = _UNNAMED
    ) -> AsyncIterator[Answer]:
        """Answer a request; a retry shares the answer of the request that it repeats.

        On leaving the context an undelivered reply is dropped, unless it is asked for again. Raises
        GatewayError if the Session's limits refuse the request.
        """
        self._check_open()
        match = await self._match(request)
        self._tools = self._tools or tools_digest(match.root)
        answer = self._duplicates.find(_key(match, request, requester), requester)
        answer = answer or await self._begin(match, request, requester)
        answer.hold()
        try:
            yield answer
        finally:
            answer.release()

    async def close(self) -> Trajectory:
        """Stop pending replies and return the tree of delivered ones."""
        self._closed = True
        await self._stop(self._running)
        for answer in list(self.answers):
            answer.drop()
        turns = tuple(node.turn() for node in self._delivered)
        rewritten = sum(node.is_rewritten for node in self._delivered)
        return Trajectory(self._session, turns, dict(self._dropped), rewritten, self._tools)

    async def _begin(self, match: Match, request: ChatRequest, requester: Requester) -> Answer:
        """Start the engine on a request, once the Session has a free slot."""
        has_waited = await self.admission.enter()
        # An error or a duplicate must give the slot back.
        try:
            self._check_open()
            if has_waited:  # other requests may have extended the tree
                match = await self._match(request)
            prompt = await self._prompt(match, request)
            self._check_open()
            key = _key(match, request, requester)
            if duplicate := self._duplicates.find(key, requester):
                self.admission.leave(answered=False)
                return duplicate
        except BaseException:
            self.admission.leave(answered=False)
            raise
        answer = Answer(self, prompt, key)
        self.answers.add(answer)
        self._duplicates.add(answer)
        return answer

    async def _prompt(self, match: Match, request: ChatRequest) -> Prompt:
        if match.parent:
            match.parent.is_continued = True
        # A client that continues a reply has received it, whatever its connection reported.
        if match.parent in self._sent:
            self._sent[match.parent].delivered()
        prompt = await self._off_loop(self._prompter.prompt, request, match)
        try:
            self._prompter.check(prompt, self.limits)
        except GatewayError as error:
            if error.refusal is Refusal.CONTEXT:
                self.admission.reached = "max_context_tokens"
            raise
        if self.admission.reached == "max_context_tokens":  # the agent has compacted since
            self.admission.reached = ""
        return prompt

    async def _match(self, request: ChatRequest) -> Match:
        if request.is_large:
            return await self.long_work.run(self._session, partial(self._history.match, request))
        return self._history.match(request)

    async def _off_loop(
        self, work: Callable[[ChatRequest, Match], T], request: ChatRequest, match: Match
    ) -> T:
        """Call `work` on a request; in a thread if it is long, to keep the event loop free."""
        is_whole = match.parent is None or self._prompter.rereads
        messages, tools = (request.messages, request.tools) if is_whole else (match.new, ())
        if is_long(messages, tools):
            return await self.long_work.run(self._session, partial(work, request, match))
        return work(request, match)

    def _start(self, prompt: Prompt) -> asyncio.Task[Sampled]:
        """Sample a reply in a task of its own: it outlives a client that leaves."""
        task = asyncio.create_task(self._sample(prompt))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _sample(self, prompt: Prompt) -> Sampled:
        sampling = self._sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=reply_seed(sampling.seed, self._num_seeded))
            self._num_seeded += 1
        budget_s = self.limits.model_call_s
        try:
            async with asyncio.timeout(budget_s):
                sampled = await self._prompter.sample(prompt, self.limits, sampling)
        except TimeoutError as error:
            # `max_new_tokens` bounds a reply, so the engine is slow, and not the policy.
            message = f"the engine gave no reply within {budget_s:g} s"
            hint = "raise budgets.model_call_s, or add engines"
            self.failure = EngineTimeoutError(message, hint=hint)
            # An abort stops the whole Session, so it waits until no other branch samples.
            if len(self._running) == 1:
                with suppress(EngineError, TimeoutError):
                    async with asyncio.timeout(_ANSWER_S):
                        await self._prompter.abort()
            raise self.failure from error
        except EngineError as error:
            self.failure = error
            raise
        except GatewayError as error:  # of a chat engine, whose server has a context of its own
            self.failure = None
            if error.refusal is Refusal.CONTEXT:
                self.admission.reached = "max_context_tokens"
            raise
        except Exception as error:  # the edge at which an engine's own errors become ours
            message = f"the engine's client broke: {type(error).__name__}: {error}"
            self.failure = EngineError(message, hint="this is a bug of the engine's module")
            raise self.failure from error
        self.failure = None
        self.admission.spend(len(sampled.completion.ids))
        if sampled.completion.finish is Finish.ABORT:
            self._dropped["aborted"] += len(sampled.completion.ids)
            raise GatewayError("the reply was aborted", refusal=Refusal.OVERLOADED)
        return sampled

    async def _stop(self, tasks: set[asyncio.Task[Sampled]]) -> None:
        """End these tasks. The engine aborts only if no other task of the Session runs."""
        if not (tasks := set(tasks)):
            return
        if tasks == self._running:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_ABORT_S):
                    await self._prompter.abort()
                    await asyncio.wait(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    def _record(self, answer: Answer, sampled: Sampled) -> tuple[ChatReply, ReplyNode]:
        """Add a reply to the tree, with fresh tool-call ids."""
        prompt, completion = answer.prompt, sampled.completion
        stop = prompt.request.first_stop(sampled.parsed.text)
        message = self._message(sampled, prompt.request, stop)
        finish = Finish.STOP if stop else completion.finish
        if finish in (Finish.STOP, Finish.TOOL_CALLS):  # clients expect it to match the calls
            finish = Finish.TOOL_CALLS if message.tool_calls else Finish.STOP
        node = ReplyNode(
            parent=prompt.parent,
            prompt_ids=prompt.tail,
            output_ids=array("i", completion.ids),
            logprobs=array("d", completion.logprobs),
            finish=finish,
            weight_version=completion.weight_version,
            started_s=answer.started_s - self._opened_s,
            duration_s=time.monotonic() - answer.started_s,
            trainable=sampled.trainable,
            num_reported=0 if sampled.trainable else sampled.usage.completion_tokens,
            num_prompt_reported=0 if sampled.trainable else sampled.usage.prompt_tokens,
            malformed_calls=sampled.parsed.malformed_calls,
            message=message if self._prompter.rereads else None,
            is_rewritten=prompt.is_rewritten,
            weight_changes=completion.weight_changes,
            routed=completion.routed,
        )
        usage, model = sampled.usage, prompt.request.model
        reply = ChatReply(
            token_hex(12), message, finish, usage, model, node.malformed_calls, stop or None
        )
        self._history.add(prompt.match, message, node)
        self._sent[node] = answer
        return reply, node

    def _message(self, sampled: Sampled, request: ChatRequest, stop: str) -> Message:
        parsed = sampled.parsed
        if stop or not request.allows_calls:
            text = parsed.text.partition(stop)[0] if stop else parsed.text
            return Message(Role.ASSISTANT, text, parsed.thinking)
        named_calls = list(parsed.calls)
        # A reply without calls would end the agent's work: a stand-in call shows it the mistake.
        is_whole = sampled.completion.finish is not Finish.LENGTH
        if parsed.malformed_calls and request.tools and is_whole:
            named_calls.append((MALFORMED_CALL, {}))
        calls = []
        for name, arguments in named_calls:
            self._num_calls += 1
            call_id = f"call_{self._salt}_{self._num_calls}"
            calls.append(usable_call(call_id, name, arguments, request))
        return Message(Role.ASSISTANT, parsed.text, parsed.thinking, tuple(calls))

    def _commit(self, node: ReplyNode, answer: Answer, reply: ChatReply) -> None:
        """Make a delivered reply a Turn."""
        del self._sent[node]
        node.index = len(self._delivered)
        self._delivered.append(node)
        if self._on_turn:
            self._on_turn(TurnRecord(node.turn(), tuple(answer.prompt.match.new), reply))

    def _drop(self, answer: Answer, recorded: tuple[ChatReply, ReplyNode] | None) -> None:
        """Remove an undelivered reply from the tree and count its tokens."""
        if recorded:
            reply, node = recorded
            del self._sent[node]
            self._history.discard(answer.prompt.match, reply.message, node)
            self._dropped["undelivered"] += len(node.output_ids)
        elif sampled := answer.sampled():
            self._dropped["undelivered"] += len(sampled.completion.ids)

    def _settle(self, answer: Answer, *, delivered: bool) -> None:
        """Free the slot of an answer that was delivered or dropped."""
        self.answers.discard(answer)
        self.admission.leave(answered=delivered)
        (self._duplicates.keep if delivered else self._duplicates.remove)(answer)

    def _check_open(self) -> None:
        if self._closed:
            raise closed()


class Answer:
    """One reply, pending or sampled, and the clients that wait for it.

    It holds a slot of its Session until it is delivered or dropped. A reply whose last client
    leaves is kept for `RETRY_S` seconds, in case the client asks again.
    """

    def __init__(self, conversation: Conversation, prompt: Prompt, key: Hashable) -> None:
        self.started_s = time.monotonic()
        self.key = key
        self.num_waiting = 0
        """Clients that wait for it."""
        self._prompt: Prompt | None = prompt
        self._conversation = conversation
        self._task = conversation._start(prompt)
        self._recorded: tuple[ChatReply, ReplyNode] | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._is_settled = False
        self._is_delivered = False
        self._is_broken = False

    @property
    def prompt(self) -> Prompt:
        """The prompt, until the answer is settled; it is large, so it is freed then."""
        assert self._prompt
        return self._prompt

    def is_for(self, requester: Requester) -> bool:
        """Return True if a duplicate request by this requester is given this answer."""
        if not self._is_settled:
            is_free = not self.num_waiting or requester.name or requester.is_retry
            return self._may_succeed() and bool(is_free)
        if not self._is_delivered or not self._recorded or self._recorded[1].is_continued:
            return False
        return self._is_broken or requester.is_retry

    def hold(self) -> None:
        """Add a waiting client."""
        self.num_waiting += 1
        self._is_broken = False
        self._stop_expiry()

    def release(self) -> None:
        """Remove a waiting client; the last one starts the expiry of an undelivered reply."""
        self.num_waiting -= 1
        if self.num_waiting or self._is_settled:
            return
        if self._may_succeed():
            self._expiry = asyncio.create_task(self._expire())
        else:
            self.drop()

    async def ready(self, timeout_s: float) -> bool:
        """Wait for the reply or its failure; return False if neither comes in time."""
        finished, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        return bool(finished)

    async def reply(self) -> ChatReply:
        """Return the reply and add it to the tree.

        Raises EngineError, also after `model_call_s`, and GatewayError if it was aborted.
        """
        if not self._task.done():
            await asyncio.wait({self._task})
        # A delivered reply can be given again; a settled one without delivery was dropped.
        if self._recorded and (self._is_delivered or not self._is_settled):
            return self._recorded[0]
        if self._task.cancelled() or self._is_settled:
            raise closed()
        self._recorded = self._conversation._record(self, self._task.result())
        return self._recorded[0]

    def delivered(self) -> None:
        """Mark the reply as received by a client."""
        if self._recorded and not self._is_settled:
            self._is_delivered = True
            reply, node = self._recorded
            try:
                self._conversation._commit(node, self, reply)
            finally:
                self._settle()

    def broke(self) -> None:
        """Mark the connection of the delivery as broken: the client may ask again."""
        self._is_broken = True

    def drop(self) -> None:
        """Give the reply up for good."""
        if not self._is_settled:
            self._conversation._drop(self, self._recorded)
            self._settle()

    def sampled(self) -> Sampled | None:
        """Return the engine's output, if there is one."""
        if not self._task.done() or self._task.cancelled() or self._task.exception():
            return None
        return self._task.result()

    async def _expire(self) -> None:
        await asyncio.sleep(RETRY_S)
        self._expiry = None
        self._conversation._duplicates.remove(self)
        if not self._task.done():
            await self._conversation._stop({self._task})
        self.drop()

    def _settle(self) -> None:
        self._is_settled = True
        self._prompt = None
        self._stop_expiry()
        self._conversation._settle(self, delivered=self._is_delivered)

    def _stop_expiry(self) -> None:
        if self._expiry:
            self._expiry.cancel()
            self._expiry = None

    def _may_succeed(self) -> bool:
        return not self._task.done() or self.sampled() is not None


class _Duplicates:
    """The answers of one Session that a duplicate request can share."""

    def __init__(self) -> None:
        self.answers: dict[Hashable, list[Answer]] = {}
        self.delivered: dict[Answer, float] = {}
        """Time of delivery, oldest first."""

    def find(self, key: Hashable, requester: Requester) -> Answer | None:
        """Return the answer that this request repeats; one without waiting clients first."""
        answers = [answer for answer in self.answers.get(key, ()) if answer.is_for(requester)]
        return min(answers, key=lambda answer: answer.num_waiting, default=None)

    def add(self, answer: Answer) -> None:
        self.answers.setdefault(answer.key, []).append(answer)

    def keep(self, answer: Answer) -> None:
        """Keep a delivered answer for a while, and forget those past their time."""
        self.delivered[answer] = now = time.monotonic()
        for old, since in list(self.delivered.items()):
            if len(self.delivered) <= _MOST_KEPT and since >= now - KEPT_S:
                return
            del self.delivered[old]
            self.remove(old)

    def remove(self, answer: Answer) -> None:
        answers = self.answers.get(answer.key, [])
        if answer in answers:
            answers.remove(answer)
        if not answers:
            self.answers.pop(answer.key, None)


def closed() -> GatewayError:
    """Return the refusal of a closed Session."""
    return GatewayError("this session is closed", refusal=Refusal.AUTHENTICATION)


def _key(match: Match, request: ChatRequest, requester: Requester) -> Hashable:
    """Identify a request: duplicates have equal keys."""
    asked = (request.max_tokens, request.allows_calls, request.stop)
    return (match.root, match.parent, match.keys, asked, requester.name)
