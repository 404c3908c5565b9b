"""Operands of which a rank holds a part: scales taken over the whole group, bytes that travel and are saved."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from fp4mega.attention.operand import Operand
from fp4mega.attention.represent import decode_operand, encode_operand, operand_spec, scope_amax
from fp4mega.parallel.layout import Layout

Named = tuple[str, Operand, Tensor]


def group_amax(
    operands: Iterable[Named], dtype: torch.dtype, group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Largest magnitudes of every scope that spans the ranks' rows, by operand name; one all-reduce for all of them.

    Each x is [B, rows, heads, dim]. An operand without such a scope is absent.
    """
    mine = {name: scope_amax(name, operand, x) for name, operand, x in operands}
    found = {name: amax.to(dtype) for name, amax in mine.items() if amax is not None}
    if not found:
        return {}
    flat = torch.cat([amax.flatten() for amax in found.values()])
    dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    pieces = flat.split([amax.numel() for amax in found.values()])
    return {
        name: piece.view(amax.shape)
        for (name, amax), piece in zip(found.items(), pieces, strict=True)
    }


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """One operand of some rows: the bytes of `encode_operand`, or the values themselves where nothing is quantized.

    tensors: without the rows that the dense batch has and the rank does not, as `Layout.squeeze` leaves them. shape: of that batch.
    """

    name: str
    operand: Operand
    tensors: tuple[Tensor, ...]
    shape: tuple[int, ...]
    layout: Layout

    @classmethod
    def of(
        cls, name: str, operand: Operand, x: Tensor, amax: dict[str, Tensor], layout: Layout
    ) -> "Published":
        """x [N, rows, heads, dim] as `operand` says, with the group's largest magnitudes."""
        if operand.quantized:
            tensors = encode_operand(name, operand, x, None, amax=amax.get(name)).tensors()
        else:
            tensors = (x.to(torch.bfloat16) if operand.format == "bf16" else x,)
        kept = tuple(layout.squeeze(t) for t in tensors)
        return cls(name, operand, kept, tuple(x.shape), layout)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The represented values in `dtype`, a dense batch."""
        if not self.operand.quantized:
            return self.layout.spread(self.tensors[0], self.shape).to(dtype)
        shapes = [shape for shape, _ in operand_spec(self.name, self.operand, self.shape)]
        # A scale of 0 would make NaN of rows that are not there, and 0 times them of what is.
        dense = [
            self.layout.spread(t, s, 1.0 if t.is_floating_point() else 0.0)
            for t, s in zip(self.tensors, shapes, strict=True)
        ]
        return decode_operand(self.name, self.operand, dense, self.shape, dtype)

    @property
    def own(self) -> tuple[Tensor, ...]:
        """The tensors that another rank does not have: all but a scale that the group shares."""
        return self.tensors[:-1] if self._shares_scale else self.tensors

    @property
    def _shares_scale(self) -> bool:
        return self.operand.quantized and self.operand.scope in ("head", "tensor")

    def replaced(self, own: list[Tensor]) -> "Published":
        """The same operand of another rank, from that rank's `own`."""
        shared = self.tensors[-1:] if self._shares_scale else ()
        return replace(self, tensors=(*own, *shared))


def restore(
    name: str, operand: Operand, tensors: list[Tensor], shape: tuple[int, ...], layout: Layout
) -> Published:
    """Take an operand's tensors off the front of a list of saved ones."""
    count = len(operand_spec(name, operand, shape)) if operand.quantized else 1
    taken = tuple(tensors[:count])
    del tensors[:count]
    return Published(name, operand, taken, shape, layout)


def pack(published: list[Published]) -> Tensor:
    """Everything of these operands that travels, as one message: uint8 [bytes]."""
    return torch.cat([t.contiguous().flatten().view(torch.uint8) for p in published for t in p.own])


def unpack(message: Tensor, like: list[Published]) -> list[Published]:
    """The operands in another rank's message; `like` are this rank's own, of the same shapes."""
    found, at = [], 0
    for published in like:
        own = []
        for tensor in published.own:
            size = prod(tensor.shape) * tensor.element_size()
            # A copy: a view of bytes as wider values needs an aligned start.
            own.append(message[at : at + size].clone().view(tensor.dtype).view(tensor.shape))
            at += size
        found.append(published.replaced(own))
    return found
