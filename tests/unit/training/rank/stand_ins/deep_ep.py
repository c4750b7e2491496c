"""DeepEP's Python interface over gloo, as Megatron-Core's `flex` dispatcher calls it.

It exchanges the same rows in the same order as `deep_ep.Buffer`: a token goes once to each rank
that has one of its experts, and comes back as the sum of these ranks' results. Ranks renumber their
experts from 0 and mark the others with -1.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

sys.modules["deep_ep.utils"] = sys.modules[__name__]


class EventHandle:
    pass


class EventOverlap:
    def __init__(self, event: object = None) -> None:
        pass

    def current_stream_wait(self) -> None:
        pass


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    num_calls = 0

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(number: int) -> None:
        pass

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Any, num_experts: int, **unused: Any) -> Any:
        ranks = self.group.size()
        by_rank = topk_idx // (num_experts // ranks)
        in_rank = torch.stack([(by_rank == rank).any(1) for rank in range(ranks)], 1)
        counts = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        return in_rank.sum(0), None, counts, in_rank, EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        **unused: Any,
    ) -> Any:
        Buffer.num_calls += 1
        if handle is not None:
            rows, _ = handle
            received = self._swap([x[each] for each in rows])
            return torch.cat(received), None, None, None, None, EventOverlap()
        assert topk_idx is not None and topk_weights is not None
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_weights.dtype is torch.float32, "DeepEP takes no other"
        rows = [each.nonzero().squeeze(1) for each in is_token_in_rank.unbind(1)]
        local = len(num_tokens_per_expert) // self.group.size()
        sent = []
        for rank, each in enumerate(rows):
            index = topk_idx[each] - rank * local
            here = (index >= 0) & (index < local)
            weights = topk_weights[each].masked_fill(~here, 0)
            sent.append((x[each], index.masked_fill(~here, -1), weights))
        parts = self._swap(sent)
        got, index, weights = (torch.cat(each) for each in zip(*parts, strict=True))
        counts = [int((index == expert).sum()) for expert in range(local)]
        handle = rows, [len(each[0]) for each in parts]
        return got, index, weights, counts, handle, EventOverlap()

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None, **unused: Any
    ) -> Any:
        rows, sizes = handle
        both = [x] if topk_weights is None else [x, topk_weights]
        sums = []
        for each in both:
            parts = self._swap(list(torch.split(each, sizes)))
            own = max((int(row.max()) + 1 for row in rows if len(row)), default=0)
            total = torch.zeros(own, each.shape[1], dtype=torch.float32)
            for row, part in zip(rows, parts, strict=True):
                total.index_add_(0, row, part.float())
            sums.append(total.to(each.dtype))
        return sums[0], sums[1] if len(sums) > 1 else None, EventOverlap()

    def _swap(self, sent: list[Any]) -> list[Any]:
        """Give each rank its element, and return those of all ranks for this one."""
        every: list[Any] = [None] * self.group.size()
        dist.all_gather_object(every, sent, group=self.group)
        return [each[self.group.rank()] for each in every]
