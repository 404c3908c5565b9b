"""How every rank's query rows meet every rank's keys: all at once (all-gather) or one rank's keys after another (ring).

Both call a body with blocks of represented keys and say where they lie. What the body returns, its rows' part of the
gradients of those keys, is summed over the group and handed to the rank that holds them.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fp4mega.attention.problem import Placement
from fp4mega.parallel.layout import Layout
from fp4mega.parallel.operands import Published, pack, unpack

Body = Callable[[Placement, list[Tensor]], list[Tensor]]


class Exchange(Protocol):
    """One way to meet."""

    def visit(self, published: list[Published], dtype: torch.dtype, body: Body) -> list[Tensor]:
        """Call body(placement, values) until it has met all keys of the group.

        published: this rank's K, V or both. values: the same operands of a block of keys in `dtype`, [N, keys, G, D]. The body
        returns gradients of the block, of the same shapes, or nothing; the sums over the group for this rank's keys come
        back, in the caller's layout.
        """
        ...


class AllGather:
    """One block, the whole sequence in its order: every key tile is the one that a single rank would see."""

    def __init__(self, group: dist.ProcessGroup, layout: Layout) -> None:
        self.group, self.layout = group, layout

    def visit(self, published: list[Published], dtype: torch.dtype, body: Body) -> list[Tensor]:
        layout = self.layout
        message = pack(published)
        gathered = [torch.empty_like(message) for _ in range(layout.ranks)]
        dist.all_gather(gathered, message, group=self.group)
        by_rank = [
            [layout.squeeze(p.values(dtype)) for p in unpack(m, published)] for m in gathered
        ]
        values = [
            layout.enter_whole(layout.assemble(torch.stack(parts)))
            for parts in zip(*by_rank, strict=True)
        ]
        gradients = body(layout.whole(), values)
        parts = [layout.distribute(layout.leave_whole(g)) for g in gradients]
        if not parts:
            return []
        outgoing = torch.cat([part.flatten(1) for part in parts], dim=1)
        mine = torch.empty_like(outgoing[0])
        dist.reduce_scatter(mine, list(outgoing.unbind()), group=self.group)
        pieces = mine.split([part[0].numel() for part in parts])
        return [piece.view(part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]


class Ring:
    """As many blocks as ranks, this rank's own first, then its left neighbour's; gradients travel behind their keys."""

    def __init__(self, group: dist.ProcessGroup, layout: Layout) -> None:
        self.group, self.layout = group, layout
        self.rank, self.ranks = group.rank(), group.size()

    def visit(self, published: list[Published], dtype: torch.dtype, body: Body) -> list[Tensor]:
        message = pack(published)
        sums: Tensor | None = None
        shapes: list[torch.Size] = []
        for step in range(self.ranks):
            # The next block is under way while this one is computed.
            transfer = self._send(message) if step + 1 < self.ranks else None
            source = (self.rank - step) % self.ranks
            values = [p.values(dtype) for p in unpack(message, published)]
            parts = [self.layout.squeeze(g) for g in body(self.layout.placement(source), values)]
            if parts:
                shapes = [part.shape for part in parts]
                flat = torch.cat([part.flatten() for part in parts])
                sums = self._pass_on(flat if sums is None else sums + flat)
            if transfer is not None:
                message = self._receive(transfer)
        if sums is None:
            return []
        pieces = sums.split([shape.numel() for shape in shapes])
        mine = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        # 0 times a number: where a head is NaN, so is what its padding was given.
        return [self.layout.leave(self.layout.enter(x)) for x in mine]

    def _pass_on(self, message: Tensor) -> Tensor:
        # Not every backend sends to itself.
        return message if self.ranks == 1 else self._receive(self._send(message))

    def _send(self, message: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start passing a message to the right neighbour and taking the left one's."""
        arriving = torch.empty_like(message)
        right, left = (
            dist.get_global_rank(self.group, (self.rank + by) % self.ranks) for by in (1, -1)
        )
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, message, right, self.group),
                dist.P2POp(dist.irecv, arriving, left, self.group),
            ]
        )
        return arriving, works

    def _receive(self, transfer: tuple[Tensor, list[dist.Work]]) -> Tensor:
        arriving, works = transfer
        for work in works:
            work.wait()
        return arriving
