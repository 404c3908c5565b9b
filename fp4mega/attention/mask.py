"""Which keys a query sees: causal (two alignments), sliding window, padding, packed sequences, any boolean mask.

A packed problem is answered as a padded batch of its sequences, so that every other rule is written once, for
[B, S, T] with a length per batch entry. Masks are True where a position is masked out.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4mega.attention.problem import AttentionProblem, Placement, SideInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """The mask of one problem, evaluated a tile at a time. `lengths_q/k` are int [B] or None (all rows, all keys).

    `rows` and `keys`, both or neither, place a part of longer sequences on the whole ones' diagonal; None is the whole from
    its start. Lengths are those of the whole.
    """

    problem: AttentionProblem
    side: SideInputs
    lengths_q: Tensor | None = None
    lengths_k: Tensor | None = None
    rows: Placement | None = None
    keys: Placement | None = None

    def tile(self, rows: Tensor, keys: Tensor) -> Tensor | None:
        """Masked-out positions for these query and key indices: bool, broadcastable to [B, H, rows, keys], or None."""
        problem, side = self.problem, self.side
        i, j = rows[:, None], keys[None, :]
        if self.rows is not None and self.keys is not None:
            i = self.rows.positions(rows.device)[:, None, rows, None]
            j = self.keys.positions(keys.device)[:, None, None, keys]
        terms: list[Tensor] = []
        left, right = problem.window
        if problem.causal != "none":
            right = 0
        if left is not None or right is not None:
            diagonal = i + self._diagonal()
            if right is not None:
                terms.append(j > diagonal + right)
            if left is not None:
                terms.append(j < diagonal - left)
        if self.lengths_q is not None:
            terms.append(i >= self.lengths_q[:, None, None, None])
        if self.lengths_k is not None:
            terms.append(j >= self.lengths_k[:, None, None, None])
        if side.key_padding_mask is not None:
            terms.append(side.key_padding_mask[:, None, None, keys])
        if side.attention_mask is not None:
            terms.append(side.attention_mask[:, :, rows][:, :, :, keys])
        if not terms:
            return None
        masked = terms[0]
        for term in terms[1:]:
            masked = masked | term
        return masked

    def _diagonal(self) -> Tensor | int:
        """The key that lies on the diagonal of query 0."""
        if self.problem.causal != "bottom_right":
            return 0
        if self.lengths_q is None or self.lengths_k is None:
            return self.problem.seqlen_k - self.problem.seqlen_q
        return (self.lengths_k - self.lengths_q)[:, None, None, None]

    def first_row(self, first_key: int) -> int:
        """First query that can see key `first_key` or a later one: what a causal loop may skip. Static, so a bound only."""
        if self.problem.causal == "top_left":
            if self.rows is not None and self.keys is not None:
                return self.rows.first_behind(self.keys, first_key)
            return min(first_key, self.problem.seqlen_q)
        if self.problem.causal == "bottom_right" and self.lengths_q is None:
            return min(
                max(first_key - (self.problem.seqlen_k - self.problem.seqlen_q), 0),
                self.problem.seqlen_q,
            )
        return 0

    def hidden_keys(self) -> Tensor | None:
        """Keys that no query may see, bool [B, T]: their contents must not reach any scale. None when there are none."""
        if self.lengths_k is not None:
            keys = torch.arange(self.problem.seqlen_k, device=self.lengths_k.device)
            return keys >= self.lengths_k[:, None]
        return self.side.key_padding_mask


@dataclass(frozen=True, slots=True)
class Packing:
    """Moves packed rows [1, total, heads, dim] to a padded batch [N, longest, heads, dim] and back."""

    index: Tensor
    """int64 [N, longest]: the packed row of every padded one; out of range rows point at row 0 and are masked."""
    valid: Tensor
    """bool [N, longest]."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, longest: int) -> "Packing":
        """cu_seqlens: int [N + 1]; longest: rows of the padded batch, at least the longest sequence."""
        starts = cu_seqlens[:-1].long()
        lengths = cu_seqlens.diff().long()
        position = torch.arange(longest, device=cu_seqlens.device)
        valid = position < lengths[:, None]
        return cls(torch.where(valid, starts[:, None] + position, 0), valid)

    def pad(self, x: Tensor) -> Tensor:
        """[1, total, heads, ...] to [N, longest, heads, ...], zeros beyond each sequence."""
        if x.shape[1] == 0:
            return x.new_zeros((*self.index.shape, *x.shape[2:]))
        gathered = x[0, self.index]
        return gathered.masked_fill(~self.valid.view(*self.valid.shape, *[1] * (x.dim() - 2)), 0)

    def unpad(self, x: Tensor, total: int, fill: float = 0.0) -> Tensor:
        """[N, longest, heads, ...] back to [1, total, heads, ...]; rows that belong to no sequence are `fill`."""
        out = x.new_full((total, *x.shape[2:]), fill)
        out[self.index[self.valid]] = x[self.valid]
        return out[None]


def unpack_problem(
    problem: AttentionProblem, side: SideInputs
) -> tuple[AttentionProblem, Mask, Packing | None, Packing | None]:
    """The problem as a dense batch, its mask, and how to move queries and keys there (None when it is dense already)."""
    if not problem.packed:
        return problem, Mask(problem=problem, side=side), None, None
    assert side.cu_seqlens_q is not None
    assert side.cu_seqlens_k is not None
    for name, cu_seqlens, longest in (
        ("q", side.cu_seqlens_q, problem.max_seqlen_q),
        ("k", side.cu_seqlens_k, problem.max_seqlen_k),
    ):
        found = int(cu_seqlens.diff().max()) if problem.num_sequences else 0
        if found > longest:
            raise ValueError(
                f"max_seqlen_{name}={longest}: cu_seqlens_{name} holds a sequence of {found} rows"
            )
    dense = replace(
        problem,
        batch=problem.num_sequences,
        seqlen_q=problem.max_seqlen_q,
        seqlen_k=problem.max_seqlen_k,
        num_sequences=0,
        max_seqlen_q=0,
        max_seqlen_k=0,
    )
    mask = Mask(
        problem=dense,
        side=SideInputs(sink=side.sink, rounding_key=side.rounding_key),
        lengths_q=side.cu_seqlens_q.diff(),
        lengths_k=side.cu_seqlens_k.diff(),
    )
    return (
        dense,
        mask,
        Packing.of(side.cu_seqlens_q, problem.max_seqlen_q),
        Packing.of(side.cu_seqlens_k, problem.max_seqlen_k),
    )
