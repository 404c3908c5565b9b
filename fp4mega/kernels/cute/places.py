"""Inside a kernel: the CTA's work items by the schedule, and which keys the rows of one see."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from fp4mega.kernels.cute import instructions as op
from fp4mega.kernels.cute import schedule
from fp4mega.kernels.cute.config import TILE_M, ForwardConfig

_NUMBERS = schedule.Arithmetic(
    cutlass.min, cutlass.max, lambda condition, yes, no: op.select(condition, yes, Int32(no))
)


class Shape(NamedTuple):
    """Extents of one launch."""

    batch: Int32
    rows: Int32
    keys: Int32
    heads: Int32
    kv_heads: Int32


class Limits(NamedTuple):
    """Visible keys of row i: j <= i + diagonal + right, j >= i + diagonal - left, j < keys; no row at or past `rows`."""

    rows: Int32
    keys: Int32
    diagonal: Int32
    left: Int32
    right: Int32


class Work(NamedTuple):
    """What decides on the work items, besides how the kernel is compiled."""

    shape: Shape
    lengths_q: cute.Pointer
    lengths_k: cute.Pointer
    order: cute.Pointer
    bottom_right: Int32
    left: Int32
    right: Int32


class Place(NamedTuple):
    """A work item."""

    tile: Int32
    """Pair of query tiles."""
    head: Int32
    group: Int32
    entry: Int32
    first: Int32
    """First key tile."""
    count: Int32
    """Number of key tiles, at least one."""


def items(shape: Shape) -> Int32:
    """How many work items a launch has."""
    return schedule.row_blocks(shape.rows) * shape.heads * shape.batch


def turns(shape: Shape) -> Int32:
    """How many work items this CTA has."""
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return schedule.turns(items(shape), ctas, cta)


def place(config: ForwardConfig, turn: Int32, work: Work) -> tuple[Place, Limits]:
    """This CTA's work item number `turn`."""
    shape = work.shape
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    rank = schedule.rank_at(turn, ctas, cta)
    position, head = rank // shape.heads, rank % shape.heads
    group = head // (shape.heads // shape.kv_heads)
    band = schedule.Band(work.left if config.left else None, work.right if config.right else None)
    if cutlass.const_expr(config.lengths):
        position = op.vector(work.order)[position]
    tile, entry = position // shape.batch, position % shape.batch
    rows, keys = shape.rows, shape.keys
    if cutlass.const_expr(config.lengths):
        rows, keys = op.vector(work.lengths_q)[entry], op.vector(work.lengths_k)[entry]
    else:
        tile = schedule.block_at(tile, schedule.row_blocks(shape.rows), band)
    diagonal = (keys - rows) * work.bottom_right
    first, count = schedule.key_tiles(tile, rows, keys, diagonal, band, _NUMBERS)
    limits = Limits(rows, keys, diagonal, work.left, work.right)
    return Place(tile, head, group, entry, Int32(first), count), limits


def visible(config: ForwardConfig, row: Int32, limits: Limits) -> tuple[Int32, Int32]:
    """First visible key of a row and the one after its last."""
    low, high = Int32(0), limits.keys
    if cutlass.const_expr(config.right):
        high = cutlass.min(high, row + limits.diagonal + limits.right + 1)
    if cutlass.const_expr(config.left):
        low = cutlass.max(row + limits.diagonal - limits.left, 0)
    if cutlass.const_expr(config.lengths):
        high = op.select(row < limits.rows, high, Int32(0))
    return low, high


def all_visible(config: ForwardConfig, row: Int32, limits: Limits) -> tuple[Int32, Int32]:
    """Keys below the first and from the second on are visible to every row of the tile that starts at `row`."""
    last = row + TILE_M - 1
    after, below = limits.keys, Int32(0)
    if cutlass.const_expr(config.right):
        after = cutlass.min(after, row + limits.diagonal + limits.right + 1)
    if cutlass.const_expr(config.left):
        below = cutlass.max(last + limits.diagonal - limits.left, 0)
    if cutlass.const_expr(config.lengths):
        after = op.select(last < limits.rows, after, Int32(0))
    return after, below
