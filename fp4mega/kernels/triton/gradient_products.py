"""The kernel of the 8-bit dK and dV: products of the tiles of P and dS that `row_gradients` left in the workspace.

    dV = P^T dO    dK = scale dS^T Q

One program owns some keys of a kv head and walks the row tiles of all its query heads in order, so bits repeat without atomics. Each tile's
product is added in float32, because Hopper's FP8 accumulator keeps about 14 bits and because dS has a power of two a tile.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.factors import Across
from fp4mega.kernels.triton.forward import Shape, described
from fp4mega.kernels.triton.gradient_tiles import (
    SLOT_KEYS,
    Piece,
    Workspace,
    first_slot,
    is_folded,
    slot_line,
)
from fp4mega.kernels.triton.tiles import lengths, load_transposed, longest_first, row_range


@triton.jit(
    do_not_specialize=["first_head", "head_count", "first_tile", "tiles", "width", "key_tiles"]
)
def _products_kernel(
    p_tiles, ds_tiles, inverse_unit_ptr, q_across, do_across, q_power_ptr, do_power_ptr,
    dk_ptr, dv_ptr, dk_sum_ptr, dv_sum_ptr, length_q_ptr, length_k_ptr,
    heads, per_group, rows, keys, dim, dim_v, key_tiles, first_head, head_count, first_tile, tiles, width, left, right, softmax_scale,
    P_EXPONENT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, LENGTHS: tl.constexpr,
    FOLDED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT_KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """FIRST, LAST: of the pieces that add to these keys; between them sums are float32 [heads of the piece, keys, BLOCK_D or BLOCK_DV]."""
    local, key_tile = longest_first(tl.program_id(0), key_tiles, head_count, SPAN)
    key = key_tile * BLOCK_N
    bg = first_head + local
    kv_heads = heads // per_group
    b, g = bg // kv_heads, bg % kv_heads
    length_q, length_k, diagonal = lengths(
        length_q_ptr, length_k_ptr, b, rows, keys, BOTTOM_RIGHT, LENGTHS
    )
    keys_at = key + tl.arange(0, BLOCK_N)
    cols, cols_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    live = (keys_at < keys)[:, None]
    index = ((b.to(tl.int64) * keys + keys_at) * kv_heads + g)[:, None]
    sum_at = (local.to(tl.int64) * keys + keys_at)[:, None]
    if FIRST:
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    else:
        dk = tl.load(dk_sum_ptr + sum_at * BLOCK_D + cols[None, :], mask=live, other=0.0)
        dv = tl.load(dv_sum_ptr + sum_at * BLOCK_DV + cols_v[None, :], mask=live, other=0.0)
    # What lies in the workspace is masked: the first rows that see any of these keys to the last.
    first, _, _, end = row_range(
        key, diagonal, left, right, length_q, length_k, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, True
    )
    first = tl.maximum(first, first_tile * BLOCK_M)
    end = tl.minimum(end, (first_tile + tiles) * BLOCK_M)
    if key >= length_k:
        end = first
    inverse_at = inverse_unit_ptr + (key % 128 + tl.arange(0, BLOCK_N)) // UNIT_KEYS
    for member in range(0, per_group):
        bh = bg * per_group + member
        dv_scale = tl.math.div_rn(2.0**-P_EXPONENT, tl.load(do_power_ptr + bh))
        dk_scale = tl.math.div_rn(1.0, tl.load(q_power_ptr + bh))
        for start in tl.range(first, end, BLOCK_M):
            origin, step = slot_line(
                local * per_group + member, start // BLOCK_M - first_tile, tiles, width, FOLDED
            )
            slot = origin + step * (key // 128 - first_slot(start, diagonal, left, HAS_LEFT))
            at = slot * 128 + key % 128
            p = load_transposed(p_tiles, at, BLOCK_N, BLOCK_M)
            do = do_across.load([bh * BLOCK_DV, start])
            dv += tl.dot(p, tl.trans(do)) * dv_scale
            ds = load_transposed(ds_tiles, at, BLOCK_N, BLOCK_M)
            q = q_across.load([bh * BLOCK_D, start])
            inverse = tl.load(inverse_at + slot * (128 // UNIT_KEYS)) * dk_scale
            dk += tl.dot(ds, tl.trans(q)) * inverse[:, None]
    if LAST:
        at = dk_ptr + index * dim + cols[None, :]
        tl.store(
            at, (dk * softmax_scale).to(dk_ptr.dtype.element_ty), mask=live & (cols < dim)[None, :]
        )
        at = dv_ptr + index * dim_v + cols_v[None, :]
        tl.store(at, dv.to(dv_ptr.dtype.element_ty), mask=live & (cols_v < dim_v)[None, :])
    else:
        tl.store(dk_sum_ptr + sum_at * BLOCK_D + cols[None, :], dk, mask=live)
        tl.store(dv_sum_ptr + sum_at * BLOCK_DV + cols_v[None, :], dv, mask=live)


def products_tile(wide: int, wide_v: int, rows: int) -> dict[str, int]:
    """Keys of a program, warps and stages by head dims and the rows of a slot, measured on an H200 at head dim 128; SPAN kv heads run together."""
    if max(wide, wide_v) > 128:
        return {"BLOCK_N": 64, "num_warps": 8, "num_stages": 2, "SPAN": 8}
    if rows == 64:
        return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 4, "SPAN": 8}
    return {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "SPAN": 8}


def gradient_products(
    tiles: Workspace,
    piece: Piece,
    q_across: Across,
    do_across: Across,
    shape: Shape,
    gradients: tuple[Tensor, Tensor],
    sums: tuple[Tensor | None, Tensor | None],
    *,
    softmax_scale: float,
    p_exponent: int,
    rows: int,
    unit_keys: int,
    first: bool,
    last: bool,
) -> None:
    """Fill dk and dv of the piece's kv heads, or, where it is not the `last` one that adds to them, their float32 `sums`."""
    dk, dv = gradients
    assert q_across.data is not None
    assert do_across.data is not None
    wide, wide_v = q_across.data.shape[2], do_across.data.shape[2]
    config = products_tile(wide, wide_v, rows)
    key_tiles = triton.cdiv(shape.keys, SLOT_KEYS) * (SLOT_KEYS // config["BLOCK_N"])
    _products_kernel[(key_tiles * piece.heads,)](
        *tiles.codes(config["BLOCK_N"]), tiles.inverse_unit,
        described(q_across.data, (wide, rows)), described(do_across.data, (wide_v, rows)),
        q_across.power, do_across.power, dk, dv, *sums, shape.length_q, shape.length_k,
        shape.heads, shape.heads // shape.kv_heads, shape.rows, shape.keys, shape.dim, shape.dim_v,
        key_tiles, piece.first_head, piece.heads, piece.first_tile, piece.tiles, piece.width,
        shape.left or 0, shape.right or 0, softmax_scale,
        P_EXPONENT=p_exponent, HAS_LEFT=shape.left is not None, HAS_RIGHT=shape.right is not None,
        BOTTOM_RIGHT=shape.bottom_right, LENGTHS=shape.length_q is not None, FOLDED=is_folded(shape),
        FIRST=first, LAST=last, BLOCK_M=rows, UNIT_KEYS=unit_keys, BLOCK_D=wide, BLOCK_DV=wide_v, **config,
    )  # fmt: skip
