"""All-to-all between rows and heads (Ulysses): every rank gets the whole sequence of its share of the heads, and back.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023. Dims: n ranks, L rows a rank in zigzag chunks, S = n L.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4mega.parallel.layout import Layout


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


def to_heads(x: Tensor, group: dist.ProcessGroup, layout: Layout) -> Tensor:
    """[B, L, H, D] of this rank's rows to [B, S, H / n, D] of its heads: whole sequences, without padding."""
    by_head = x.unflatten(2, (layout.ranks, -1)).permute(2, 0, 1, 3, 4)
    return layout.assemble(_AllToAll.apply(by_head, group))


def to_rows(x: Tensor, group: dist.ProcessGroup, layout: Layout, fill: float = 0.0) -> Tensor:
    """Inverse of `to_heads`: [B, S, H / n, D] to [B, L, H, D], `fill` in padding."""
    received = _AllToAll.apply(layout.distribute(x, fill), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
