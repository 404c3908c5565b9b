"""The workspace of the 8-bit backward: where tiles lie, how a call is cut into pieces, and that the cut changes nothing."""

import pytest
import torch
import triton
import triton.language as tl

from fp4mega.attention import AttentionPolicy, get_policy
from fp4mega.bench.gate import evaluate
from fp4mega.kernels.triton.forward import Shape
from fp4mega.kernels.triton.gradient_tiles import SLOT_KEYS, Piece, is_folded, pieces, slot_line
from fp4mega.testing import Case, assert_bitwise
from tests.kernels.triton.harness import BACKEND, policies
from tests.kernels.triton.interpreted.harness import check


@triton.jit
def _lines_kernel(out_ptr, tiles, width, FOLDED: tl.constexpr):  # type: ignore[no-untyped-def]
    pid = tl.program_id(0)
    origin, step = slot_line(pid // tiles, pid % tiles, tiles, width, FOLDED)
    tl.store(out_ptr + pid * 2, origin)
    tl.store(out_ptr + pid * 2 + 1, step)


def shape(rows: int, keys: int, **changes) -> Shape:
    plain = Shape(2, rows, keys, 6, 2, 64, 64, None, None, False, None, None, None)
    return plain._replace(**changes)


def seen(s: Shape, row: int, rows: int) -> range:
    """Key tiles that any of these rows sees, by the mask's definition."""
    diagonal = s.keys - s.rows if s.bottom_right else 0
    last = s.keys - 1 if s.right is None else min(row + rows - 1 + diagonal + s.right, s.keys - 1)
    first = 0 if s.left is None else max(row + diagonal - s.left, 0)
    return range(first // SLOT_KEYS, last // SLOT_KEYS + 1) if last >= 0 else range(0)


SHAPES = {
    "causal": shape(1000, 1000, right=0),
    "bottom_right": shape(700, 1500, right=0, bottom_right=True),
    "more_rows": shape(1500, 300, right=0, bottom_right=True),
    "full": shape(500, 900),
    "window": shape(2000, 2000, left=300, right=0),
    "both": shape(1000, 1100, left=10, right=200),
    "left": shape(900, 900, left=130),
    "right": shape(900, 900, right=200),
    "one_row": shape(1, 300),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("limit", [1 << 40, 20 << 20, 2 << 20])
def test_every_tile_has_a_slot_of_its_own_within_the_limit(
    name: str, rows: int, limit: int
) -> None:
    s = SHAPES[name]
    per_group, todo = s.heads // s.kv_heads, -(-s.rows // rows)
    slot_bytes, covered = 2 * SLOT_KEYS * rows, []
    plan = pieces(s, rows, limit, 2)
    least = 2 * per_group * -(-s.keys // SLOT_KEYS) * slot_bytes
    for piece in plan:
        size = piece.heads * per_group * piece.lines * piece.width
        assert size * slot_bytes <= max(limit, least)
        out = torch.empty((piece.heads * per_group * piece.tiles, 2), dtype=torch.int32)
        _lines_kernel[(len(out),)](out, piece.tiles, piece.width, FOLDED=is_folded(s))
        used: set[int] = set()
        for pid, (origin, step) in enumerate(out.tolist()):
            head, tile = divmod(pid, piece.tiles)
            row = (piece.first_tile + tile) * rows
            keys = seen(s, row, rows)
            slots = {origin + step * (key - (keys[0] if s.left is not None else 0)) for key in keys}
            assert len(slots) == len(keys)
            assert not slots & used
            assert all(0 <= slot < size for slot in slots)
            used |= slots
            covered.append((piece.first_head * per_group + head, piece.first_tile + tile))
    assert sorted(covered) == [(h, t) for h in range(2 * s.heads) for t in range(todo)]


def test_a_causal_workspace_is_half_of_a_full_one() -> None:
    full, causal = (
        pieces(shape(4096, 4096, right=right), 128, 1 << 40, 1)[0] for right in (None, 0)
    )
    assert full == Piece(0, 4, 0, 32, 32, 32)
    assert causal == Piece(0, 4, 0, 32, 33, 16)


def test_a_long_sequence_goes_through_bounded_memory() -> None:
    """One head of 131072 rows, whose codes are 16 GiB at once."""
    s = Shape(1, 131072, 131072, 1, 1, 128, 128, None, 0, False, None, None, None)
    plan = pieces(s, 128, 5 << 28, 132)
    assert len(plan) == 8
    assert max(piece.lines * piece.width for piece in plan) * 2 * SLOT_KEYS * 128 <= 132 << 25


ONE = Case(
    batch=1, seqlen_q=300, seqlen_k=300, num_heads=2, num_kv_heads=2, head_dim=32, causal="top_left", dtype=torch.bfloat16,
)  # fmt: skip


def _cut(monkeypatch: pytest.MonkeyPatch, limit: int) -> list[tuple[Piece, ...]]:
    """Cut the next calls into pieces of so many bytes; the plans that they make."""
    from fp4mega.kernels.triton import backward

    plans: list[tuple[Piece, ...]] = []

    def planned(s: Shape, rows: int, _limit: int, _least: int) -> tuple[Piece, ...]:
        plans.append(pieces(s, rows, limit, 1))
        return plans[-1]

    monkeypatch.setattr(backward, "pieces", planned)
    return plans


CUTS = [
    ("nvfp4_qk_fp8_pv", {"causal": "none"}),
    ("nvfp4_qk_fp8_pv", {"causal": "none", "window": (100, 20)}),
    ("mxfp4_qk_fp8_pv", {}),
]


@pytest.mark.parametrize(("name", "changes"), CUTS, ids=str)
@pytest.mark.parametrize(("limit", "count"), [(7 << 15, 2), (1, 4)])
def test_pieces_give_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, changes: dict, limit: int, count: int
) -> None:
    """One query head a kv head: sums over rows are in the same order however they are cut."""
    case, policy = ONE.replace(**changes), get_policy(name)
    x = case.make()
    whole, _ = evaluate(BACKEND, x, case, policy)
    plans = _cut(monkeypatch, limit)
    cut, _ = evaluate(BACKEND, x, case, policy)
    assert len(plans[0]) >= count
    assert {bool(piece.first_tile) for piece in plans[0]} >= {limit == 1}
    for field, a, b in zip(whole._fields, whole, cut, strict=True):
        if a is not None and b is not None:
            assert_bitwise(a, b, name=field)


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv-paper", "nvfp4_qk_mxfp4_pv")
def test_pieces_of_grouped_heads(monkeypatch: pytest.MonkeyPatch, policy: AttentionPolicy) -> None:
    plans = _cut(monkeypatch, 1)
    check(
        ONE.replace(num_kv_heads=1, causal="bottom_right", seqlen_k=322, dtype=torch.float32),
        policy,
    )
    assert any(piece.first_tile for piece in plans[0])


@policies("nvfp4_qk_fp8_pv")
def test_pieces_of_packed_sequences(
    monkeypatch: pytest.MonkeyPatch, policy: AttentionPolicy
) -> None:
    plans = _cut(monkeypatch, 1)
    lengths = (0, 290, 7, 3)
    packed = {"lengths_q": lengths, "lengths_k": lengths, "seqlen_q": 300, "seqlen_k": 300}
    for causal in ("top_left", "bottom_right"):
        check(ONE.replace(num_heads=1, num_kv_heads=1, causal=causal, **packed), policy)
    assert all(any(piece.first_tile for piece in plan) for plan in plans)
