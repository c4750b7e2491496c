"""Whether a running server holds the model that is trained: its vocabulary and its tokenizer.

Ids of another vocabulary are other words, or the server dies of them. A server says where its files
lie; where this machine does not see them, only its own word on the vocabulary can be compared.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from swerl.core.chat import Json
from swerl.core.errors import EngineError
from swerl.engines._sglang_server import Server
from swerl.engines._weights import model_shape


async def require_match(servers: Sequence[Server], model: Path) -> None:
    """Raise EngineError where a server's model is not one like `model`, naming both."""
    infos = await asyncio.gather(*(server.get("/model_info") for server in servers))
    for server, info in zip(servers, infos, strict=True):
        theirs = Path(str(info.get("model_path") or ""))
        ours = model_shape(model).num_vocab
        found = info.get("vocab_size") or model_shape(theirs).num_vocab
        if ours is not None and found is not None and int(found) != ours:
            raise EngineError(
                f"{server.url} serves {theirs} with {found} tokens, {model} has {ours}",
                hint="start it with the model that is trained",
            )
        mine, other = _vocabulary(model), _vocabulary(theirs)
        if mine is not None and other is not None and mine != other:
            raise EngineError(
                f"{server.url} serves {theirs} with another tokenizer than that of {model}",
                hint="start it with the model that is trained",
            )


def _vocabulary(folder: Path) -> Json:
    """Return what tells a folder's tokenizer from others; None where it cannot be read."""
    try:
        told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = sorted([each["id"], each["content"]] for each in told.get("added_tokens") or [])
        return [told["model"].get("vocab"), told["model"].get("merges"), added]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
