"""The kernel of the backward rule `centered`: r = rowsum(P dP) over the visible keys, a pass of its own before dK, dV and dQ.

P and dP are computed as `row_gradients` does, so that the rows of dS = P (dP - r) sum to zero up to float32 rounding.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.factors import Factors
from fp4mega.kernels.triton.forward import GATE_NONE, Operand, Shape
from fp4mega.kernels.triton.row_gradients import probabilities
from fp4mega.kernels.triton.tiles import (
    gated_out,
    key_range,
    lengths,
    load_tile,
    score_scale,
    visible,
)


@triton.jit
def _sum_keys(
    total, q, do, shift, k_base, v_base, hidden_at,
    first, end, z_scale, rows_at, diagonal, left, right, length_k, keys, stride_k, stride_v, dim, dim_v,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    PAD_K: tl.constexpr, PAD_V: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, BLOCK_N):
        k = load_tile(k_base, start, stride_k, keys, dim, BLOCK_N, BLOCK_D, PAD_K, PAD_DIM)
        z = tl.dot(q, tl.trans(k)) * z_scale
        seen = True
        if MASKED:
            keys_at = start + tl.arange(0, BLOCK_N)
            seen = visible(
                rows_at[:, None], keys_at[None, :], diagonal, left, right, length_k, hidden_at, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN
            )  # fmt: skip
        p = probabilities(z, seen, shift[:, None], 1, MASKED, "none", False)
        v = load_tile(v_base, start, stride_v, keys, dim_v, BLOCK_N, BLOCK_DV, PAD_V, PAD_DIM_V)
        total += tl.sum(p * tl.dot(do, tl.trans(v)), 1)
    return total


@triton.jit
def _center_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr,
    shift_ptr, dlse_ptr, r_ptr, hidden_ptr, length_q_ptr, length_k_ptr, inexact_ptr,
    sqb, sqh, sqr, skb, skh, skr, svb, svh, svr, sob, soh, sor,
    heads, per_group, rows, rows_padded, keys, dim, dim_v, tiles, left, right, softmax_scale_log2,
    SCALED_QK: tl.constexpr, FP8: tl.constexpr, P_EXPONENT: tl.constexpr, DLSE: tl.constexpr, GATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr, LENGTHS: tl.constexpr,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, PAD_DIM_DO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = pid // tiles
    row = (tiles - 1 - pid % tiles) * BLOCK_M
    b, h = bh // heads, bh % heads
    g = h // per_group
    bg = b * (heads // per_group) + g
    if gated_out(inexact_ptr, bg, GATE):
        return
    _, length_k, diagonal = lengths(
        length_q_ptr, length_k_ptr, b, rows, keys, BOTTOM_RIGHT, LENGTHS
    )
    z_scale = score_scale(softmax_scale_log2, q_scale_ptr, k_scale_ptr, bh, bg, SCALED_QK)
    k_base = k_ptr + b.to(tl.int64) * skb + g.to(tl.int64) * skh
    v_base = v_ptr + b.to(tl.int64) * svb + g.to(tl.int64) * svh
    hidden_at = hidden_ptr
    if HAS_HIDDEN:
        hidden_at = hidden_ptr + b.to(tl.int64) * keys
    rows_at = row + tl.arange(0, BLOCK_M)
    q_base = q_ptr + b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
    do_base = do_ptr + b.to(tl.int64) * sob + h.to(tl.int64) * soh
    q = load_tile(q_base, row, sqr, rows, dim, BLOCK_M, BLOCK_D, PAD_QK, PAD_DIM)
    do = load_tile(do_base, row, sor, rows, dim_v, BLOCK_M, BLOCK_DV, PAD_QK, PAD_DIM_DO)
    line = bh.to(tl.int64) * rows_padded + rows_at
    shift = tl.load(shift_ptr + line)
    total = tl.zeros([BLOCK_M], tl.float32)
    first, free, bound, end = key_range(
        row, diagonal, left, right, length_k, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN
    )
    if HAS_LEFT:
        total = _sum_keys(
            total, q, do, shift, k_base, v_base, hidden_at, first, free, z_scale, rows_at,
            diagonal, left, right, length_k, keys, skr, svr, dim, dim_v, True, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN,
            PAD_QK, PAD_V, PAD_DIM, PAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    if not HAS_HIDDEN:
        total = _sum_keys(
            total, q, do, shift, k_base, v_base, hidden_at, free, bound, z_scale, rows_at,
            diagonal, left, right, length_k, keys, skr, svr, dim, dim_v, False, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN,
            False, False, PAD_DIM, PAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    total = _sum_keys(
        total, q, do, shift, k_base, v_base, hidden_at, bound, end, z_scale, rows_at,
        diagonal, left, right, length_k, keys, skr, svr, dim, dim_v, True, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN,
        PAD_QK, PAD_V, PAD_DIM, PAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    if FP8:
        dp_scale = tl.math.div_rn(
            tl.math.div_rn(1.0, tl.load(do_scale_ptr + bh)), tl.load(v_scale_ptr + bg)
        )
        total = total * dp_scale
    # P is published at 2^P_EXPONENT.
    total = total * 2.0**-P_EXPONENT
    live = rows_at < rows
    if DLSE:
        total = total - tl.load(
            dlse_ptr + bh.to(tl.int64) * rows + rows_at, mask=live, other=0.0
        ).to(tl.float32)
    tl.store(r_ptr + line, total * 2.0**-P_EXPONENT, mask=live)


def center_tile(wide: int, wide_v: int, fp8: bool, fp8_scores: bool) -> dict[str, int]:
    """Tile, warps and stages by head dims, measured on an H200."""
    if max(wide, wide_v) > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 1}
    if fp8_scores:
        return {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2}
    if fp8:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def center(
    q: Operand,
    k: Operand,
    factors: Factors,
    dlse: Tensor | None,
    shape: Shape,
    *,
    softmax_scale: float,
    wide: int,
    wide_v: int,
    p_exponent: int,
    gate: int = GATE_NONE,
    inexact: Tensor | None = None,
) -> None:
    """Overwrite `factors.terms.r` with (rowsum(P dP) - dlse) / 2^p_exponent for the heads that `gate` selects; dlse float32 [B, H, S] or None."""
    v, do, terms = factors.v, factors.do, factors.terms
    fp8 = do.scale is not None
    config = center_tile(wide, wide_v, fp8, q.data.dtype == torch.float8_e4m3fn)
    tiles = triton.cdiv(shape.rows, config["BLOCK_M"])
    _center_kernel[(tiles * shape.batch * shape.heads,)](
        q.data, k.data, v.data, do.data, q.scale, k.scale, v.scale, do.scale,
        terms.shift, dlse, terms.r, shape.hidden, shape.length_q, shape.length_k, inexact,
        *q.strides, *k.strides, *v.strides, *do.strides,
        shape.heads, shape.heads // shape.kv_heads, shape.rows, terms.r.shape[-1], shape.keys, shape.dim, shape.dim_v, tiles,
        shape.left or 0, shape.right or 0, softmax_scale * 1.4426950408889634,
        SCALED_QK=q.scale is not None, FP8=fp8, P_EXPONENT=p_exponent, DLSE=dlse is not None, GATE=gate,
        **shape.mask_flags(), **factors.padding_flags(q, shape, wide, wide_v),
        BLOCK_D=wide, BLOCK_DV=wide_v, **config,
    )  # fmt: skip
