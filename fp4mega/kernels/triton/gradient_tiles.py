"""Tiles of P and dS in 8 bit on their way from the kernel that computes them to the one that multiplies them: where each lies, how many fit.

A slot holds the codes of BLOCK_M rows and 128 keys in blocks of 8 keys by 16 rows (`store_transposed`), rows in the order of `in_operand_order`;
the inverses of their powers of two, one for every BLOCK_N keys, lie beside them. Slots of a row tile follow one another in a line, as many as
any row tile has visible key tiles. Under a causal mask a long row tile and a short one share a line, filled from both ends: about half the
memory.

What does not fit into `WORKSPACE_BYTES` is computed in pieces, one after another through the same memory: some kv heads with all their rows,
or some row tiles of one kv head, whose dK and dV are then added up over the pieces in float32.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp4mega.kernels.triton.forward import Shape

SLOT_KEYS = 128
"""Keys of a slot; operands are padded to as many."""

WORKSPACE_BYTES = 5 << 28
"""Memory for codes, 1.25 GiB: half of 128 causal heads at S = 4096 (1.03 GiB), which is thousands of programs, and 1 % of an H200's."""

LEAST_PROGRAMS = 132
"""Row tiles, over its query heads, that a piece of one kv head is cut to a multiple of: the multiprocessors of an H200. At S = 131072 they take 4.1 GiB."""


class Piece(NamedTuple):
    """Kv heads (counted over the batch) and row tiles that go through the workspace together."""

    first_head: int
    heads: int
    first_tile: int
    tiles: int
    width: int
    """Slots of a line."""
    lines: int
    """Lines of a query head."""


class Workspace(NamedTuple):
    """Codes, uint8 [slots * SLOT_KEYS, BLOCK_M], and the inverse powers of two of dS, float32 [slots, units of a slot]."""

    p: Tensor
    ds: Tensor
    inverse_unit: Tensor

    def codes(self, keys: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """P and dS as E4M3, read in tiles of so many keys."""
        p, ds = (codes.view(torch.float8_e4m3fn) for codes in (self.p, self.ds))
        tile = [keys, p.shape[1]]
        return TensorDescriptor.from_tensor(p, tile), TensorDescriptor.from_tensor(ds, tile)


def workspace(
    plan: tuple[Piece, ...], per_group: int, like: Tensor, *, rows: int, unit_keys: int
) -> Workspace:
    """Memory that each of these pieces fits into, in tiles of `rows` rows with a power of two for every `unit_keys` keys."""
    slots = max(piece.heads * piece.lines * piece.width for piece in plan) * per_group
    p, ds = (like.new_empty((slots * SLOT_KEYS, rows), dtype=torch.uint8) for _ in range(2))
    return Workspace(p, ds, like.new_empty((slots, SLOT_KEYS // unit_keys), dtype=torch.float32))


def is_folded(shape: Shape) -> bool:
    """True where two row tiles share a line: causal, no left window, and a diagonal that is known without the lengths."""
    known = not shape.bottom_right or shape.length_q is None
    return shape.right is not None and shape.left is None and known


def pieces(shape: Shape, rows: int, limit: int, least: int) -> tuple[Piece, ...]:
    """The pieces of a call in tiles of `rows` rows, each within `limit` bytes or, where these are more, the bytes of `least` row tiles
    (two a query head at the least)."""
    diagonal = shape.keys - shape.rows if shape.bottom_right else 0
    return _pieces(
        shape.rows, shape.keys, shape.batch * shape.kv_heads, shape.heads // shape.kv_heads,
        shape.left, shape.right, diagonal, is_folded(shape), rows, limit, least,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _pieces(
    rows: int, keys: int, heads: int, per_group: int, left: int | None, right: int | None, diagonal: int, folded: bool, block: int, limit: int, least: int
) -> tuple[Piece, ...]:  # fmt: skip
    key_tiles = -(-keys // SLOT_KEYS)
    row_tiles = -(-rows // block)
    if left is not None and right is not None:
        key_tiles = min(key_tiles, (left + right + block + SLOT_KEYS - 2) // SLOT_KEYS + 1)

    def size(first: int, count: int) -> tuple[int, int]:
        """Width and number of the lines of `count` row tiles from `first` on."""
        if not folded:
            return key_tiles, count
        assert right is not None
        ends = [(first + i + 1) * block + diagonal + right for i in range(count)]
        seen = [min(max(-(-end // SLOT_KEYS), 0), key_tiles) for end in ends]
        both = [a + b for a, b in zip(seen[: count // 2], seen[::-1], strict=False)]
        return max(both + seen[count // 2 : (count + 1) // 2]), (count + 1) // 2

    slot = 2 * SLOT_KEYS * block
    width, lines = size(0, row_tiles)
    fit = limit // max(width * lines * slot * per_group, 1)
    if fit:
        # As few pieces as fit, of one size.
        fit = -(-heads // -(-heads // fit))
        return tuple(
            Piece(first, min(fit, heads - first), 0, row_tiles, width, lines)
            for first in range(0, heads, fit)
        )
    programs = max(limit // (key_tiles * slot), least) // least * least
    # Two share a line.
    fit = max(programs // per_group // 2 * 2, 2)
    fit = -(-row_tiles // -(-row_tiles // fit))
    fit += fit % 2
    return tuple(
        Piece(head, 1, first, count, *size(first, count))
        for head in range(heads)
        for first in range(0, row_tiles, fit)
        for count in (min(fit, row_tiles - first),)
    )


@triton.jit
def slot_line(head, tile, tiles, width, FOLDED: tl.constexpr):
    """Of a row tile of a piece's query head: the slot of key tile 0, and 1 or -1, where that of the next one lies from there."""
    origin = (head * tiles + tile) * width
    step = 1
    if FOLDED:
        line = tl.minimum(tile, tiles - 1 - tile)
        origin = (head * ((tiles + 1) // 2) + line) * width
        mirrored = (tile * 2 < tiles - 1).to(tl.int32)
        origin += mirrored * (width - 1)
        step = 1 - 2 * mirrored
    return origin, step


@triton.jit
def first_slot(row, diagonal, left, HAS_LEFT: tl.constexpr):
    """The key tile at the beginning of the line of the row tile at `row`: the first that `key_range` has for it."""
    first = 0
    if HAS_LEFT:
        first = tl.maximum(row + diagonal - left, 0) // 128
    return first
