"""Packed sequences over ranks: Megatron's convention, in which each is padded to a multiple of 2n and cut zigzag on its own.

A rank holds chunks r and 2n - 1 - r of every sequence, one sequence after another. Padding lies at a sequence's end; it is
seen by nobody, enters no scale, and has output 0, lse -inf and gradient 0.

Dims: n ranks, N sequences with a place in memory, t tokens a rank (padding included), T tokens that count on all ranks, c_i = chunk length of
sequence i, R = 2 max c_i.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fp4mega.attention.mask import Packing
from fp4mega.attention.problem import Placement
from fp4mega.parallel.zigzag import chunks_of


@dataclass(frozen=True)
class PackedZigzag:
    """A `Layout` of packed sequences, from where each begins, how long it is, and where its padding ends; all on the host."""

    ranks: int
    rank: int
    starts: tuple[int, ...]
    """First token of every sequence, and the end of the last, on all ranks together and with padding: [N + 1]."""
    tokens: tuple[int, ...]
    """Tokens of every sequence without its padding: [N]."""
    device: torch.device

    @classmethod
    def of(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        *,
        ranks: int,
        rank: int,
        tokens: int,
    ) -> "PackedZigzag":
        """Read the cumulative lengths of `tokens` tokens a rank; a synchronization on a GPU. Raises ValueError naming the argument.

        Sequences without a place, with which Megatron fills up cumulative lengths to a fixed number, are left out.
        """
        for name, bounds in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", cu_seqlens_padded)):
            if bounds is None:
                continue
            if bounds.dtype != torch.int32 or bounds.dim() != 1 or bounds.shape[0] < 2:
                raise ValueError(
                    f"{name}: {bounds.dtype} of shape {tuple(bounds.shape)}: expected torch.int32 [N + 1]"
                )
        ends = cu_seqlens.tolist()
        starts = ends if cu_seqlens_padded is None else cu_seqlens_padded.tolist()
        lengths = [b - a for a, b in zip(ends[:-1], ends[1:], strict=True)]
        places = [b - a for a, b in zip(starts[:-1], starts[1:], strict=True)]
        if len(starts) != len(ends):
            raise ValueError(
                f"cu_seqlens_padded holds {len(starts)} bounds: expected as many as cu_seqlens, {len(ends)}"
            )
        if ends[0] != 0 or min(lengths) < 0 or ends[-1] == 0:
            raise ValueError(
                f"cu_seqlens={_short(ends)}: expected to start at 0, never to decrease, and to end above 0"
            )
        name = "cu_seqlens" if cu_seqlens_padded is None else "cu_seqlens_padded"
        if starts[0] != 0 or starts[-1] != ranks * tokens:
            raise ValueError(
                f"{name}={_short(starts)}: expected to start at 0 and to end at the {ranks * tokens} tokens that {ranks} "
                f"ranks of {tokens} hold"
            )
        for i, (length, place) in enumerate(zip(lengths, places, strict=True)):
            if place % (2 * ranks):
                raise ValueError(
                    f"{name}={_short(starts)}: sequence {i} has {place} rows; every one of {ranks} context-parallel ranks "
                    f"holds two chunks of it, so it must be padded to a multiple of {2 * ranks}"
                )
            if length > place:
                raise ValueError(
                    f"cu_seqlens={_short(ends)}: sequence {i} has {length} rows, but {place} with its padding"
                )
        kept = [i for i, place in enumerate(places) if place]
        starts = [0, *(starts[i + 1] for i in kept)]
        return cls(ranks, rank, tuple(starts), tuple(lengths[i] for i in kept), cu_seqlens.device)

    @property
    def padded(self) -> tuple[int, ...]:
        """Rows of every sequence with its padding."""
        return tuple(b - a for a, b in zip(self.starts[:-1], self.starts[1:], strict=True))

    @property
    def chunks(self) -> tuple[int, ...]:
        """c_i."""
        return tuple(rows // (2 * self.ranks) for rows in self.padded)

    @property
    def batch(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        return 2 * max(self.chunks)

    @cached_property
    def lengths(self) -> Tensor:
        return torch.tensor(self.tokens, device=self.device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Cumulative lengths of what `assemble` gives: int32 [N + 1], without padding."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    def placement(self, rank: int) -> Placement:
        return Placement(self.chunks, chunks_of(rank, self.ranks))

    def whole(self) -> Placement:
        return Placement(self.chunks, tuple(range(2 * self.ranks)))

    @cached_property
    def _starts(self) -> Tensor:
        """First token of every sequence on a rank, [N]."""
        return torch.tensor(self.starts[:-1], device=self.device) // self.ranks

    @cached_property
    def _held(self) -> Tensor:
        """Which rows of the dense batch this rank holds, padding included, bool [N, R]."""
        chunks = torch.tensor(self.chunks, device=self.device)
        return torch.arange(self.rows, device=self.device) < 2 * chunks[:, None]

    @cached_property
    def _local(self) -> Packing:
        counts = self.placement(self.rank).positions(self.device) < self.lengths[:, None]
        row = torch.arange(self.rows, device=self.device)
        return Packing(torch.where(counts, self._starts[:, None] + row, 0), counts)

    @cached_property
    def _whole(self) -> Packing:
        return Packing.of(self.cu_seqlens, self.whole().rows)

    @cached_property
    def _order(self) -> Tensor:
        """Where each of the T tokens that count lies among the n t rows of all ranks, int64 [T]."""
        sequence = torch.arange(self.batch, device=self.device).repeat_interleave(
            self.lengths, output_size=sum(self.tokens)
        )
        position = torch.arange(len(sequence), device=self.device) - self.cu_seqlens[sequence]
        length = torch.tensor(self.chunks, device=self.device)[sequence]
        chunk = position // length
        late = chunk >= self.ranks
        rank = torch.where(late, 2 * self.ranks - 1 - chunk, chunk)
        row = self._starts[sequence] + late * length + position % length
        return rank * (self.starts[-1] // self.ranks) + row

    def enter(self, x: Tensor, fill: float = 0.0) -> Tensor:
        dense = self._local.pad(x)
        if fill == 0.0:
            return dense
        counts = self._local.valid
        return dense.masked_fill(~counts.view(*counts.shape, *[1] * (x.dim() - 2)), fill)

    def leave(self, x: Tensor, fill: float = 0.0) -> Tensor:
        return self._local.unpad(x, self.starts[-1] // self.ranks, fill)

    def enter_whole(self, x: Tensor) -> Tensor:
        return self._whole.pad(x)

    def leave_whole(self, x: Tensor) -> Tensor:
        return self._whole.unpad(x, sum(self.tokens))

    def assemble(self, parts: Tensor) -> Tensor:
        return parts.flatten(0, 2)[self._order][None]

    def distribute(self, x: Tensor, fill: float = 0.0) -> Tensor:
        rows = x.new_full((self.starts[-1], *x.shape[2:]), fill)
        return rows.index_copy(0, self._order, x[0]).unflatten(0, (self.ranks, 1, -1))

    def squeeze(self, x: Tensor) -> Tensor:
        return x if x.shape[1] == 1 else x[self._places(x.shape[1])][None]

    def spread(self, x: Tensor, shape: tuple[int, ...], fill: float = 0.0) -> Tensor:
        if shape[1] == 1:
            return x
        dense = x.new_full(shape, fill)
        dense[self._places(shape[1])] = x[0]
        return dense

    def _places(self, places: int) -> Tensor:
        """Which of so many places a sequence hold a row, bool [N, places]."""
        return self._held[:, :: self.rows // places]


def _short(values: list[int]) -> str:
    if len(values) <= 10:
        return str(values)
    return f"[{', '.join(map(str, values[:5]))}, ..., {', '.join(map(str, values[-4:]))}]"
