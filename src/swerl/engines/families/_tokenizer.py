"""A tokenizer that keeps special tokens and text apart.

Text is always encoded as plain text: the name of a special token inside it never becomes the
special id. Only the code that writes a chat template inserts special ids, by name.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerl.core.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_LONG = 20_000
"""A text of more characters is encoded as a batch of one, which lets other threads run."""
_KEPT, _NUM_KEPT = range(2_000, 200_000), 128
"""Characters of a text whose ids are kept, and number of such texts (50 MB at most, but for unusual
scripts): Episodes of one agent share system prompt and tools, and read the same files."""


class Special(str):
    """The written form of a special token, as distinct from the same text."""

    __slots__ = ()


class SplitTokenizer:
    """Encodes pieces of plain text and special tokens, over a `tokenizers.Tokenizer`."""

    def __init__(self, spec: str) -> None:
        """`spec` is the text of a `tokenizer.json`."""
        self._tokenizer = _literal_tokenizer(spec)
        added = self._tokenizer.get_added_tokens_decoder()
        self._names = {index: Special(token.content) for index, token in added.items()}
        self._ids: dict[str, int] = {str(name): index for index, name in self._names.items()}
        self._kept = lru_cache(_NUM_KEPT)(lambda text: array("i", self._encode_text(text)))

    def id(self, special: Special) -> int:
        """Return the id of a special token. Raises InputError if the tokenizer lacks it."""
        try:
            return self._ids[special]
        except KeyError:
            message = f"the tokenizer has no special token {special}"
            raise InputError(message, hint="use the family of the model") from None

    def name(self, index: int) -> str | None:
        """Return the name of a special token; None for any other id."""
        return self._names.get(index)

    def names(self) -> list[str]:
        return list(self._ids)

    def encode(self, pieces: Iterable[str]) -> list[int]:
        """Return the ids of text and Special pieces; text between two specials is one run."""
        ids: list[int] = []
        run: list[str] = []
        for piece in pieces:
            if isinstance(piece, Special):
                ids += self._encode_run(run)
                ids.append(self._ids[piece])
                run = []
            else:
                run.append(piece)
        return ids + self._encode_run(run)

    def pieces(self, ids: Sequence[int]) -> Iterator[str]:
        """Yield plain text and Special pieces in the order of `ids`."""
        run: list[int] = []
        for index in ids:
            special = self._names.get(index)
            if special is None:
                run.append(index)
                continue
            if run:
                yield self._decode(run)
                run = []
            yield special
        if run:
            yield self._decode(run)

    def count_thinking(self, ids: Sequence[int], head: str) -> int:
        """Return the number of ids up to the end of this beginning of their text.

        It is an estimate if no `</think>` ends the beginning.
        """
        index = self._ids.get("</think>") if "</think>" in head else None
        if index is not None and index in ids:
            return ids.index(index) + 1
        return min(len(self.encode([head])), len(ids))

    def _encode_run(self, texts: Sequence[str]) -> list[int]:
        if not texts:
            return []
        text = "".join(texts)
        return self._kept(text).tolist() if len(text) in _KEPT else self._encode_text(text)

    def _encode_text(self, text: str) -> list[int]:
        if len(text) > _LONG:
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def load_tokenizer(folder: Path) -> SplitTokenizer:
    """Load `tokenizer.json` of a model folder. Raises InputError if it is absent or broken."""
    path = folder / "tokenizer.json"
    try:
        return SplitTokenizer(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        hint = "name a model folder in Hugging Face format"
        raise InputError(message, hint=hint) from error
    except Exception as error:  # the library raises bare Exception on a file it cannot read
        message = f"{path} is not a tokenizer: {error}"
        raise InputError(message, hint="write the model folder again") from error


def _literal_tokenizer(text: str) -> Tokenizer:
    """Return a tokenizer whose encoder reads every text literally."""
    from tokenizers import Tokenizer

    spec: dict[str, Any] = json.loads(text)
    for token in spec["added_tokens"]:
        token["special"] = True
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.encode_special_tokens = True
    return tokenizer
