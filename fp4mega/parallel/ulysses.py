"""All-to-all between rows and heads (Ulysses): every rank gets the whole sequence of its share of the heads, and back.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023. Dims: n ranks, L rows a rank in zigzag chunks, S = n L.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4mega.parallel.zigzag import to_ranks, to_sequence


class _AllToAll(torch.autograd.Function):
    """Block i of [n, ...] goes to rank i, and what rank i sent becomes block i; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L, H, D] of this rank's rows to [B, S, H / n, D] of its heads, in the order of the sequence."""
    by_head = x.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4)
    return to_sequence(_AllToAll.apply(by_head, group))


def to_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Inverse of `to_heads`: [B, S, H / n, D] to [B, L, H, D]."""
    received = _AllToAll.apply(to_ranks(x, group.size()), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
