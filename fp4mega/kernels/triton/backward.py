"""The backward kernels: dK and dV by key tiles, dQ by row tiles, both from scores computed again; no atomics, so bits repeat.

    P = 2^(z - shift) * inverse    dS = P (dP - r)    dV = P^T dO    dK = scale dS^T Q    dQ = scale dS K

Under the rule `represented` 2^(z - shift) is rounded to the forward's codes first. The forward rounded it relative to the running
reference of its key tile, these kernels relative to the final one; with an integer reference the two differ only where E4M3 is
subnormal. In the FP8 policies every product is 8 bit except BF16 scores, and every tile's product is added in float32, because Hopper's
FP8 accumulator keeps about 14 bits and because dS has a power of two a tile. Where a kernel's tile is not the policy's, only the
codes of dS that are subnormal differ.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.arithmetic import power_of_two_scale, round_probabilities
from fp4mega.kernels.triton.forward import GATE_NONE, Operand, Shape, described
from fp4mega.kernels.triton.tiles import (
    gated_out,
    in_operand_order,
    key_range,
    lengths,
    load_across,
    load_tile,
    row_range,
    score_scale,
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
def _walk_rows(
    dk, dv, k, v, q_base, q_across, do_base, do_across, shift_at, inverse_at, r_at, hidden_at,
    first, end, z_scale, dp_scale, dk_scale, dv_scale, keys_at, diagonal, left, right, length_k,
    rows, stride_q, stride_do, stride_across, dim, dim_v,
    MASKED: tl.constexpr, FP8: tl.constexpr, P_FORMAT: tl.constexpr, REPRESENTED: tl.constexpr, P_EXPONENT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    PAD_ROWS: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Everything is transposed, [keys, rows], so that P and dS are left factors as they come out of their products."""
    for start in tl.range(first, end, BLOCK_M):
        rows_at = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_base, start, stride_q, rows, dim, BLOCK_M, BLOCK_D, PAD_ROWS, PAD_DIM)
        z = tl.dot(k, tl.trans(q)) * z_scale
        seen = True
        if MASKED:
            seen = visible(
                rows_at[None, :], keys_at[:, None], diagonal, left, right, length_k, hidden_at, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN
            )  # fmt: skip
        shift = tl.load(shift_at + rows_at)[None, :]
        p = probabilities(z, seen, shift, 0, MASKED, P_FORMAT, REPRESENTED)
        if REPRESENTED:
            p = p * tl.load(inverse_at + rows_at)[None, :]
        do = load_tile(
            do_base, start, stride_do, rows, dim_v, BLOCK_M, BLOCK_DV, PAD_ROWS, PAD_DIM_V
        )
        dp = tl.dot(v, tl.trans(do))
        ds = p * (dp * dp_scale - tl.load(r_at + rows_at)[None, :])
        if FP8:
            # Both codes before both products: what stays live beside a product's own result is then 8 bit.
            unit = power_of_two_scale(tl.max(tl.max(tl.abs(ds), 1), 0), 8, 7)
            p_codes = in_operand_order(p.to(tl.float8e4nv), BLOCK_N, BLOCK_M)
            ds_codes = in_operand_order((ds * unit).to(tl.float8e4nv), BLOCK_N, BLOCK_M)
            across = load_across(do_across, start, stride_across, BLOCK_DV, BLOCK_M)
            dv += tl.dot(p_codes, tl.trans(across)) * dv_scale
            across = load_across(q_across, start, stride_across, BLOCK_D, BLOCK_M)
            dk += tl.dot(ds_codes, tl.trans(across)) * (dk_scale / unit)
        else:
            dv = tl.dot(p.to(tl.bfloat16), do, dv)
            dk = tl.dot(ds.to(tl.bfloat16), q, dk)
    return dk, dv


@triton.jit
def _dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, q_across_ptr, do_across_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr, q_power_ptr,
    shift_ptr, inverse_ptr, r_ptr, dk_ptr, dv_ptr, hidden_ptr, length_q_ptr, length_k_ptr, inexact_ptr,
    sqb, sqh, sqr, skb, skh, skr, svb, svh, svr, sob, soh, sor,
    heads, per_group, rows, rows_padded, keys, dim, dim_v, tiles, left, right, softmax_scale, softmax_scale_log2,
    SCALED_QK: tl.constexpr, FP8: tl.constexpr, P_FORMAT: tl.constexpr, REPRESENTED: tl.constexpr, P_EXPONENT: tl.constexpr, GATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr, LENGTHS: tl.constexpr,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, PAD_DIM_DO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bg = pid // tiles
    key = (pid % tiles) * BLOCK_N
    kv_heads = heads // per_group
    b, g = bg // kv_heads, bg % kv_heads
    if gated_out(inexact_ptr, bg, GATE):
        return
    length_q, length_k, diagonal = lengths(
        length_q_ptr, length_k_ptr, b, rows, keys, BOTTOM_RIGHT, LENGTHS
    )
    k_base = k_ptr + b.to(tl.int64) * skb + g.to(tl.int64) * skh
    v_base = v_ptr + b.to(tl.int64) * svb + g.to(tl.int64) * svh
    k = load_tile(k_base, key, skr, keys, dim, BLOCK_N, BLOCK_D, PAD_QK, PAD_DIM)
    v = load_tile(v_base, key, svr, keys, dim_v, BLOCK_N, BLOCK_DV, PAD_V, PAD_DIM_V)
    hidden_at = hidden_ptr
    if HAS_HIDDEN:
        hidden_at = hidden_ptr + b.to(tl.int64) * keys
    keys_at = key + tl.arange(0, BLOCK_N)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    first, bound, free, end = row_range(
        key, diagonal, left, right, length_q, length_k, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN
    )  # fmt: skip
    for member in range(0, per_group):
        h = g * per_group + member
        bh = b * heads + h
        z_scale = score_scale(softmax_scale_log2, q_scale_ptr, k_scale_ptr, bh, bg, SCALED_QK)
        dp_scale = 1.0
        dk_scale = 1.0
        dv_scale = 1.0
        if FP8:
            do_power = tl.load(do_scale_ptr + bh)
            dp_scale = tl.math.div_rn(
                tl.math.div_rn(2.0**-P_EXPONENT, do_power), tl.load(v_scale_ptr + bg)
            )
            dv_scale = tl.math.div_rn(2.0**-P_EXPONENT, do_power)
            dk_scale = tl.math.div_rn(1.0, tl.load(q_power_ptr + bh))
        q_base = q_ptr + b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
        do_base = do_ptr + b.to(tl.int64) * sob + h.to(tl.int64) * soh
        q_across = q_across_ptr
        do_across = do_across_ptr
        if FP8:
            q_across = q_across_ptr + bh.to(tl.int64) * BLOCK_D * rows_padded
            do_across = do_across_ptr + bh.to(tl.int64) * BLOCK_DV * rows_padded
        line = bh.to(tl.int64) * rows_padded
        shift_at, r_at = shift_ptr + line, r_ptr + line
        inverse_at = inverse_ptr
        if REPRESENTED:
            inverse_at = inverse_ptr + line
        dk, dv = _walk_rows(
            dk, dv, k, v, q_base, q_across, do_base, do_across, shift_at, inverse_at, r_at, hidden_at,
            first, bound, z_scale, dp_scale, dk_scale, dv_scale, keys_at, diagonal, left, right, length_k,
            rows, sqr, sor, rows_padded, dim, dim_v, True, FP8, P_FORMAT, REPRESENTED, P_EXPONENT,
            HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_DIM, PAD_DIM_DO, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        if not HAS_HIDDEN:
            dk, dv = _walk_rows(
                dk, dv, k, v, q_base, q_across, do_base, do_across, shift_at, inverse_at, r_at, hidden_at,
                bound, free, z_scale, dp_scale, dk_scale, dv_scale, keys_at, diagonal, left, right, length_k,
                rows, sqr, sor, rows_padded, dim, dim_v, False, FP8, P_FORMAT, REPRESENTED, P_EXPONENT,
                HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_DIM, PAD_DIM_DO, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        if HAS_LEFT:
            dk, dv = _walk_rows(
                dk, dv, k, v, q_base, q_across, do_base, do_across, shift_at, inverse_at, r_at, hidden_at,
                free, end, z_scale, dp_scale, dk_scale, dv_scale, keys_at, diagonal, left, right, length_k,
                rows, sqr, sor, rows_padded, dim, dim_v, True, FP8, P_FORMAT, REPRESENTED, P_EXPONENT,
                HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_DIM, PAD_DIM_DO, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    live = (keys_at < keys)[:, None]
    index = (b.to(tl.int64) * keys + keys_at) * kv_heads + g
    cols, cols_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    at = dk_ptr + index[:, None] * dim + cols[None, :]
    tl.store(
        at, (dk * softmax_scale).to(dk_ptr.dtype.element_ty), mask=live & (cols < dim)[None, :]
    )
    at = dv_ptr + index[:, None] * dim_v + cols_v[None, :]
    tl.store(at, dv.to(dv_ptr.dtype.element_ty), mask=live & (cols_v < dim_v)[None, :])


@triton.jit
def _walk_keys(
    dq, q, do, shift, r, k_base, k_across, v_base, k_line, k_across_line, hidden_at,
    first, end, z_scale, dp_scale, rows_at, diagonal, left, right, length_k,
    keys, stride_k, stride_v, dim, dim_v,
    MASKED: tl.constexpr, FP8: tl.constexpr, P_FORMAT: tl.constexpr, REPRESENTED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    PAD_K: tl.constexpr, PAD_V: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, BLOCK_N):
        if FP8:
            k = k_base.load([k_line + start, 0])
        else:
            k = load_tile(k_base, start, stride_k, keys, dim, BLOCK_N, BLOCK_D, PAD_K, PAD_DIM)
        z = tl.dot(q, tl.trans(k)) * z_scale
        seen = True
        if MASKED:
            keys_at = start + tl.arange(0, BLOCK_N)
            seen = visible(
                rows_at[:, None], keys_at[None, :], diagonal, left, right, length_k, hidden_at, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN
            )  # fmt: skip
        p = probabilities(z, seen, shift[:, None], 1, MASKED, P_FORMAT, REPRESENTED)
        v = load_tile(v_base, start, stride_v, keys, dim_v, BLOCK_N, BLOCK_DV, PAD_V, PAD_DIM_V)
        # What P is short of its worth is in both terms.
        ds = p * (tl.dot(do, tl.trans(v)) * dp_scale[:, None] - r[:, None])
        if FP8:
            unit = power_of_two_scale(tl.max(tl.max(tl.abs(ds), 1), 0), 8, 7)
            across = k_across.load([k_across_line, start])
            codes = in_operand_order((ds * unit).to(tl.float8e4nv), BLOCK_M, BLOCK_N)
            dq += tl.dot(codes, tl.trans(across)) * (1.0 / unit)
        else:
            dq = tl.dot(ds.to(tl.bfloat16), k, dq)
    return dq


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, k_across_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr, k_power_ptr,
    shift_ptr, inverse_ptr, r_ptr, dq_ptr, hidden_ptr, length_q_ptr, length_k_ptr, inexact_ptr,
    sqb, sqh, sqr, skb, skh, skr, svb, svh, svr, sob, soh, sor,
    heads, per_group, rows, rows_padded, keys, keys_padded, dim, dim_v, tiles, left, right, softmax_scale, softmax_scale_log2,
    SCALED_QK: tl.constexpr, FP8: tl.constexpr, P_FORMAT: tl.constexpr, REPRESENTED: tl.constexpr, P_EXPONENT: tl.constexpr, GATE: tl.constexpr,
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
    rows_at = row + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, row, sqr, rows, dim, BLOCK_M, BLOCK_D, PAD_QK, PAD_DIM)
    do = load_tile(do_base, row, sor, rows, dim_v, BLOCK_M, BLOCK_DV, PAD_QK, PAD_DIM_DO)
    line = bh.to(tl.int64) * rows_padded + rows_at
    shift = tl.load(shift_ptr + line)
    r = tl.load(r_ptr + line)
    dp_scale = tl.zeros([BLOCK_M], tl.float32) + dp_scale
    if REPRESENTED:
        inverse = tl.load(inverse_ptr + line)
        dp_scale = dp_scale * inverse
        r = r * inverse
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first, free, bound, end = key_range(
        row, diagonal, left, right, length_k, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN
    )
    if HAS_LEFT:
        dq = _walk_keys(
            dq, q, do, shift, r, k_base, k_across_ptr, v_base, bg * keys_padded, bg * BLOCK_D, hidden_at, first, free, z_scale, dp_scale, rows_at,
            diagonal, left, right, length_k, keys, skr, svr, dim, dim_v, True, FP8, P_FORMAT, REPRESENTED,
            HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_V, PAD_DIM, PAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    if not HAS_HIDDEN:
        dq = _walk_keys(
            dq, q, do, shift, r, k_base, k_across_ptr, v_base, bg * keys_padded, bg * BLOCK_D, hidden_at, free, bound, z_scale, dp_scale, rows_at,
            diagonal, left, right, length_k, keys, skr, svr, dim, dim_v, False, FP8, P_FORMAT, REPRESENTED,
            HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, False, False, PAD_DIM, PAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, shift, r, k_base, k_across_ptr, v_base, bg * keys_padded, bg * BLOCK_D, hidden_at, bound, end, z_scale, dp_scale, rows_at,
        diagonal, left, right, length_k, keys, skr, svr, dim, dim_v, True, FP8, P_FORMAT, REPRESENTED,
        HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_V, PAD_DIM, PAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    cols = tl.arange(0, BLOCK_D)
    at = dq_ptr + ((b.to(tl.int64) * rows + rows_at) * heads + h)[:, None] * dim + cols[None, :]
    tl.store(
        at,
        (dq * dq_scale).to(dq_ptr.dtype.element_ty),
        mask=(rows_at < rows)[:, None] & (cols < dim)[None, :],
    )


class RowTerms(NamedTuple):
    """Per row, [B, H, padded rows]: published P = 2^(z - shift) * inverse, and r = (rowsum(out * dO) - dlse) / 2^p_exponent."""

    shift: Tensor
    inverse: Tensor
    r: Tensor


class Across(NamedTuple):
    """A transposed 8-bit operand [B, heads, dim, padded rows] and its power of two [B, heads]; None in BF16."""

    data: Tensor | None
    power: Tensor | None


class Factors(NamedTuple):
    """Everything that both kernels read beside the factors of the scores."""

    v: Operand
    do: Operand
    q_across: Across
    k_across: Across
    do_across: Across
    terms: RowTerms


def dk_dv_tile(wide: int, wide_v: int, fp8: bool) -> dict[str, int]:
    """Tile, warps and stages by head dims, measured on an H200."""
    if max(wide, wide_v) > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 1}
    if fp8:
        return {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def dq_tile(wide: int, wide_v: int, fp8: bool, fp8_scores: bool) -> dict[str, int]:
    """Tile, warps and stages by head dims, measured on an H200."""
    if max(wide, wide_v) > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 1}
    if fp8_scores:
        return {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2}
    if fp8:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def attention_backward(
    q: Operand,
    k: Operand,
    factors: Factors,
    shape: Shape,
    gradients: tuple[Tensor, Tensor, Tensor],
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
    """Fill dq, dk, dv (contiguous, [B, rows, heads, dim]) of the heads that `gate` selects.

    Gradient products are 8 bit where `factors` has transposed operands, BF16 otherwise; dP is the product of whatever dO and V are.
    """
    dq, dk, dv = gradients
    v, do, q_across, k_across, do_across, terms = factors
    fp8 = do_across.data is not None
    fp8_scores = q.data.dtype == torch.float8_e4m3fn
    for_keys = dk_dv_tile(wide, wide_v, fp8)
    for_rows = dq_tile(wide, wide_v, fp8, fp8_scores)
    strides = (*q.strides, *k.strides, *v.strides, *do.strides)
    per_group, rows_padded = shape.heads // shape.kv_heads, terms.r.shape[-1]
    ends = (shape.left or 0, shape.right or 0, softmax_scale, softmax_scale * 1.4426950408889634)
    flags = {
        "SCALED_QK": q.scale is not None,
        "FP8": fp8,
        "P_FORMAT": p_format,
        "REPRESENTED": represented,
        "P_EXPONENT": p_exponent,
        "GATE": gate,
        "HAS_LEFT": shape.left is not None,
        "HAS_RIGHT": shape.right is not None,
        "BOTTOM_RIGHT": shape.bottom_right,
        "HAS_HIDDEN": shape.hidden is not None,
        "LENGTHS": shape.length_q is not None,
        "PAD_QK": not q.padded,
        "PAD_V": not v.padded,
        "PAD_DIM": not q.padded and shape.dim != wide,
        "PAD_DIM_V": not v.padded and shape.dim_v != wide_v,
        "PAD_DIM_DO": not do.padded and shape.dim_v != wide_v,
        "BLOCK_D": wide,
        "BLOCK_DV": wide_v,
    }
    tiles = triton.cdiv(shape.keys, for_keys["BLOCK_N"])
    by_keys = (k.data, k_across.data)
    if fp8:
        assert k_across.data is not None
        long = for_rows["BLOCK_N"]
        by_keys = (described(k.data, (long, wide)), described(k_across.data, (wide, long)))
    _dk_dv_kernel[(tiles * shape.batch * shape.kv_heads,)](
        q.data, k.data, v.data, do.data, q_across.data, do_across.data, q.scale, k.scale, v.scale, do.scale, q_across.power,
        terms.shift, terms.inverse, terms.r, dk, dv, shape.hidden, shape.length_q, shape.length_k, inexact,
        *strides, shape.heads, per_group, shape.rows, rows_padded, shape.keys, shape.dim, shape.dim_v, tiles, *ends,
        **flags, **for_keys,
    )  # fmt: skip
    tiles = triton.cdiv(shape.rows, for_rows["BLOCK_M"])
    keys_padded = k_across.data.shape[-1] if k_across.data is not None else 0
    _dq_kernel[(tiles * shape.batch * shape.heads,)](
        q.data, by_keys[0], v.data, do.data, by_keys[1], q.scale, k.scale, v.scale, do.scale, k_across.power,
        terms.shift, terms.inverse, terms.r, dq, shape.hidden, shape.length_q, shape.length_k, inexact,
        *strides, shape.heads, per_group, shape.rows, rows_padded, shape.keys, keys_padded, shape.dim, shape.dim_v, tiles, *ends,
        **flags, **for_rows,
    )  # fmt: skip
