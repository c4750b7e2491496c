"""Families of one process share their tokenizers: reading a real one takes two seconds."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from swerl.engines.families import _tokenizer


@pytest.fixture(scope="session", autouse=True)
def _shared_tokenizers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shared = functools.lru_cache(maxsize=8)(_tokenizer.SplitTokenizer)
        patch.setattr(_tokenizer, "SplitTokenizer", shared)
        yield
