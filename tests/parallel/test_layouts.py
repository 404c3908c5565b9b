"""Zigzag layouts, dense and packed, written out by hand."""

import pytest
import torch

from fp4mega.attention.problem import Placement
from fp4mega.parallel.packed import PackedZigzag
from fp4mega.parallel.zigzag import Zigzag, to_ranks, to_sequence

CPU = torch.device("cpu")


def test_zigzag_and_back():
    x = torch.arange(24).view(1, 24, 1)
    parts = to_ranks(x, 3)
    assert parts[:, 0, :, 0].tolist() == [
        [0, 1, 2, 3, 20, 21, 22, 23],
        [4, 5, 6, 7, 16, 17, 18, 19],
        [8, 9, 10, 11, 12, 13, 14, 15],
    ]
    assert torch.equal(to_sequence(parts), x)
    layout = Zigzag(ranks=3, batch=1, rows=8)
    for rank in range(3):
        positions = layout.placement(rank).positions(CPU)
        assert positions.tolist() == [parts[rank, 0, :, 0].tolist()]
        for key, position in enumerate(layout.whole().positions(CPU)[0].tolist()):
            expected = (positions < position).sum()
            assert layout.placement(rank).first_behind(layout.whole(), key) == expected


def test_rows_of_shorter_sequences_are_nowhere():
    placement = Placement(lengths=(3, 0, 1), chunks=(1, 2))
    positions = placement.positions(CPU)
    assert positions[0].tolist() == [3, 4, 5, 6, 7, 8]
    assert positions[2, :2].tolist() == [1, 2]
    nowhere = torch.cat([positions[1], positions[2, 2:]])
    assert (nowhere > 1 << 32).all()
    whole = Placement(lengths=(3, 0, 1), chunks=(0, 1, 2, 3))
    # Key 1 is the second of sequence 0 and, in sequence 2, the whole of chunk 1, where the first row lies.
    assert placement.first_behind(whole, 1) == 0
    # Key 4: two rows of sequence 0 lie behind it, and no sequence but that one is as long.
    assert placement.first_behind(whole, 4) == 1
    assert placement.first_behind(whole, 9) == 6


def packed(rank, *, starts=(0, 8, 8, 12, 24), lengths=(5, 0, 4, 11), ranks=2):
    """Three sequences, 5 tokens in 8 places, 4 in 4, 11 in 12, and one without a place, which no batch has."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    places = torch.tensor(starts, dtype=torch.int32)
    return PackedZigzag.of(ends, places, ranks=ranks, rank=rank, tokens=starts[-1] // ranks)


# Token i of the 24 places, by rank: chunks 0 and 3 of every sequence on rank 0, 1 and 2 on rank 1.
PLACES = ([0, 1, 6, 7, 8, 11, 12, 13, 14, 21, 22, 23], [2, 3, 4, 5, 9, 10, 15, 16, 17, 18, 19, 20])
COUNT = [*range(5), *range(8, 12), *range(12, 23)]


def test_packed_rows_become_a_dense_batch_and_return():
    for rank in (0, 1):
        layout = packed(rank)
        x = torch.tensor(PLACES[rank])[None, :, None] + 100
        dense = layout.enter(x, fill=-1)[..., 0]
        assert dense.shape == (3, 6)
        positions = layout.placement(rank).positions(CPU)
        for i, start in enumerate((0, 8, 12)):
            length = layout.tokens[i]
            for value, position in zip(dense[i].tolist(), positions[i].tolist(), strict=True):
                assert value == (100 + start + position if position < length else -1)
        back = layout.leave(layout.enter(x), fill=-1)[0, :, 0]
        assert back.tolist() == [100 + p if p in COUNT else -1 for p in PLACES[rank]]


def test_packed_ranks_become_whole_sequences_and_return():
    layout = packed(0)
    parts = torch.tensor(PLACES)[:, None, :, None]
    whole = layout.assemble(parts)
    assert whole[0, :, 0].tolist() == COUNT
    assert layout.cu_seqlens.tolist() == [0, 5, 9, 20]
    expected = torch.tensor([[p if p in COUNT else -1 for p in places] for places in PLACES])
    assert torch.equal(layout.distribute(whole, fill=-1)[:, 0, :, 0], expected)
    dense = layout.enter_whole(whole)[..., 0]
    assert dense.shape == (3, 12)
    assert dense[0].tolist() == [0, 1, 2, 3, 4, *[0] * 7]
    assert dense[2].tolist() == [*range(12, 23), 0]
    assert torch.equal(layout.leave_whole(dense[..., None]), whole)


@pytest.mark.parametrize("shared", [1, 2])
def test_only_rows_that_a_rank_holds_travel(shared):
    """A place for two rows: a byte of two codes, or a scale."""
    layout = packed(1, starts=(0, 16, 16, 24, 48), lengths=(9, 0, 8, 22))
    dense = torch.arange(3 * 12 // shared).view(3, 12 // shared, 1) + 1
    squeezed = layout.squeeze(dense)
    assert squeezed.shape == (1, 24 // shared, 1)
    back = layout.spread(squeezed, tuple(dense.shape))
    held = torch.tensor([8, 4, 12])[:, None] // shared > torch.arange(12 // shared)
    assert torch.equal(back[..., 0], dense[..., 0] * held)
    one = torch.ones(3, 1, 2)
    assert layout.squeeze(one) is layout.spread(one, (3, 1, 2)) is one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": (0, 8, 8, 14, 24)}, "sequence 2 has 6 rows; .*padded to a multiple of 4"),
        ({"lengths": (5, 0, 5, 11)}, "sequence 2 has 5 rows, but 4 with its padding"),
        ({"lengths": (5, 0, 4)}, "cu_seqlens_padded holds 5 bounds: expected .* cu_seqlens, 4"),
        (
            {"starts": (0, 8, 4, 12, 24), "lengths": (5, 0, 4, 1)},
            "sequence 1 has 0 rows, but -4 with its padding",
        ),
        ({"lengths": (5, -1, 4, 1)}, r"cu_seqlens=\[0, 5, 4, 8, 9\]: expected to start at 0"),
        ({"lengths": (0, 0, 0, 0)}, "to end above 0"),
    ],
)
def test_lengths_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        packed(0, **changes)


def test_cumulative_lengths_of_another_kind():
    ends = torch.tensor([0, 8], dtype=torch.int32)
    for bounds in ((ends.long(), None), (ends, ends.float()), (ends[None], None), (ends[:1], None)):
        with pytest.raises(ValueError, match=r"cu_seqlens\w*: torch.* expected torch.int32"):
            PackedZigzag.of(*bounds, ranks=2, rank=0, tokens=4)


def test_tokens_that_no_sequence_has():
    ends = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens=\[0, 8\]: .*the 12 tokens that 2 ranks of 6"):
        PackedZigzag.of(ends, None, ranks=2, rank=0, tokens=6)
