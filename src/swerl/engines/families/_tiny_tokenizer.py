"""The tiny family's byte-level tokenizers: one without merges, one trained on given texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.core.errors import InputError
from swerl.engines.families._tokenizer import Special

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

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
"""What may become one token. A tag of a tool call, with its line ends, is one word: written out it
would take two thirds of all tokens that a tiny model samples."""

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
"""What `engines/families/tiny.py` renders, for programs that read a model folder's own template."""


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
    InputError where it leaves no room for them.
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
    """Write `tokenizer.json` and `tokenizer_config.json` where transformers and SGLang look."""
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
        temporary = folder / (name + ".part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)


def _finish(tokenizer: Tokenizer, pre_tokenizer: PreTokenizer) -> Tokenizer:
    from tokenizers import AddedToken, decoders

    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(str(name), special=True) for name in SPECIAL_TOKENS])
    return tokenizer


def _plain(texts: Iterable[str]) -> Iterator[str]:
    """Yield what stands between special tokens: no merge may be spent on them."""
    for text in texts:
        yield from filter(None, _SPLIT.split(text))
