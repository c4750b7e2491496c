"""Ids of long texts are kept, and are those that the tokenizer gives."""

from __future__ import annotations

import pytest

from swerl.engines.families._tokenizer import SplitTokenizer
from swerl.engines.families.tiny import byte_tokenizer

LONG = "a tool and its parameters\n" * 100


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the tokenizer was asked for."""
    texts: list[str] = []
    encode = SplitTokenizer._encode_text

    def counted(self: SplitTokenizer, text: str) -> list[int]:
        texts.append(text)
        return encode(self, text)

    monkeypatch.setattr(SplitTokenizer, "_encode_text", counted)
    return texts


def test_a_long_text_is_encoded_once_and_nobody_can_change_its_ids(encoded: list[str]) -> None:
    tokenizer = SplitTokenizer(byte_tokenizer().to_str())
    first = tokenizer.encode([LONG[:1000], LONG[1000:]])
    kept = list(first)
    first.clear()
    assert tokenizer.encode([LONG]) == kept
    assert encoded == [LONG]
    assert "".join(tokenizer.pieces(kept)) == LONG
