"""The tiny family: dense Qwen3 models of under a million parameters and a few hundred tokens.

Chat template and tool calls follow Qwen3-Coder. The system prompt and the tools' schemas are left
out of the prompt: such a model learns its tools from examples, and the schemas alone would fill
its context. All argument values are texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.core.chat import ChatRequest, Message, ParsedReply, Role, Tool
from swerl.core.errors import InputError
from swerl.core.files import write_text
from swerl.engines.families._calls import CallForm, read_reply, write_xml_call
from swerl.engines.families._tokenizer import Special, SplitTokenizer, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from swerl.engines.families._megatron_mapping import ModelMapping

PAD = Special("<|endoftext|>")
START = Special("<|im_start|>")
END = Special("<|im_end|>")
CALL = Special("<tool_call>")
CALL_END = Special("</tool_call>")
RESPONSE = Special("<tool_response>")
RESPONSE_END = Special("</tool_response>")
THINK = Special("<think>")
THINK_END = Special("</think>")
SPECIAL_TOKENS = (PAD, START, END, CALL, CALL_END, RESPONSE, RESPONSE_END, THINK, THINK_END)
"""In the order of their ids, from 0."""

_SPLIT = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
_NUM_BYTES = 256
_WORDS = r"\n?</?(?:function|parameter)[^>\n]*>\n| ?\w+| ?[^\s\w]+|\s+"
"""Candidates for one token. A tag of a tool call with its line ends is one word; otherwise tags
would be two thirds of all tokens that a tiny model samples."""

CHAT_TEMPLATE = """\
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user\n' }}{%- endif %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- if message.content and message.tool_calls %}{{- '\n\n' }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for key, value in call.arguments | items %}
                {{- '<parameter=' + key + '>\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
            {%- if not loop.last %}{{- '\n' }}{%- endif %}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""The rendering of this family, for programs that read a model folder's own template."""


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one id per byte and no merges: it works on any text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*map(str, SPECIAL_TOKENS), *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    return _finish(tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE on rendered conversations, their special tokens included.

    `vocab_size` counts the special tokens and all 256 bytes, so any text can be encoded. Raises
    InputError if it is too small for them.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    least = len(SPECIAL_TOKENS) + _NUM_BYTES
    if vocab_size < least:
        raise InputError(
            f"a vocabulary of {vocab_size} cannot hold every byte and special token",
            hint=f"use at least {least}",
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[str(token) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _finish(Tokenizer(models.BPE()), pre_tokenizers.Sequence([words, to_bytes]))
    tokenizer.train_from_iterator(_plain(texts), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, as transformers and SGLang read them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": str(END),
        "pad_token": str(PAD),
        "additional_special_tokens": [str(token) for token in SPECIAL_TOKENS],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    written = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=1),
    }
    for name, text in written.items():
        write_text(folder / name, text)


def _finish(tokenizer: Tokenizer, pre_tokenizer: PreTokenizer) -> Tokenizer:
    from tokenizers import AddedToken, decoders

    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(str(name), special=True) for name in SPECIAL_TOKENS])
    return tokenizer


def _plain(texts: Iterable[str]) -> Iterator[str]:
    """Yield the text between special tokens, which need no merges."""
    for text in texts:
        yield from filter(None, _SPLIT.split(text))


_GAP = "\n\n"
"""Separator of thinking and text, and of text and the first call."""


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a dense Qwen3 that swerl creates; the defaults are the twin's."""

    num_layers: int = 2
    """Four were no better on the twin's tasks, and less stable."""
    hidden_size: int = 128
    ffn_hidden_size: int = 384
    num_heads: int = 4
    num_kv_heads: int = 2
    """Fewer than query heads, as in larger Qwen3 models."""
    head_dim: int = 32
    vocab_size: int = 512
    """A small vocabulary keeps the output layer cheap on a CPU."""
    max_positions: int = 1024
    """Longest row in tokens."""
    rope_theta: float = 1e6
    """Base of the rotary frequencies; Qwen3's value."""
    init_std: float = 0.06
    """Standard deviation of new matrices. It is three times the usual value: such a narrow model
    then learns to copy from its context in half as many steps."""


def build(model: Path | None) -> TinyFamily:
    """Build the family with the tokenizer of a model folder, or with one id per byte.

    Raises InputError on a folder without a usable tokenizer.
    """
    if model is None:
        return TinyFamily(SplitTokenizer(byte_tokenizer().to_str()))
    tokenizer = load_tokenizer(model)
    # It leaves out system prompt and tools, which any other model needs.
    if not _is_own(tokenizer):
        raise InputError(
            f"the family tiny is for models that swerl makes, and {model} is not one",
            hint="leave model.family out: swerl finds the family by the chat template",
        )
    return TinyFamily(tokenizer)


def fits(model: Path) -> bool:
    """Return True if swerl made the model in this folder."""
    try:
        return _is_own(load_tokenizer(model))
    except InputError:
        return False


def _is_own(tokenizer: SplitTokenizer) -> bool:
    """Return True if the special tokens have the ids that only swerl's tokenizers give them."""
    return all(tokenizer.name(index) == name for index, name in enumerate(SPECIAL_TOKENS))


class TinyFamily:
    """Implements Family."""

    def __init__(self, tokenizer: SplitTokenizer) -> None:
        self._tokenizer = tokenizer
        ids = {token: tokenizer.id(token) for token in SPECIAL_TOKENS}
        self.stop_ids: tuple[int, ...] = (ids[END], ids[PAD])

    def render(self, request: ChatRequest) -> list[int]:
        """Return the whole prompt, including the opening of the assistant's turn."""
        return self._tokenizer.encode([*_conversation(request.messages), *_OPENING])

    def render_tail(
        self, messages: Sequence[Message], *, past: Sequence[Message], last_id: int | None
    ) -> list[int]:
        """Return the tokens that follow an assistant turn: new messages and the next opening."""
        end = ["\n"] if last_id == self.stop_ids[0] else [END, "\n"]
        return self._tokenizer.encode([*end, *_conversation(messages), *_OPENING])

    def parse(self, ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedReply:
        """Read sampled ids as thinking, text and tool calls; malformed calls stay text."""
        is_closed = bool(ids) and ids[-1] in self.stop_ids
        body = ids[:-1] if is_closed else ids
        return read_reply(
            self._tokenizer, body, CallForm.XML, tools, opens_thinking=False, is_closed=is_closed
        )

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as written, special tokens by their names."""
        return "".join(self._tokenizer.pieces(ids))

    def encode_reply(self, message: Message) -> list[int]:
        """Return the ids of this message as a reply of the model, stop id included."""
        return self._tokenizer.encode([*_reply(message), END])

    def megatron(self) -> ModelMapping:
        from swerl.engines.families._megatron_mapping import ModelMapping

        return ModelMapping()


_OPENING = (START, "assistant\n")


def _conversation(messages: Sequence[Message]) -> Iterator[str]:
    previous = None
    for message in messages:
        if message.role is Role.SYSTEM:
            continue
        if previous is Role.TOOL and message.role is not Role.TOOL:
            yield from (END, "\n")
        if message.role is Role.TOOL:
            if previous is not Role.TOOL:
                yield from (START, "user\n")
            yield from (RESPONSE, f"\n{message.text}\n", RESPONSE_END, "\n")
        else:
            body = _reply(message) if message.role is Role.ASSISTANT else iter([message.text])
            yield from (START, f"{message.role}\n", *body, END, "\n")
        previous = message.role
    if previous is Role.TOOL:
        yield from (END, "\n")


def _reply(message: Message) -> Iterator[str]:
    if message.thinking:
        yield from (THINK, f"\n{message.thinking}\n", THINK_END, _GAP)
    if message.text:
        yield message.text
        yield _GAP if message.tool_calls else ""
    for number, call in enumerate(message.tool_calls):
        yield "\n" if number else ""
        yield from (CALL, write_xml_call(call.name, call.arguments), CALL_END)
