"""What an engine's parameters must hash to, worked out from Hugging Face tensors.

SGLang's `/weights_checker` hashes each parameter of each tensor-parallel rank: sha256 on a CPU
(`sglang.srt.managers.mm_utils.tensor_hash`), a positional sum of 32-bit mixes on a GPU
(`sglang.kernels.ops.memory.gpu_tensor_hash`). An engine fuses some tensors and cuts others among
its ranks; here is the same, for the parameters of which that is known. Experts are left out: GPU
kernels lay them out anew.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch

from swerl.chat import Json
from swerl.learning import EngineTarget

FUSED_MODELS = frozenset({"qwen3", "qwen3_moe"})
"""Model types whose projections SGLang fuses row by row, as `_fuse` does."""
VOCAB_BLOCK = 64
"""Rows to which SGLang pads an embedding."""
_MASK = (1 << 32) - 1
_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
_NUM_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_NAME = re.compile(r"^(?P<path>.*)\.(?P<module>\w+)\.(?P<kind>weight|bias)$")


class Expectation:
    """Collects, tensor by tensor, what every rank of a server must hold."""

    def __init__(self, target: EngineTarget, hf_config: Mapping[str, Json]) -> None:
        self._target = target
        self._dtype = getattr(torch, target.dtype)
        self._fuses = hf_config.get("model_type") in FUSED_MODELS
        self._tied = bool(hf_config.get("tie_word_embeddings"))
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        self._found: list[dict[str, tuple[str, ...]]] = [{} for _ in range(target.num_ranks)]

    @property
    def checksums(self) -> tuple[Mapping[str, tuple[str, ...]], ...]:
        """For each rank: parameter -> the checksums that it may have."""
        return tuple(self._found)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one whole Hugging Face tensor into account."""
        match = _NAME.match(name)
        if match is None or ".experts." in name or (name == "lm_head.weight" and self._tied):
            return
        module = match["module"]
        if module in _FUSED:
            fused, place = _FUSED[module]
            full_name = f"{match['path']}.{fused}.{match['kind']}"
            parts = self._parts.setdefault(full_name, {})
            parts[place] = tensor
            if len(parts) == _NUM_PARTS[fused]:
                del self._parts[full_name]
                self._note_rows(full_name, [parts[n] for n in sorted(parts)])
        elif module in ("embed_tokens", "lm_head"):
            if tensor.shape[0] % (VOCAB_BLOCK * self._target.num_ranks) == 0:
                self._note_rows(name, [tensor], fuse=False)
        elif module in ("o_proj", "down_proj"):
            if self._fuses and tensor.shape[-1] % self._target.num_ranks == 0:
                cuts = tensor.chunk(self._target.num_ranks, -1)
                self._note(name, [cut.contiguous() for cut in cuts])
        elif module.endswith(("norm", "layernorm")) and self._fuses:
            self._note(name, [tensor] * self._target.num_ranks)

    def _note_rows(self, name: str, parts: list[torch.Tensor], *, fuse: bool = True) -> None:
        """Each rank holds its share of the rows of every part, one part under the other."""
        num_ranks = self._target.num_ranks
        if (fuse and not self._fuses) or any(part.shape[0] % num_ranks for part in parts):
            return
        cut = [part.chunk(num_ranks, 0) for part in parts]
        self._note(name, [torch.cat([part[rank] for part in cut]) for rank in range(num_ranks)])

    def _note(self, name: str, by_rank: list[torch.Tensor]) -> None:
        for rank, tensor in enumerate(by_rank):
            kinds = {tensor.dtype: tensor, self._dtype: tensor.to(self._dtype)}
            found = [hash_tensor(kind, self._target.device) for kind in kinds.values()]
            self._found[rank][name] = tuple(found)


def hash_tensor(tensor: torch.Tensor, device: str) -> str:
    """Return the checksum that SGLang states of a tensor on a `cpu` or a `cuda` engine."""
    value = _hash_on_gpu(tensor) if device == "cuda" else _hash_on_cpu(tensor)
    return f"{value:016x}"


def _hash_on_cpu(tensor: torch.Tensor) -> int:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(raw.data).digest()[:8], "big")


TILE_WORDS = 8192
_CHUNK_TILES = 512
"""Tiles hashed at once: each takes 64 KiB for every one of some ten temporaries."""
_SEED = 0x243F6A88


def _hash_on_gpu(tensor: torch.Tensor) -> int:
    """Sum over tiles of two 32-bit sums of mixed words, each with its position mixed in."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padding = -raw.numel() % 4
    words = torch.nn.functional.pad(raw, (0, padding)).view(torch.int32)
    if not words.numel():
        return 0
    num_words, step = words.numel(), TILE_WORDS * _CHUNK_TILES
    total = sum(
        _tiles_sum(words[start : start + step], start, num_words)
        for start in range(0, num_words, step)
    )
    return _splitmix64(total)


def _tiles_sum(words: torch.Tensor, start: int, num_words: int) -> int:
    """Return the sum of the hashes of the tiles that begin at word `start`."""
    place = torch.arange(start, start + words.numel(), device=words.device)
    value = words.to(torch.int64) & _MASK
    seeds = _SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK
    halves = []
    for seed, factor, turn in zip(seeds, (0x27D4EB2D, 0x165667B1), (15, 13), strict=True):
        mixed = ((place * factor + seed) & _MASK) ^ _rotated(place & _MASK, turn)
        mixed = _fmix32(value ^ mixed)
        mixed = torch.nn.functional.pad(mixed, (0, -mixed.numel() % TILE_WORDS))
        tile = mixed.view(-1, TILE_WORDS).sum(1) & _MASK
        halves.append(_fmix32(tile ^ (num_words * 4 & _MASK)))
    high, low = (half.tolist() for half in halves)
    return sum((h << 32) | part for h, part in zip(high, low, strict=True))


def _rotated(x: torch.Tensor, turn: int) -> torch.Tensor:
    return ((x << turn) | (x >> (32 - turn))) & _MASK


def _fmix32(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser on 32-bit values kept in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x &= mask
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & mask
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
