"""What is asked of attention: static shape and mask (`AttentionProblem`), and the tensors beside q, k, v (`SideInputs`).

Dims: B batch, S query length, T key length, H query heads, G kv heads, D head dim of q and k, Dv head dim of v,
N packed sequences. q is [B, S, H, D], k is [B, T, G, D], v is [B, T, G, Dv], out is [B, S, H, Dv], lse is [B, H, S].
Everywhere in this library a boolean mask is True where a position is masked *out*, as in Megatron.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

NO_LIMIT = 2**30
"""A window's side has fewer keys than this, so that a row and a side add up within a kernel's 32 bits."""

Causal = Literal["none", "top_left", "bottom_right"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256


def check_window(window: tuple[int | None, int | None]) -> None:
    """Raises ValueError for a side that is out of range."""
    if any(side is not None and not 0 <= side < NO_LIMIT for side in window):
        raise ValueError(
            f"window={window}: each side is None (no limit) or from 0 to {NO_LIMIT - 1}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProblem:
    """Static description: everything a backend needs to decide whether and how it can run, and nothing that is data.

    `window` is (left, right): key j is visible to query i when i + a - left <= j <= i + a + right, with a the offset
    of the diagonal (0 for `none` and `top_left`, T - S for `bottom_right`); None means no limit on that side.
    In a packed problem B is 1, `num_sequences` is N, S and T count all tokens, and `max_seqlen_q/k` bound one sequence.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    softmax_scale: float
    causal: Causal = "none"
    window: tuple[int | None, int | None] = (None, None)
    key_padding_mask: bool = False
    attention_mask: bool = False
    sink: bool = False
    num_sequences: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "seqlen_q", "seqlen_k", "num_sequences"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected 0 or more")
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: query heads must be a positive multiple of kv heads"
            )
        for name in ("head_dim", "head_dim_v"):
            if not 1 <= getattr(self, name) <= MAX_HEAD_DIM:
                raise ValueError(f"{name}={getattr(self, name)}: allowed: 1 to {MAX_HEAD_DIM}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: allowed: {', '.join(str(d) for d in DTYPES)}")
        if not (math.isfinite(self.softmax_scale) and self.softmax_scale > 0):
            raise ValueError(
                f"softmax_scale={self.softmax_scale}: expected a finite positive number"
            )
        if self.causal not in get_args(Causal):
            raise ValueError(f"causal={self.causal!r}: allowed: {', '.join(get_args(Causal))}")
        check_window(self.window)
        if self.num_sequences and self.batch != 1:
            raise ValueError(f"batch={self.batch}: packed sequences have a batch of 1")
        if self.num_sequences and (self.key_padding_mask or self.attention_mask):
            raise ValueError(
                "key_padding_mask and attention_mask do not combine with packed sequences"
            )

    @classmethod
    def of(
        cls,
        shapes: tuple[Sequence[int], Sequence[int], Sequence[int]],
        dtype: torch.dtype,
        side: "SideInputs",
        *,
        softmax_scale: float,
        causal: Causal,
        window: tuple[int | None, int | None],
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
    ) -> "AttentionProblem":
        """The problem of a call: shapes of q [B,S,H,D], k [B,T,G,D], v [B,T,G,Dv], and what stands beside them."""
        (batch, seqlen_q, num_heads, head_dim), (_, seqlen_k, num_kv_heads, _), (*_, head_dim_v) = (
            shapes
        )
        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            softmax_scale=softmax_scale,
            causal=causal,
            window=window,
            key_padding_mask=side.key_padding_mask is not None,
            attention_mask=side.attention_mask is not None,
            sink=side.sink is not None,
            num_sequences=0 if side.cu_seqlens_q is None else side.cu_seqlens_q.shape[0] - 1,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    @property
    def packed(self) -> bool:
        """True when rows of q, k, v belong to several sequences laid end to end."""
        return self.num_sequences > 0

    def __str__(self) -> str:
        shape = (
            f"B{self.batch} S{self.seqlen_q} T{self.seqlen_k} H{self.num_heads}/{self.num_kv_heads} "
            f"D{self.head_dim}/{self.head_dim_v} {str(self.dtype).removeprefix('torch.')} causal={self.causal}"
        )
        extras = [
            n for n in ("key_padding_mask", "attention_mask", "sink", "packed") if getattr(self, n)
        ]
        window = "" if self.window == (None, None) else f" window={self.window}"
        return shape + window + "".join(f" {n}" for n in extras)


_NOWHERE = 2**40  # beyond every sequence, and far enough from overflow for a window around it


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rows of longer sequences a tensor [B, rows, ...] holds: whole chunks, by their numbers, in rising order.

    lengths: rows of a chunk, one number for all B sequences or one for each. Rows behind a shorter one's chunks are nowhere.
    """

    lengths: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many rows the tensor holds of each sequence."""
        return max(self.lengths) * len(self.chunks)

    def positions(self, device: torch.device) -> Tensor:
        """Position of every row in its sequence, int64 [1 or B, rows], rising; beyond every sequence when it is nowhere."""
        row = torch.arange(self.rows, device=device)
        length = torch.tensor(self.lengths, device=device)[:, None]
        chunk = row // length.clamp(min=1)
        starts = torch.tensor((*self.chunks, 0), device=device)[chunk.clamp(max=len(self.chunks))]
        position = starts * length + row % length.clamp(min=1)
        return position.masked_fill(row >= len(self.chunks) * length, _NOWHERE)

    def first_behind(self, keys: "Placement", key: int) -> int:
        """First row that lies at or behind row `key` of `keys` in any of the sequences."""
        return min(
            self._before(length, keys._position(length, key)) for length in set(self.lengths)
        )

    def _position(self, length: int, row: int) -> int:
        """Position of a row in a sequence whose chunks have this length."""
        if row >= length * len(self.chunks):
            return _NOWHERE
        return self.chunks[row // length] * length + row % length

    def _before(self, length: int, position: int) -> int:
        """How many rows of a sequence lie before a position of it; all of the tensor's when all of the sequence's do."""
        found = sum(min(max(position - c * length, 0), length) for c in self.chunks)
        return found if found < length * len(self.chunks) else self.rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SideInputs:
    """Tensors beside q, k, v; each may be None.

    sink: [H], a logit per head that only enters the normalizer (float32, float64 or q's dtype).
    key_padding_mask: bool [B, T]. attention_mask: bool [B or 1, H or 1, S, T]. Both True = masked out.
    cu_seqlens_q, cu_seqlens_k: int32 [N + 1], cumulative lengths of packed sequences, on q's device.
    rounding_key: int64 scalar that stochastic rounding counts from; needed by policies with '+sr' only.
    """

    sink: Tensor | None = None
    key_padding_mask: Tensor | None = None
    attention_mask: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    rounding_key: Tensor | None = None

    def as_tuple(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of the fields, for an op's schema."""
        return tuple(getattr(self, f.name) for f in fields(self))
