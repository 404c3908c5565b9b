"""The kernel of dQ, by row tiles from scores computed again; no atomics, so bits repeat.

    P = 2^(z - shift) * inverse    dS = P (dP - r)    dQ = scale dS K

Under the rule `represented` 2^(z - shift) is rounded to the forward's codes first. The forward rounded it relative to the running
reference of its key tile, this kernel relative to the final one; with an integer reference the two differ only where E4M3 is
subnormal. In the 8-bit policies every product is 8 bit except BF16 scores, and every tile's product is added in float32, because Hopper's
FP8 accumulator keeps about 14 bits and because dS has a power of two a tile; the codes of P and dS stay in a workspace for
`gradient_products`. Where the kernel's tile is not the policy's, only the codes of dS that are subnormal differ.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.arithmetic import power_of_two_scale, round_probabilities
from fp4mega.kernels.triton.factors import Factors
from fp4mega.kernels.triton.forward import GATE_NONE, Operand, Shape, described
from fp4mega.kernels.triton.gradient_tiles import (
    Piece,
    Workspace,
    first_slot,
    is_folded,
    slot_line,
)
from fp4mega.kernels.triton.tiles import (
    gated_out,
    in_operand_order,
    key_range,
    lengths,
    load_rows_at,
    load_tile,
    longest_first,
    paired_rows,
    row_pairs,
    score_scale,
    store_transposed,
    visible,
)


@triton.jit
def probabilities(
    z, seen, shift, AXIS: tl.constexpr, MASKED: tl.constexpr, P_FORMAT: tl.constexpr, REPRESENTED: tl.constexpr
):  # fmt: skip
    """Published P of a tile whose keys run along AXIS, times L under the rule `represented`; shift broadcasts along keys; 0 where not `seen`."""
    p = tl.exp2(z - shift)
    if REPRESENTED:
        if MASKED and P_FORMAT == "mxfp4":
            # What is hidden has no part in a block's scale.
            p = tl.where(seen, p, 0.0)
        p = round_probabilities(p, P_FORMAT, AXIS)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def _walk_keys(
    dq, q, do, shift, inverse, r, dp_scale, rows_at, k_base, k_across, v_base, k_line, k_across_line, hidden_at,
    p_ptr, ds_ptr, inverse_unit_ptr, origin, step, first, end, z_scale, diagonal, left, right, length_k,
    keys, stride_k, stride_v, dim, dim_v,
    MASKED: tl.constexpr, FP8: tl.constexpr, P_FORMAT: tl.constexpr, REPRESENTED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    PAD_K: tl.constexpr, PAD_V: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dq + dS K over the keys from `first` to `end`, `dq_scale` left out; in 8 bit the codes of P and dS go to the workspace.

    The slot of the key tile that begins at `start` is origin + step * (start // 128).
    """
    for start in tl.range(first, end, BLOCK_N):
        if FP8:
            k = k_base.load([k_line + start, 0])
        else:
            k = load_tile(k_base, start, stride_k, keys, dim, BLOCK_N, BLOCK_D, PAD_K, PAD_DIM)
        v = load_tile(v_base, start, stride_v, keys, dim_v, BLOCK_N, BLOCK_DV, PAD_V, PAD_DIM_V)
        if FP8:
            across = k_across.load([k_across_line, start])
            slot = origin + step * (start // 128)
            place = slot * 128 + start % 128
            inverse_unit_at = inverse_unit_ptr + slot * (128 // BLOCK_N) + start % 128 // BLOCK_N
        z = tl.dot(q, tl.trans(k)) * z_scale
        seen = True
        if MASKED:
            keys_at = start + tl.arange(0, BLOCK_N)
            seen = visible(
                rows_at[:, None], keys_at[None, :], diagonal, left, right, length_k, hidden_at, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN
            )  # fmt: skip
        p = probabilities(z, seen, shift[:, None], 1, MASKED, P_FORMAT, REPRESENTED)
        # Under the rule `represented` P is L times its worth; `dp_scale` and r are over L.
        ds = p * (tl.dot(do, tl.trans(v)) * dp_scale[:, None] - r[:, None])
        if FP8:
            if REPRESENTED:
                p = p * inverse[:, None]
            words = row_pairs(p.to(tl.float8e4nv), BLOCK_M, BLOCK_N)
            store_transposed(words, p_ptr + place.to(tl.int64) * BLOCK_M, BLOCK_M // 2, BLOCK_N)
            unit = power_of_two_scale(tl.max(tl.max(tl.abs(ds), 1), 0), 8, 7)
            inverse_unit = 1.0 / unit
            tl.store(inverse_unit_at, inverse_unit)
            codes = (ds * unit).to(tl.float8e4nv)
            words = row_pairs(codes, BLOCK_M, BLOCK_N)
            store_transposed(words, ds_ptr + place.to(tl.int64) * BLOCK_M, BLOCK_M // 2, BLOCK_N)
            codes = in_operand_order(codes, BLOCK_M, BLOCK_N)
            dq += tl.dot(codes, tl.trans(across)) * inverse_unit
        else:
            dq = tl.dot(ds.to(tl.bfloat16), k, dq)
    return dq


@triton.jit(do_not_specialize=["first_head", "head_count", "first_tile", "tiles", "width"])
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, k_across_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr, k_power_ptr,
    p_ptr, ds_ptr, inverse_unit_ptr, shift_ptr, inverse_ptr, r_ptr, dq_ptr, hidden_ptr, length_q_ptr, length_k_ptr, inexact_ptr,
    sqb, sqh, sqr, skb, skh, skr, svb, svh, svr, sob, soh, sor,
    heads, per_group, rows, rows_padded, keys, keys_padded, dim, dim_v, first_head, head_count, first_tile, tiles, width, left, right,
    softmax_scale, softmax_scale_log2,
    SCALED_QK: tl.constexpr, FP8: tl.constexpr, P_FORMAT: tl.constexpr, REPRESENTED: tl.constexpr, P_EXPONENT: tl.constexpr, GATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr, LENGTHS: tl.constexpr, FOLDED: tl.constexpr,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, PAD_DIM_DO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of the row tiles of a piece (`gradient_tiles`); first_head and head_count in kv heads."""
    local, place = longest_first(tl.program_id(0), tiles, head_count * per_group, SPAN)
    tile = tiles - 1 - place
    bh = first_head * per_group + local
    row = (first_tile + tile) * BLOCK_M
    b, h = bh // heads, bh % heads
    g = h // per_group
    bg = b * (heads // per_group) + g
    if gated_out(inexact_ptr, bg, GATE):
        return
    length_q, length_k, diagonal = lengths(
        length_q_ptr, length_k_ptr, b, rows, keys, BOTTOM_RIGHT, LENGTHS
    )
    z_scale = score_scale(softmax_scale_log2, q_scale_ptr, k_scale_ptr, bh, bg, SCALED_QK)
    q_base = q_ptr + b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
    do_base = do_ptr + b.to(tl.int64) * sob + h.to(tl.int64) * soh
    k_base = k_ptr
    if not FP8:
        k_base = k_ptr + b.to(tl.int64) * skb + g.to(tl.int64) * skh
    v_base = v_ptr + b.to(tl.int64) * svb + g.to(tl.int64) * svh
    dp_scale = 1.0
    dq_scale = softmax_scale
    if FP8:
        dp_scale = tl.math.div_rn(
            tl.math.div_rn(2.0**-P_EXPONENT, tl.load(do_scale_ptr + bh)),
            tl.load(v_scale_ptr + bg),
        )
        dq_scale = tl.math.div_rn(dq_scale, tl.load(k_power_ptr + bg))
    hidden_at = hidden_ptr
    if HAS_HIDDEN:
        hidden_at = hidden_ptr + b.to(tl.int64) * keys
    origin = 0
    step = 0
    if FP8:
        origin, step = slot_line(local, tile, tiles, width, FOLDED)
        origin -= step * first_slot(row, diagonal, left, HAS_LEFT)
    line = bh.to(tl.int64) * rows_padded
    rows_at = row + tl.arange(0, BLOCK_M)
    if FP8:
        rows_at = row + paired_rows(tl.arange(0, BLOCK_M))
    q = load_rows_at(q_base, rows_at, sqr, rows, dim, BLOCK_D, PAD_QK, PAD_DIM)
    do = load_rows_at(do_base, rows_at, sor, rows, dim_v, BLOCK_DV, PAD_QK, PAD_DIM_DO)
    shift, r = tl.load(shift_ptr + line + rows_at), tl.load(r_ptr + line + rows_at)
    dp_scale = tl.zeros([BLOCK_M], tl.float32) + dp_scale
    inverse = 1.0
    if REPRESENTED:
        # P lacks 1/L until its codes are stored.
        inverse = tl.load(inverse_ptr + line + rows_at)
        dp_scale = dp_scale * inverse
        r = r * inverse
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    SLOT_N: tl.constexpr = 128 if FP8 else BLOCK_N
    first, free, bound, end = key_range(
        row,
        diagonal,
        left,
        right,
        length_k,
        BLOCK_M,
        SLOT_N,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_HIDDEN,
    )
    if BLOCK_N < SLOT_N:
        # Whole slots: what no row sees is written as zeros.
        end, free = tl.cdiv(end, SLOT_N) * SLOT_N, tl.cdiv(free, SLOT_N) * SLOT_N
        bound = tl.maximum(bound, free)
    if HAS_LEFT:
        dq = _walk_keys(
            dq, q, do, shift, inverse, r, dp_scale, rows_at, k_base, k_across_ptr, v_base, bg * keys_padded, bg * BLOCK_D, hidden_at,
            p_ptr, ds_ptr, inverse_unit_ptr, origin, step, first, free, z_scale, diagonal, left, right, length_k,
            keys, skr, svr, dim, dim_v, True, FP8, P_FORMAT, REPRESENTED,
            HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_V, PAD_DIM, PAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    if not HAS_HIDDEN:
        dq = _walk_keys(
            dq, q, do, shift, inverse, r, dp_scale, rows_at, k_base, k_across_ptr, v_base, bg * keys_padded, bg * BLOCK_D, hidden_at,
            p_ptr, ds_ptr, inverse_unit_ptr, origin, step, free, bound, z_scale, diagonal, left, right, length_k,
            keys, skr, svr, dim, dim_v, False, FP8, P_FORMAT, REPRESENTED,
            HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, False, False, PAD_DIM, PAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, shift, inverse, r, dp_scale, rows_at, k_base, k_across_ptr, v_base, bg * keys_padded, bg * BLOCK_D, hidden_at,
        p_ptr, ds_ptr, inverse_unit_ptr, origin, step, bound, end, z_scale, diagonal, left, right, length_k,
        keys, skr, svr, dim, dim_v, True, FP8, P_FORMAT, REPRESENTED,
        HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_V, PAD_DIM, PAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    at = dq_ptr + (b.to(tl.int64) * rows * heads + h) * dim
    dq *= dq_scale
    stride, cols = heads * dim, tl.arange(0, BLOCK_D)
    tl.store(
        at + rows_at.to(tl.int64)[:, None] * stride + cols[None, :],
        dq.to(dq_ptr.dtype.element_ty),
        mask=(rows_at < rows)[:, None] & (cols < dim)[None, :],
    )


SPAN = 8
"""Query heads whose programs run together, longest first."""


def row_tile(
    wide: int, wide_v: int, fp8: bool, fp8_scores: bool, four_bit_v: bool
) -> dict[str, int]:
    """Tile, warps, stages and registers by head dims and operands, measured on an H200 at head dim 128.

    A call has one tile for all its score products, because that is also the tile of the workspace's slots.
    """
    if max(wide, wide_v) > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 1}
    if fp8 and not fp8_scores and not four_bit_v:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
    tile = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    if fp8 and not four_bit_v:
        # Three programs on a multiprocessor, for a few spilled registers.
        tile["maxnreg"] = 168
    return tile


def row_gradients(
    q: Operand,
    k: Operand,
    factors: Factors,
    shape: Shape,
    dq: Tensor,
    config: dict[str, int],
    piece: Piece,
    tiles: Workspace | None,
    *,
    softmax_scale: float,
    wide: int,
    wide_v: int,
    represented: bool,
    p_format: str,
    p_exponent: int,
    gate: int = GATE_NONE,
    inexact: Tensor | None = None,
) -> None:
    """Fill dq (contiguous, [B, S, H, dim]) and, in 8 bit, the workspace, of the piece's heads that `gate` selects.

    Gradient products are 8 bit where `factors` has transposed operands, BF16 otherwise; dP is the product of whatever dO and V are.
    """
    v, do, k_across, terms = factors.v, factors.do, factors.k_across, factors.terms
    per_group = shape.heads // shape.kv_heads
    by_keys, keys_padded = (k.data, k_across.data), 0
    stored: tuple[object, ...] = (None, None, None)
    if factors.fp8:
        assert k_across.data is not None
        assert tiles is not None
        long, keys_padded = config["BLOCK_N"], k_across.data.shape[-1]
        by_keys = (described(k.data, (long, wide)), described(k_across.data, (wide, long)))
        stored = (tiles.p, tiles.ds, tiles.inverse_unit)
    _dq_kernel[(piece.tiles * piece.heads * per_group,)](
        q.data, by_keys[0], v.data, do.data, by_keys[1], q.scale, k.scale, v.scale, do.scale, k_across.power, *stored,
        terms.shift, terms.inverse, terms.r, dq, shape.hidden, shape.length_q, shape.length_k, inexact,
        *q.strides, *k.strides, *v.strides, *do.strides,
        shape.heads, per_group, shape.rows, terms.r.shape[-1], shape.keys, keys_padded, shape.dim, shape.dim_v,
        piece.first_head, piece.heads, piece.first_tile, piece.tiles, piece.width, shape.left or 0, shape.right or 0,
        softmax_scale, softmax_scale * 1.4426950408889634,
        SCALED_QK=q.scale is not None, FP8=factors.fp8, P_FORMAT=p_format, REPRESENTED=represented, P_EXPONENT=p_exponent, GATE=gate,
        **shape.mask_flags(), FOLDED=is_folded(shape), **factors.padding_flags(q, shape, wide, wide_v),
        BLOCK_D=wide, BLOCK_DV=wide_v, SPAN=SPAN, **config,
    )  # fmt: skip
