"""SGLang's checksum of a tensor, as its `/weights_checker` states it.

sha256 on a CPU (`sglang.srt.managers.mm_utils.tensor_hash`), a positional sum of 32-bit mixes on a
GPU (`sglang.kernels.ops.memory.gpu_tensor_hash`).
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import hashlib

import torch

TILE_WORDS = 8192
_CHUNK_TILES = 512
"""Tiles hashed at once: each takes 64 KiB for every one of some ten temporaries."""
_SEED = 0x243F6A88
_MASK = (1 << 32) - 1


def hash_tensor(tensor: torch.Tensor, device: str) -> str:
    """Return the checksum that SGLang states of a tensor on a `cpu` or a `cuda` engine."""
    value = _hash_on_gpu(tensor) if device == "cuda" else _hash_on_cpu(tensor)
    return f"{value:016x}"


def _hash_on_cpu(tensor: torch.Tensor) -> int:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(raw.data).digest()[:8], "big")


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
