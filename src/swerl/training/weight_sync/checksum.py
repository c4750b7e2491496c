"""Compute the checksums that an engine's parameters must have, from Hugging Face tensors.

SGLang's `/weights_checker` hashes each parameter of each tensor-parallel rank. An engine fuses some
tensors and cuts others among its ranks. This file does the same, after the loaders of SGLang 0.5.21
for qwen3, qwen3_moe, qwen3_5, qwen3_5_moe and glm4_moe. If kernels may change a parameter's layout,
as those of experts do, its checksum is a guess: see `Sent.certain`.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch

from swerl.core.chat import Json
from swerl.core.learning import EngineTarget
from swerl.engines.families._megatron_plan import text_config
from swerl.training.rank.fused import fuse

CERTAIN_MODELS = frozenset({"qwen3", "qwen3_moe"})
"""Model types whose parameters real engines have confirmed, all but the experts."""
VOCAB_BLOCK = 64
"""SGLang pads an embedding's rows with zeros to a multiple of this."""
CPU_WIDTH_BLOCK = 32
"""SGLang on a CPU pads the feed-forward width of each rank to a multiple of this."""
SMALL = 1 << 22
"""Most elements of a tensor that an engine may keep in fp32: routers, decays."""
_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "in_proj_qkv": ("in_proj_qkvz", 0), "in_proj_z": ("in_proj_qkvz", 1),
    "in_proj_b": ("in_proj_ba", 0), "in_proj_a": ("in_proj_ba", 1),
}  # fmt: skip
_NUM_PARTS = {"qkv_proj": 3, "gate_up_proj": 2, "in_proj_qkvz": 2, "in_proj_ba": 2}
_EXPERT = re.compile(r"^(?P<path>.*\.experts)\.((?P<number>\d+)\.)?(?P<part>\w+_proj)(\.weight)?$")

TILE_WORDS = 8192
_CHUNK_TILES = 512
"""Tiles hashed at once: each needs 64 KiB for every one of some ten temporaries."""
_SEED = 0x243F6A88
_MASK = (1 << 32) - 1

PerRank = list[torch.Tensor]
"""The part of a tensor that each tensor-parallel rank of an engine holds."""


class ExpectedChecksums:
    """Collect, tensor by tensor, the checksums of every rank of a server.

    Parts of a fused parameter are kept until the last one is there. If the model's files hold each
    expert by itself, these are at most one layer's experts.
    """

    def __init__(self, target: EngineTarget, hf_config: Mapping[str, Json]) -> None:
        self._target = target
        self._ranks = target.num_ranks
        self._dtype = getattr(torch, target.dtype)
        self._type = str(hf_config.get("model_type"))
        self._config = text_config(hf_config)
        self._tied = bool(hf_config.get("tie_word_embeddings"))
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        self._found: list[dict[str, tuple[str, ...]]] = [{} for _ in range(target.num_ranks)]
        self._certain: set[str] = set()

    @property
    def checksums(self) -> tuple[Mapping[str, tuple[str, ...]], ...]:
        return tuple(self._found)

    @property
    def certain(self) -> frozenset[str]:
        return frozenset(self._certain)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        name = self._engine_name(name)
        # A tied head is the embedding, which has a checksum of its own.
        if name == "lm_head.weight" and self._tied:
            return
        if expert := _EXPERT.match(name):
            self._add_expert(expert, tensor)
            return
        path, _, kind = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if module in _FUSED:
            fused, place = _FUSED[module]
            full_name = f"{parent}.{fused}.{kind}"
            if fused == "gate_up_proj":
                tensor = self._in_blocks(tensor, 0, name)
            # The engine has one parameter for all parts: its checksum waits for the last part.
            if parts := self._collected(full_name, place, tensor, _NUM_PARTS[fused]):
                self._note(full_name, [self._fuse(fused, parts)], certain=self._is_certain)
        elif module in ("embed_tokens", "lm_head"):
            self._note(name, [along(self._in_vocab_blocks(tensor), self._ranks, 0)], certain=True)
        elif module in ("o_proj", "down_proj", "out_proj") and kind == "weight":
            # Ranks share the input dimension of these, the last one.
            blocks = self._in_blocks(tensor, -1, name) if module == "down_proj" else tensor
            self._note(name, [along(blocks, self._ranks, -1)], certain=self._is_certain)
        elif module.endswith("norm"):
            self._note(name, [whole(tensor, self._ranks)], certain=self._is_certain)
            if self._type.startswith("qwen3_5"):
                # Beside the weight the engine keeps 1 + weight, which its kernels multiply with.
                scale = tensor.to(self._dtype) + 1.0
                self._note(f"{path}.gemma_weight", [whole(scale, self._ranks)])
        elif module == "conv1d":
            self._note(name, [self._by_section(tensor)])
        else:
            # Unknown: an engine may hold it whole, or cut it along its first or its last dimension.
            cuts = (along(tensor, self._ranks, dim) for dim in (0, -1) if tensor.ndim)
            self._note(name, [whole(tensor, self._ranks), *cuts])

    @property
    def _is_certain(self) -> bool:
        return self._type in CERTAIN_MODELS

    def _engine_name(self, name: str) -> str:
        if self._type.startswith("qwen3_5"):
            return name.replace(".language_model.", ".").replace(".self_attn.", ".")
        return name

    def _number(self, key: str) -> int:
        """Return an integer of the model's config.json, 0 if it is missing."""
        value = self._config.get(key)
        return value if isinstance(value, int) else 0

    def _collected(
        self, name: str, place: int, tensor: torch.Tensor, num_parts: int
    ) -> list[torch.Tensor]:
        """Keep one part of a parameter; with the last one, return all of them in order."""
        parts = self._parts.setdefault(name, {})
        parts[place] = tensor
        if len(parts) < num_parts:
            return []
        del self._parts[name]
        return [parts[n] for n in sorted(parts)]

    def _fuse(self, fused: str, parts: Sequence[torch.Tensor]) -> PerRank | None:
        """Return each rank's share of the rows of every part, one part under the other."""
        first, *rest = parts
        if fused == "qkv_proj":
            # Without the number in config.json, assume that no ranks share a head.
            num_heads = self._number("num_key_value_heads") or self._ranks
            cuts = [along(first, self._ranks, 0)]
            cuts += [heads(part, self._ranks, num_heads) for part in rest]
            return stacked(cuts)
        if fused == "in_proj_qkvz":
            return stacked([self._by_section(first), along(rest[0], self._ranks, 0)])
        return stacked([along(part, self._ranks, 0) for part in parts])

    def _in_vocab_blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pad an embedding's rows; a CPU engine pads more if its ranks do not divide them."""
        rows = -(-tensor.shape[0] // VOCAB_BLOCK) * VOCAB_BLOCK
        if self._target.device == "cpu" and rows % self._ranks:
            block = VOCAB_BLOCK * self._ranks
            rows = -(-tensor.shape[0] // block) * block
        return padded(tensor, 0, rows)

    def _in_blocks(self, tensor: torch.Tensor, dim: int, name: str) -> torch.Tensor:
        """Pad a feed-forward block's width as a CPU engine does, each shared expert by itself."""
        if self._target.device != "cpu":
            return tensor
        shared = self._number("n_shared_experts") if "shared_experts" in name else 0
        block = CPU_WIDTH_BLOCK * self._ranks * max(shared, 1)
        return padded(tensor, dim, -(-tensor.shape[dim] // block) * block)

    def _by_section(self, tensor: torch.Tensor) -> PerRank | None:
        """Cut the rows of a delta net's queries, keys and values, each by itself."""
        keys = self._number("linear_num_key_heads") * self._number("linear_key_head_dim")
        # Other sections than the config describes: expect no checksum.
        if not 0 < 2 * keys < tensor.shape[0]:
            return None
        sections = torch.split(tensor, [keys, keys, tensor.shape[0] - 2 * keys])
        return stacked([along(section, self._ranks, 0) for section in sections])

    def _add_expert(self, match: re.Match[str], tensor: torch.Tensor) -> None:
        """Stack a layer's experts as (experts, rows, columns), gates above ups."""
        path, part = match["path"], match["part"]
        if match["number"] is None:
            self._note_experts(path, part, tensor)
            return
        # Model families name this number in different ways.
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        num_experts = max(map(self._number, keys))
        if not num_experts:
            return
        stack, halves = (f"{path}.down_proj", 1) if part == "down_proj" else (f"{path}.gate_up", 2)
        place = halves * int(match["number"]) + (part == "up_proj")
        if parts := self._collected(stack, place, tensor, halves * num_experts):
            rows = torch.cat(parts)
            self._note_experts(path, part, rows.view(num_experts, -1, rows.shape[-1]))

    def _note_experts(self, path: str, part: str, experts: torch.Tensor) -> None:
        """Add both layouts: ranks share each expert, or each rank holds some experts."""
        if part == "down_proj":
            name, experts = f"{path}.w2_weight", self._in_blocks(experts, -1, path)
            cut = along(experts, self._ranks, -1)
        else:
            # The engine pads and cuts gates and ups each by themselves.
            halves = [self._in_blocks(half, 1, path) for half in experts.chunk(2, 1)]
            name, experts = f"{path}.w13_weight", torch.cat(halves, 1)
            cut = stacked([along(half, self._ranks, 1) for half in halves], 1)
        self._note(name, [cut, along(experts, self._ranks, 0)])

    def _note(self, name: str, cuts: Sequence[PerRank | None], *, certain: bool = False) -> None:
        """Keep the checksums of every layout in which the ranks may hold a parameter."""
        layouts = [cut for cut in cuts if cut is not None]
        for rank in range(self._ranks if layouts else 0):
            # A single rank holds the same bytes in every layout.
            tensors = [cut[rank] for cut in layouts][: 1 if self._ranks == 1 else None]
            sums = [checksum for tensor in tensors for checksum in self._sums(tensor)]
            self._found[rank][name] = tuple(dict.fromkeys(sums))
        if certain and layouts:
            self._certain.add(name)

    def _sums(self, tensor: torch.Tensor) -> list[str]:
        """Return a tensor's checksums in each type that an engine may keep it in."""
        types = [tensor.dtype, self._dtype]
        if tensor.numel() <= SMALL and tensor.is_floating_point():
            types.append(torch.float32)
        kinds = (tensor.to(dtype) for dtype in dict.fromkeys(types))
        return [hash_tensor(kind, self._target.device) for kind in kinds]


def whole(tensor: torch.Tensor, num_ranks: int) -> PerRank:
    return [tensor] * num_ranks


def along(tensor: torch.Tensor, num_ranks: int, dim: int) -> PerRank | None:
    """Give each rank its share of one dimension; None if it does not divide."""
    if tensor.ndim < abs(dim) or tensor.shape[dim] % num_ranks:
        return None
    return [part.contiguous() for part in tensor.chunk(num_ranks, dim)]


def padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = size - tensor.shape[dim]
    # `pad` works on the last dimension.
    return torch.nn.functional.pad(tensor.movedim(dim, -1), (0, missing)).movedim(-1, dim)


def heads(tensor: torch.Tensor, num_ranks: int, num_heads: int) -> PerRank | None:
    """Give each rank the rows of its heads; if heads are fewer than ranks, ranks share a head."""
    if num_heads >= num_ranks:
        return None if num_heads % num_ranks else along(tensor, num_ranks, 0)
    if num_ranks % num_heads:
        return None
    parts = along(tensor, num_heads, 0)
    return parts and [parts[rank * num_heads // num_ranks] for rank in range(num_ranks)]


def stacked(cuts: Sequence[PerRank | None], dim: int = 0) -> PerRank | None:
    """Give each rank its share of every part, one after the other; None if one part has none."""
    parts_found = [cut for cut in cuts if cut is not None]
    if len(parts_found) < len(cuts):
        return None
    return [torch.cat(parts, dim) for parts in zip(*parts_found, strict=True)]


def hash_tensor(tensor: torch.Tensor, device: str) -> str:
    """Return the checksum that SGLang's `/weights_checker` reports, on a `cpu` or `cuda` engine.

    sha256 on a CPU (`sglang.srt.managers.mm_utils.tensor_hash`), a positional sum of 32-bit mixes
    on a GPU (`sglang.kernels.ops.memory.gpu_tensor_hash`).
    """
    value = _hash_on_gpu(tensor) if device == "cuda" else _hash_on_cpu(tensor)
    return f"{value:016x}"


def _hash_on_cpu(tensor: torch.Tensor) -> int:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(raw.data).digest()[:8], "big")


def _hash_on_gpu(tensor: torch.Tensor) -> int:
    """Sum over tiles two 32-bit sums of mixed words, each mixed with its position.

    It runs where the tensor lies. Only the sum leaves the device.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    # The kernel reads 32-bit words, and zeros fill the last one.
    padding = -raw.numel() % 4
    # A copy only if it must be: a bf16 tensor may have an odd number of elements.
    words = (torch.nn.functional.pad(raw, (0, padding)) if padding else raw).view(torch.int32)
    if not words.numel():
        return 0
    # Chunks limit the memory of the temporaries; sums of tiles add up in any order.
    num_words, step = words.numel(), TILE_WORDS * _CHUNK_TILES
    whole_words = num_words // TILE_WORDS * TILE_WORDS
    # Tensors: inductor turns bit operations on integer arguments into floats.
    start, num_bytes, total = torch.tensor([0, num_words * 4 & _MASK, 0], device=words.device)
    for first in range(0, whole_words, step):
        tiles = words[first : min(first + step, whole_words)].view(-1, TILE_WORDS)
        total += _one_kernel(tiles, start, num_bytes)
        start += tiles.numel()
    if whole_words < num_words:
        total += tiles_sum(words[whole_words:].unsqueeze(0), start, num_bytes)
    return _splitmix64(int(total))


def tiles_sum(words_Tw: torch.Tensor, start: torch.Tensor, num_bytes: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2^64, of the hashes of T tiles that begin at word `start`."""
    place = start + torch.arange(words_Tw.numel(), device=words_Tw.device).view_as(words_Tw)
    # int64 with a mask replaces unsigned 32-bit arithmetic.
    value = words_Tw.to(torch.int64) & _MASK
    # The constants are those of SGLang's kernel; the first seed makes the high half.
    seeds = _SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK
    halves = []
    for seed, factor, bits in zip(seeds, (0x27D4EB2D, 0x165667B1), (15, 13), strict=True):
        mixed = ((place * factor + seed) & _MASK) ^ _rotated(place & _MASK, bits)
        tile = _fmix32(value ^ mixed).sum(1) & _MASK
        # Each tile's hash contains the length of the whole tensor in bytes.
        halves.append(_fmix32(tile ^ num_bytes))
    high, low = halves
    return ((high << 32) | low).sum()  # int64 wraps, as the sum must


_one_kernel = fuse(tiles_sum)
"""One kernel, which reads each word once; torch's own ones take 200 times the traffic."""


def _rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


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
