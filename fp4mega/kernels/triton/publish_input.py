"""What publishers read: rows of strided [B, rows, heads, dim] tensors and the largest magnitude of each head.

*Publishers* are the kernels that turn such tensors into saved bytes, those of `fp4mega.formats.quantize` bit for bit, and into what
matrix products read (`publish_fp4`, `publish_fp8`, `publish_values`). An *operand* is head-major [B, heads, rows, dim] (or transposed
[B, heads, dim, rows], because 8-bit products on Hopper want both factors contiguous along the reduced axis), padded with zeros to
whole tiles, and never saved.

What is scaled by a head's maximum has to be read twice. One launch does both: a program takes the maximum of its rows some heads further
on, then publishes its rows of a head whose maximum is known, and which is still in the cache.

Publishers do not specialize on `rows`: with rows = 1 known, the zeros of the rows beyond are known too, and ptxas 12.8 packs two equal
FP8 pairs of a cast into one register wrongly.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.arithmetic import bits_of

TILE = 128
"""Operands are padded to a multiple of this many rows."""


AHEAD_BYTES = 8 << 20
"""Bytes of a tensor whose maxima publishers take before the first of them is needed: what a GPU's cache keeps beside everything else."""


def padded_rows(rows: int) -> int:
    """Rows of an operand: a multiple of the largest kernel tile."""
    return -(-rows // TILE) * TILE


def padded_dim(dim: int) -> int:
    """Columns of an operand: a power of two that an 8-bit product accepts."""
    return max(32, triton.next_power_of_2(dim))


def is_whole(rows: int, dim: int, hidden: Tensor | None) -> bool:
    """Nothing of an operand is padding, and nothing is hidden."""
    return hidden is None and rows == padded_rows(rows) and dim == padded_dim(dim)


@triton.jit
def load_rows(
    x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd,
    HIDDEN: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """float32 [rows, cols] of one head, zeros outside and where a row is hidden; WHOLE: there is nothing outside, and no row is hidden."""
    base = x_ptr + b.to(tl.int64) * sxb + h.to(tl.int64) * sxh
    pointers = base + (rows_at.to(tl.int64)[:, None] * sxr + cols[None, :] * sxd)
    if WHOLE:
        return tl.load(pointers).to(tl.float32)
    live = rows_at < rows
    if HIDDEN:
        hidden = tl.load(hidden_ptr + b.to(tl.int64) * rows + rows_at, mask=live, other=1)
        live = live & (hidden == 0)
    return tl.load(pointers, mask=live[:, None] & (cols < dim)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _amax_kernel(
    x_ptr, hidden_ptr, amax_ptr, sxb, sxr, sxh, sxd, rows, heads, dim, tiles,
    HIDDEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of each head as int32 bits (NaN above inf above every number): an order-free, so repeatable, maximum."""
    pid = tl.program_id(0)
    tile, bh = pid % tiles, pid // tiles
    b, h = bh // heads, bh % heads
    rows_at, cols = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    x = load_rows(x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN)
    tl.atomic_max(amax_ptr + bh, tl.max(bits_of(x) & 0x7FFFFFFF), sem="relaxed")


def head_amax(x: Tensor, hidden: Tensor | None) -> Tensor:
    """int32 [B, heads]: bits of the largest magnitude of each head of x [B, rows, heads, dim]."""
    batch, rows, heads, dim = x.shape
    amax = torch.zeros((batch, heads), dtype=torch.int32, device=x.device)
    tiles = -(-rows // TILE)
    _amax_kernel[(tiles * batch * heads,)](
        x, hidden, amax, *x.stride(), rows, heads, dim, tiles,
        HIDDEN=hidden is not None, BLOCK_R=TILE, BLOCK_D=padded_dim(dim), num_warps=8,
    )  # fmt: skip
    return amax


@triton.jit
def _note_maximum(
    x_ptr, hidden_ptr, maxima_at, bh, rows_at, cols, rows, heads, dim, sxb, sxr, sxh, sxd,
    HIDDEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of the tile at `rows_at` as int32 bits under a sign bit that says it is there."""
    # As many as a thread loads at once.
    WIDE: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    b, h = bh // heads, bh % heads
    x = load_rows(
        x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN, WHOLE
    )
    magnitude = bits_of(x) & 0x7FFFFFFF
    few = tl.reshape(magnitude, [rows_at.shape[0], cols.shape[0] // WIDE, WIDE])
    tl.store(maxima_at, tl.max(tl.max(few, axis=2)) | -2147483648)


@triton.jit
def _noted_maxima(maxima_at, first, tiles):
    """What `_note_maximum` has stored by now for 256 of a head's tiles: negative where it has, zeros of a head without them included."""
    at = first + tl.arange(0, 256)
    return tl.load(maxima_at + at, mask=at < tiles, other=-2147483648, volatile=True)


@triton.jit
def look_ahead(
    x_ptr, hidden_ptr, maxima_ptr, pid, tiles, bh, next_bh, total, rows_at, cols, rows, heads, dim, sxb, sxr, sxh, sxd,
    HIDDEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A first look at the maxima of head `bh`; then that of this program's rows of head `next_bh`, if there is one, is noted."""
    noted = _noted_maxima(maxima_ptr + bh * tiles, 0, tiles)
    if next_bh < total:
        _note_maximum(
            x_ptr, hidden_ptr, maxima_ptr + pid, next_bh, rows_at, cols, rows, heads, dim, sxb, sxr, sxh, sxd,
            HIDDEN, WHOLE,
        )  # fmt: skip
    return noted


@triton.jit
def wait_for_maximum(noted, maxima_at, tiles):
    """int32 bits of the largest magnitude of a head's tiles, once every one of them has been noted; `noted` is a first look at them.

    A word says by itself that it is there, so nothing has to be ordered. Those who note it have lower numbers than those who wait, and
    programs start in the order of their numbers.
    """
    while tl.max(noted, axis=0) >= 0:
        noted = _noted_maxima(maxima_at, 0, tiles)
    largest = tl.max(noted & 0x7FFFFFFF, axis=0)
    for first in range(256, tiles, 256):
        noted = _noted_maxima(maxima_at, first, tiles)
        while tl.max(noted, axis=0) >= 0:
            noted = _noted_maxima(maxima_at, first, tiles)
        largest = tl.maximum(largest, tl.max(noted & 0x7FFFFFFF, axis=0))
    return largest


def maxima_ahead(x: Tensor, block_rows: int) -> tuple[int, int, tuple[int]]:
    """Heads in all, how many of them the maxima run ahead of what is published, and programs for both, head by head."""
    batch, rows, heads, dim = x.shape
    total = batch * heads
    ahead = max(1, min(total, AHEAD_BYTES // (rows * dim * x.element_size())))
    return total, ahead, (padded_rows(rows) // block_rows * (total + ahead),)


def cleared(flags: tuple[int, int], *tensors: Tensor) -> list[Tensor]:
    """int32 zeros in one fill: a matrix of flags, and for each tensor [B, rows, heads, dim] what its publisher notes maxima in."""
    # Publishers' tiles have at least 16 rows.
    tiles = [padded_rows(x.shape[1]) // 16 * x.shape[0] * x.shape[2] for x in tensors]
    # Each part begins where a compiler of kernels takes it for aligned.
    sizes = [-(-n // 4) * 4 for n in (flags[0] * flags[1], *tiles)]
    words = torch.zeros(sum(sizes), dtype=torch.int32, device=tensors[0].device)
    first, *rest = words.split(sizes)
    return [first[: flags[0] * flags[1]].view(flags), *rest]
