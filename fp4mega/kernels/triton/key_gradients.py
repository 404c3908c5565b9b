"""The kernel of dK and dV in BF16, by key tiles from scores computed again; no atomics, so bits repeat.

    dV = P^T dO    dK = scale dS^T Q

The 8-bit policies have `gradient_products` instead.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.factors import Factors
from fp4mega.kernels.triton.forward import Operand, Shape
from fp4mega.kernels.triton.row_gradients import probabilities
from fp4mega.kernels.triton.tiles import lengths, load_tile, row_range, visible


@triton.jit
def _walk_rows(
    dk, dv, k, v, q_base, do_base, shift_at, inverse_at, r_at, hidden_at,
    first, end, z_scale, keys_at, diagonal, left, right, length_k,
    rows, stride_q, stride_do, dim, dim_v,
    MASKED: tl.constexpr, P_FORMAT: tl.constexpr, REPRESENTED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    PAD_ROWS: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
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
        ds = p * (dp - tl.load(r_at + rows_at)[None, :])
        dv = tl.dot(p.to(tl.bfloat16), do, dv)
        dk = tl.dot(ds.to(tl.bfloat16), q, dk)
    return dk, dv


@triton.jit
def _dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, shift_ptr, inverse_ptr, r_ptr, dk_ptr, dv_ptr, hidden_ptr, length_q_ptr, length_k_ptr,
    sqb, sqh, sqr, skb, skh, skr, svb, svh, svr, sob, soh, sor,
    heads, per_group, rows, rows_padded, keys, dim, dim_v, tiles, left, right, softmax_scale, softmax_scale_log2,
    P_FORMAT: tl.constexpr, REPRESENTED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr, LENGTHS: tl.constexpr,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, PAD_DIM_DO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bg = pid // tiles
    key = (pid % tiles) * BLOCK_N
    kv_heads = heads // per_group
    b, g = bg // kv_heads, bg % kv_heads
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
        q_base = q_ptr + b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
        do_base = do_ptr + b.to(tl.int64) * sob + h.to(tl.int64) * soh
        line = bh.to(tl.int64) * rows_padded
        shift_at, r_at = shift_ptr + line, r_ptr + line
        inverse_at = inverse_ptr
        if REPRESENTED:
            inverse_at = inverse_ptr + line
        dk, dv = _walk_rows(
            dk, dv, k, v, q_base, do_base, shift_at, inverse_at, r_at, hidden_at,
            first, bound, softmax_scale_log2, keys_at, diagonal, left, right, length_k,
            rows, sqr, sor, dim, dim_v, True, P_FORMAT, REPRESENTED,
            HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_DIM, PAD_DIM_DO, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        if not HAS_HIDDEN:
            dk, dv = _walk_rows(
                dk, dv, k, v, q_base, do_base, shift_at, inverse_at, r_at, hidden_at,
                bound, free, softmax_scale_log2, keys_at, diagonal, left, right, length_k,
                rows, sqr, sor, dim, dim_v, False, P_FORMAT, REPRESENTED,
                HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_DIM, PAD_DIM_DO, BLOCK_M, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        if HAS_LEFT:
            dk, dv = _walk_rows(
                dk, dv, k, v, q_base, do_base, shift_at, inverse_at, r_at, hidden_at,
                free, end, softmax_scale_log2, keys_at, diagonal, left, right, length_k,
                rows, sqr, sor, dim, dim_v, True, P_FORMAT, REPRESENTED,
                HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_QK, PAD_DIM, PAD_DIM_DO, BLOCK_M, BLOCK_D, BLOCK_DV,
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


def key_tile(wide: int, wide_v: int) -> dict[str, int]:
    """Tile, warps and stages by head dims, measured on an H200."""
    if max(wide, wide_v) > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def key_gradients(
    q: Operand,
    k: Operand,
    factors: Factors,
    shape: Shape,
    gradients: tuple[Tensor, Tensor],
    *,
    softmax_scale: float,
    wide: int,
    wide_v: int,
    represented: bool,
    p_format: str,
) -> None:
    """Fill dk and dv (contiguous, [B, T, G, dim]) from BF16 q, k, v and dO."""
    dk, dv = gradients
    v, do, terms = factors.v, factors.do, factors.terms
    config = key_tile(wide, wide_v)
    tiles = triton.cdiv(shape.keys, config["BLOCK_N"])
    _dk_dv_kernel[(tiles * shape.batch * shape.kv_heads,)](
        q.data, k.data, v.data, do.data, terms.shift, terms.inverse, terms.r, dk, dv, shape.hidden, shape.length_q, shape.length_k,
        *q.strides, *k.strides, *v.strides, *do.strides,
        shape.heads, shape.heads // shape.kv_heads, shape.rows, terms.r.shape[-1], shape.keys, shape.dim, shape.dim_v, tiles,
        shape.left or 0, shape.right or 0, softmax_scale, softmax_scale * 1.4426950408889634,
        P_FORMAT=p_format, REPRESENTED=represented,
        **shape.mask_flags(), **factors.padding_flags(q, shape, wide, wide_v),
        BLOCK_D=wide, BLOCK_DV=wide_v, **config,
    )  # fmt: skip
