"""The schedule as the host sees it: every item once, longest first, no key missed, and an end near that of list scheduling."""

import heapq
import itertools
from collections.abc import Sequence

import pytest
import torch

from fp4mega.kernels.cute.config import TILE_N
from fp4mega.kernels.cute.schedule import (
    ROWS,
    Band,
    block_at,
    deal,
    key_tiles,
    packed_order,
    row_blocks,
)

FULL, CAUSAL = Band(None, None), Band(None, 0)


def items(batch: int, heads: int, rows: int, keys: int, band: Band, shift: int = 0) -> list[int]:
    """Key tiles of every item by rank."""
    blocks = row_blocks(rows)
    counts = [
        key_tiles(block_at(p, blocks, band), rows, keys, shift, band)[1] for p in range(blocks)
    ]
    return [count for count in counts for _ in range(batch * heads)]


def list_schedule(jobs: Sequence[int], workers: int) -> int:
    """End of the last job when each goes to the first free worker: what a grid with a CTA an item does."""
    free = [0] * workers
    for job in jobs:
        heapq.heapreplace(free, free[0] + job)
    return max(free)


@pytest.mark.parametrize("ctas", [1, 2, 3, 7, 148, 152])
def test_every_item_is_dealt_once_and_in_order(ctas: int) -> None:
    for count in (*range(ctas, ctas + 12), 2 * ctas, 5 * ctas - 1, 6 * ctas + 1):
        dealt = deal(count, ctas)
        assert sorted(itertools.chain(*dealt)) == list(range(count))
        assert all(ranks == sorted(ranks) and ranks for ranks in dealt)
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_every_other_round_is_dealt_backwards() -> None:
    assert deal(10, 4) == [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]


MASKS = [
    Band(left, right) for left in (None, 0, 70, 200) for right in (None, 0, 30, 300)
]  # fmt: skip


@pytest.mark.parametrize("band", MASKS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (256, 129), (700, 300), (300, 700), (900, 130)])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_no_visible_key_is_missed(band: Band, rows: int, keys: int, bottom_right: bool) -> None:
    """And no tile is walked over where one row of a block sees its first keys, another its last, and none of them nothing."""
    shift = keys - rows if bottom_right else 0
    i, j = torch.arange(rows)[:, None] + shift, torch.arange(keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if band.left is not None:
        seen &= j >= i - band.left
    if band.right is not None:
        seen &= j <= i + band.right
    for block in range(row_blocks(rows)):
        first, count = key_tiles(block, rows, keys, shift, band)
        mine = seen[block * ROWS : (block + 1) * ROWS]
        tiles = (mine.any(dim=0).nonzero()[:, 0] // TILE_N).unique().tolist()
        assert count >= 1
        assert set(tiles) <= set(range(first, first + count))
        if mine.any(dim=1).all():
            assert tiles == list(range(first, first + count))


@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(None, 40), Band(100, None)], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(4096, 4096), (3000, 1000), (1000, 3000), (700, 0)])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_longest_come_first(band: Band, rows: int, keys: int, bottom_right: bool) -> None:
    counts = items(2, 3, rows, keys, band, (keys - rows) * bottom_right)
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("band", MASKS, ids=str)
@pytest.mark.parametrize("bottom_right", [False, True])
def test_packed_entries_are_ordered_by_their_own_lengths(band: Band, bottom_right: bool) -> None:
    lengths_q, lengths_k = [0, 700, 1, 300, 256, 513, 0], [900, 650, 1, 300, 0, 2000, 0]
    order = packed_order(
        torch.tensor(lengths_q), torch.tensor(lengths_k), 700, band, bottom_right=bottom_right
    )
    assert order.dtype == torch.int32
    assert order.sort().values.tolist() == list(range(3 * 7))
    counts = []
    for place in order.tolist():
        block, entry = divmod(place, 7)
        rows, keys = lengths_q[entry], lengths_k[entry]
        counts.append(key_tiles(block, rows, keys, (keys - rows) * bottom_right, band)[1])
        if block * ROWS >= rows:
            assert counts[-1] == 1
    assert counts == sorted(counts, reverse=True)


SHAPES = [(1, 32, 4096), (2, 32, 4096), (1, 32, 2048), (1, 32, 16384), (1, 8, 32768), (3, 20, 3000)]


@pytest.mark.parametrize("ctas", [132, 148, 152])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_ends_when_list_scheduling_does(shape: tuple[int, int, int], ctas: int) -> None:
    """Within 8% of it, never past the general bound of a mean and one item; without reversed rounds it would be up to half as much again."""
    batch, heads, length = shape
    counts = items(batch, heads, length, length, CAUSAL)
    loads = [sum(counts[rank] for rank in ranks) for ranks in deal(len(counts), ctas)]
    assert max(loads) <= sum(counts) / ctas + counts[0]
    assert max(loads) <= 1.08 * list_schedule(counts, ctas)
    assert max(loads) - min(loads) <= counts[0]


@pytest.mark.parametrize("ctas", [148, 152])
def test_equal_items_take_whole_rounds(ctas: int) -> None:
    counts = items(1, 24, 4096, 4096, FULL)
    loads = [sum(counts[rank] for rank in ranks) for ranks in deal(len(counts), ctas)]
    assert max(loads) == -(-len(counts) // ctas) * 32 == list_schedule(counts, ctas)
