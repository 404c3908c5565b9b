"""Which rows a CTA works on, in which order. The host and the kernels run the same code. Needs no CUTLASS.

A work item is 256 query rows of one head of one batch entry, against all key tiles that any of them sees. Items are ranked longest
first: row blocks slowest, then batch entries, query heads fastest, so that CTAs that run together read K and V of the same kv heads.
A grid of `ctas` takes them in rounds of one each, and every other round in opposite order:

    rank      0  1  2  3 | 4  5  6  7 | 8  9 ...
    CTA       0  1  2  3 | 3  2  1  0 | 0  1 ...

Who had the longest of a round gets the shortest of the next. Dealt in the same order every time, CTA 0 would have the longest of each.

Numbers are Python's, the DSL's or tensors, whose minimum, maximum and choice are spelled differently: `Arithmetic`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4mega.kernels.cute.config import QUERY_STAGES, TILE_M, TILE_N

ROWS = QUERY_STAGES * TILE_M
"""Query rows of a work item."""


class Arithmetic(NamedTuple):
    """Operations of one kind of number."""

    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    """The second may be a Python number."""
    choose: Callable[[Any, Any, Any], Any]
    """(condition, where it holds, elsewhere); the last may be a Python number."""


PYTHON = Arithmetic(min, max, lambda condition, yes, no: yes if condition else no)
TENSORS = Arithmetic(torch.minimum, torch.clamp_min, torch.where)


class Band(NamedTuple):
    """Row i sees keys from i + diagonal - left to i + diagonal + right; None: no limit."""

    left: Any
    right: Any


def row_blocks(rows: Any) -> Any:
    """Work items of one head with that many rows."""
    return (rows + ROWS - 1) // ROWS


def rank_at(turn: Any, ctas: Any, cta: Any) -> Any:
    """Rank of the item that a CTA takes in round `turn`; at or past the number of items there is none."""
    return turn * ctas + cta + turn % 2 * (ctas - 1 - 2 * cta)


def turns(items: Any, ctas: Any, cta: Any) -> Any:
    """Number of items of a CTA, at least one where `ctas` is at most `items`."""
    full = items // ctas
    # One more where its rank in the round that is not full exists.
    return full + (items - rank_at(full, ctas, cta) + ctas - 1) // ctas


def key_tiles(
    block: Any, rows: Any, keys: Any, diagonal: Any, band: Band, op: Arithmetic = PYTHON
) -> tuple[Any, Any]:
    """(first key tile, number of key tiles) of row block `block`, of a batch entry with `rows` rows and `keys` keys.

    At least one tile: rows that see nothing take one step, fully masked.
    """
    row = block * ROWS
    first, last = 0, keys
    if band.right is not None:
        last = op.minimum(last, op.minimum(row + ROWS, rows) + diagonal + band.right)
    if band.left is not None:
        first = op.maximum(row + diagonal - band.left, 0) // TILE_N
    last = op.choose(row < rows, last, 0)
    return first, op.maximum((last + TILE_N - 1) // TILE_N - first, 1)


def block_at(position: Any, blocks: Any, band: Band) -> Any:
    """The row block at a position of the order longest first, where all batch entries have the same length.

    Exact unless a window limits both sides: then only rows at the ends see fewer keys, and any order will do.
    """
    return position if band.right is None else blocks - 1 - position


def packed_order(
    lengths_q: Tensor, lengths_k: Tensor, rows: int, band: Band, *, bottom_right: bool
) -> Tensor:
    """Row block * batch + entry of every pair of the two, longest first, int32; lengths int32 [B], none above `rows`.

    Runs where the lengths are: they are not read back.
    """
    batch = lengths_q.shape[0]
    blocks = torch.arange(row_blocks(rows), dtype=torch.int32, device=lengths_q.device)[:, None]
    diagonal = (lengths_k - lengths_q) * int(bottom_right)
    _, count = key_tiles(blocks, lengths_q, lengths_k, diagonal, band, TENSORS)
    count = count.expand(blocks.shape[0], batch)
    return count.flatten().argsort(descending=True, stable=True).to(torch.int32)


def deal(items: int, ctas: int) -> list[list[int]]:
    """Ranks of the items of every CTA, in the order in which it works on them."""
    return [
        [rank_at(turn, ctas, cta) for turn in range(turns(items, ctas, cta))] for cta in range(ctas)
    ]
