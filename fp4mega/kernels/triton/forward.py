"""The forward kernel: scores in BF16 or FP8, 2^x with an integer or exact running maximum, P V in FP8 or BF16.

One program owns BLOCK_M rows of one query head and walks the key tiles in order, so a result does not depend on scheduling. P is
published at 2^p_exponent by putting the exponent into the argument of 2^x. Each tile's FP8 product is added to the output in float32:
Hopper's FP8 accumulator keeps about 14 bits, which is enough for the 128 keys of one tile and not for a long sequence.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp4mega.kernels.triton.arithmetic import natural_log, round_magnitude, round_probabilities
from fp4mega.kernels.triton.tiles import (
    gated_out,
    in_operand_order,
    key_range,
    lengths,
    load_tile,
    score_scale,
    visible,
)

GATE_NONE, GATE_EXACT, GATE_INEXACT = 0, 1, 2
"""Run every head; only heads whose `inexact` flag is down (FP8 scores); only those whose flag is up (BF16 scores)."""


class Shape(NamedTuple):
    """Sizes of a dense call, and its mask as kernels take it."""

    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    left: int | None
    right: int | None
    bottom_right: bool
    hidden: Tensor | None
    """uint8 [B, T], 1 where a key is hidden."""
    length_q: Tensor | None
    length_k: Tensor | None
    """int32 [B] lengths of the sequences of a packed problem."""

    def mask_flags(self) -> dict[str, bool]:
        """Which limits there are to what a row sees, for the kernels' compiler."""
        return {
            "HAS_LEFT": self.left is not None,
            "HAS_RIGHT": self.right is not None,
            "BOTTOM_RIGHT": self.bottom_right,
            "HAS_HIDDEN": self.hidden is not None,
            "LENGTHS": self.length_q is not None,
        }


@triton.jit
def _walk_keys(
    acc, total, top, q, k_base, v_base, k_line, v_line, hidden_at, first, end, z_scale, rows_at,
    diagonal, left, right, length_k, keys, stride_k, stride_v, dim, dim_v,
    WHOLE_TILES: tl.constexpr, MASKED: tl.constexpr, FP8_PV: tl.constexpr, P_FORMAT: tl.constexpr, INTEGER_MAX: tl.constexpr, REPRESENTED: tl.constexpr,
    P_EXPONENT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    PAD_KEYS: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, BLOCK_N):
        if WHOLE_TILES:
            k = k_base.load([k_line + start, 0])
        else:
            k = load_tile(k_base, start, stride_k, keys, dim, BLOCK_N, BLOCK_D, PAD_KEYS, PAD_DIM)
        z = tl.dot(q, tl.trans(k))
        if MASKED:
            keys_at = start + tl.arange(0, BLOCK_N)
            seen = visible(
                rows_at[:, None], keys_at[None, :], diagonal, left, right, length_k, hidden_at, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN
            )  # fmt: skip
            # After scaling: 0 * -inf would be NaN where the scale underflows.
            z = tl.where(seen, z * z_scale, float("-inf"))
            largest = tl.max(z, 1)
        else:
            largest = tl.max(z, 1) * z_scale
            z = z * z_scale
        if INTEGER_MAX:
            largest = tl.ceil(largest)
        new = tl.maximum(top, largest)
        reference = tl.where(new == float("-inf"), 0.0, new)
        rescale = tl.exp2(top - reference)
        p = tl.exp2(z - (reference - P_EXPONENT)[:, None])
        top = new
        if FP8_PV:
            if REPRESENTED:
                # Rounded in float32 and cast afterwards: ptxas 12.8 miscompiles a cast to E4M3 that is both packed for a
                # product and cast back.
                p = round_magnitude(p, 3, 7)
            codes = p.to(tl.float8e4nv)
            total = total * rescale + tl.sum(p, 1)
            v = v_base.load([v_line, start])
            codes = in_operand_order(codes, BLOCK_M, BLOCK_N)
            acc = acc * rescale[:, None] + tl.dot(codes, tl.trans(v))
        else:
            # E4M3 and MXFP4 values, and those of V, are exact in BF16.
            rounded = round_probabilities(p, P_FORMAT, 1)
            half = rounded.to(tl.bfloat16)
            if REPRESENTED:
                p = rounded
            total = total * rescale + tl.sum(p, 1)
            if WHOLE_TILES:
                v = v_base.load([v_line + start, 0])
            else:
                v = load_tile(
                    v_base, start, stride_v, keys, dim_v, BLOCK_N, BLOCK_DV, PAD_KEYS, PAD_DIM_V
                )
            acc = tl.dot(half, v, acc * rescale[:, None])
    return acc, total, top


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, statistics_ptr,
    sink_ptr, hidden_ptr, length_q_ptr, length_k_ptr, inexact_ptr,
    sqb, sqh, sqr, skb, skh, skr, svb, svh, svr,
    heads, per_group, rows, keys, dim, dim_v, tiles, total_rows, left, right, softmax_scale_log2,
    WHOLE_TILES: tl.constexpr, SCALED_QK: tl.constexpr, SCALED_V: tl.constexpr, FP8_PV: tl.constexpr, P_FORMAT: tl.constexpr,
    INTEGER_MAX: tl.constexpr, REPRESENTED: tl.constexpr,
    P_EXPONENT: tl.constexpr, STATISTICS: tl.constexpr, SINK: tl.constexpr, GATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr, LENGTHS: tl.constexpr,
    PAD_ROWS: tl.constexpr, PAD_KEYS: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = pid // tiles
    # Causal tiles with the most keys start first, so that the last to finish are short.
    row = (tiles - 1 - pid % tiles) * BLOCK_M
    b, h = bh // heads, bh % heads
    kv_heads = heads // per_group
    bg = b * kv_heads + h // per_group
    if gated_out(inexact_ptr, bg, GATE):
        return
    length_q, length_k, diagonal = lengths(
        length_q_ptr, length_k_ptr, b, rows, keys, BOTTOM_RIGHT, LENGTHS
    )
    z_scale = score_scale(softmax_scale_log2, q_scale_ptr, k_scale_ptr, bh, bg, SCALED_QK)
    q_base = q_ptr + b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
    k_base = k_ptr
    v_base = v_ptr
    k_line = 0
    v_line = 0
    if WHOLE_TILES:
        k_line = bg * (skh // skr)
        v_line = bg * (svh // svr)
    else:
        k_base = k_ptr + b.to(tl.int64) * skb + (h // per_group).to(tl.int64) * skh
        v_base = v_ptr + b.to(tl.int64) * svb + (h // per_group).to(tl.int64) * svh
    hidden_at = hidden_ptr
    if HAS_HIDDEN:
        hidden_at = hidden_ptr + b.to(tl.int64) * keys
    rows_at = row + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, row, sqr, rows, dim, BLOCK_M, BLOCK_D, PAD_ROWS, PAD_DIM)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINK:
        sink = tl.load(sink_ptr + h).to(tl.float32) * 1.4426950408889634
        start_at = sink
        if INTEGER_MAX:
            start_at = tl.ceil(sink)
        top = tl.zeros([BLOCK_M], tl.float32) + start_at
        # A sink of -inf is none.
        beside = tl.where(start_at == float("-inf"), 0.0, start_at)
        total = tl.zeros([BLOCK_M], tl.float32) + tl.exp2(sink - beside + P_EXPONENT)
    first, free, bound, end = key_range(
        row, diagonal, left, right, length_k, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_HIDDEN
    )
    if HAS_LEFT:
        acc, total, top = _walk_keys(
            acc, total, top, q, k_base, v_base, k_line, v_line, hidden_at, first, free, z_scale, rows_at,
            diagonal, left, right, length_k, keys, skr, svr, dim, dim_v, WHOLE_TILES, True, FP8_PV, P_FORMAT, INTEGER_MAX, REPRESENTED, P_EXPONENT,
            HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_KEYS, PAD_DIM, PAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    if not HAS_HIDDEN:
        acc, total, top = _walk_keys(
            acc, total, top, q, k_base, v_base, k_line, v_line, hidden_at, free, bound, z_scale, rows_at,
            diagonal, left, right, length_k, keys, skr, svr, dim, dim_v, WHOLE_TILES, False, FP8_PV, P_FORMAT, INTEGER_MAX, REPRESENTED, P_EXPONENT,
            HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, False, PAD_DIM, PAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    acc, total, top = _walk_keys(
        acc, total, top, q, k_base, v_base, k_line, v_line, hidden_at, bound, end, z_scale, rows_at,
        diagonal, left, right, length_k, keys, skr, svr, dim, dim_v, WHOLE_TILES, True, FP8_PV, P_FORMAT, INTEGER_MAX, REPRESENTED, P_EXPONENT,
        HAS_LEFT, HAS_RIGHT, HAS_HIDDEN, PAD_KEYS, PAD_DIM, PAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip

    live = rows_at < rows
    if LENGTHS:
        inside = rows_at < length_q
        total = tl.where(inside, total, 0.0)
        top = tl.where(inside, top, float("-inf"))
    # L is 0 for a row that sees no key: its output is 0 and its log-sum-exp -inf. NaN is not 0.
    empty = total == 0.0
    inverse = tl.math.div_rn(tl.full([BLOCK_M], 1.0, tl.float32), tl.where(empty, 1.0, total))
    out = acc * inverse[:, None]
    if out_ptr.dtype.element_ty == tl.float32:
        # A correctly rounded quotient; where it is not finite there is nothing to correct.
        remainder = tl.fma(-out, tl.zeros_like(out) + total[:, None], acc)
        better = tl.fma(remainder, tl.zeros_like(out) + inverse[:, None], out)
        out = tl.where(better == better, better, out)
    if SCALED_V:
        # A power of two, so the order does not matter.
        out = out * tl.math.div_rn(1.0, tl.load(v_scale_ptr + bg))
    out = tl.where(empty[:, None], 0.0, out)
    cols = tl.arange(0, BLOCK_DV)
    at = out_ptr + ((b.to(tl.int64) * rows + rows_at) * heads + h)[:, None] * dim_v + cols[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (cols < dim_v)[None, :])
    total = total * 2.0**-P_EXPONENT
    lse = natural_log(tl.where(empty, 1.0, total), tl.where(empty, 0.0, top))
    row_index = bh.to(tl.int64) * rows + rows_at
    tl.store(lse_ptr + row_index, tl.where(empty, float("-inf"), lse), mask=live)
    if STATISTICS:
        tl.store(statistics_ptr + row_index, top, mask=live)
        tl.store(statistics_ptr + total_rows + row_index, total, mask=live)


class Operand(NamedTuple):
    """A factor of a product: data, its strides (batch, head, row), what divides it [B, heads] or None, and whether it is padded."""

    data: Tensor
    strides: tuple[int, int, int]
    scale: Tensor | None
    padded: bool


def padded_operand(data: Tensor, scale: Tensor | None) -> Operand:
    """An operand made by a publisher: [B, heads, rows, dim], whole tiles."""
    return Operand(data, (data.stride(0), data.stride(1), data.stride(2)), scale, True)


def strided_operand(x: Tensor) -> Operand:
    """The caller's own [B, rows, heads, dim] as it lies in memory; its last dim has stride 1."""
    return Operand(x, (x.stride(0), x.stride(2), x.stride(1)), None, False)


def described(data: Tensor, tile: tuple[int, int]) -> TensorDescriptor:
    """A contiguous [B, heads, rows, columns] operand as a matrix of B * heads * rows rows from which tiles are loaded whole."""
    return TensorDescriptor.from_tensor(data.flatten(0, 2), list(tile))


def forward_tile(wide: int, wide_v: int, fp8_scores: bool, fp8_pv: bool) -> dict[str, int]:
    """Tile height, warps and stages by head dims, measured on an H200."""
    if max(wide, wide_v) > 128:
        return {"BLOCK_M": 64, "num_warps": 8, "num_stages": 2 if fp8_pv else 1}
    if fp8_scores and fp8_pv:
        # 168 registers: three programs on a multiprocessor.
        return {"BLOCK_M": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 168}
    if fp8_pv:
        return {"BLOCK_M": 64, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 128, "num_warps": 8, "num_stages": 2}


def attention_forward(
    q: Operand,
    k: Operand,
    v: Operand,
    shape: Shape,
    results: tuple[Tensor, Tensor, Tensor | None],
    *,
    sink: Tensor | None,
    softmax_scale: float,
    wide: int,
    wide_v: int,
    p_format: str,
    integer_max: bool,
    represented: bool,
    p_exponent: int,
    tile_n: int,
    gate: int = GATE_NONE,
    inexact: Tensor | None = None,
) -> None:
    """Fill out [B, S, H, Dv], lse [B, H, S] and statistics [2, B, H, S] (or None) of the heads that `gate` selects.

    `p_format`: `e4m3`, `mxfp4` or `bf16`. V is E4M3, transposed, when P is too, and BF16 otherwise.
    """
    out, lse, statistics = results
    fp8_scores = q.data.dtype == torch.float8_e4m3fn
    fp8_pv = v.data.dtype == torch.float8_e4m3fn
    config = forward_tile(wide, wide_v, fp8_scores, fp8_pv)
    tiles = triton.cdiv(shape.rows, config["BLOCK_M"])
    whole = k.padded and v.padded
    k_data, v_data = k.data, v.data
    if whole:
        k_data = described(k.data, (tile_n, wide))
        v_data = described(v.data, (wide_v, tile_n) if fp8_pv else (tile_n, wide_v))
    _forward_kernel[(tiles * shape.batch * shape.heads,)](
        q.data, k_data, v_data, q.scale, k.scale, v.scale, out, lse, statistics,
        sink, shape.hidden, shape.length_q, shape.length_k, inexact,
        *q.strides, *k.strides, *v.strides,
        shape.heads, shape.heads // shape.kv_heads, shape.rows, shape.keys, shape.dim, shape.dim_v, tiles,
        shape.batch * shape.heads * shape.rows, shape.left or 0, shape.right or 0, softmax_scale * 1.4426950408889634,
        WHOLE_TILES=whole, SCALED_QK=q.scale is not None, SCALED_V=v.scale is not None, FP8_PV=fp8_pv, P_FORMAT=p_format, INTEGER_MAX=integer_max, REPRESENTED=represented,
        P_EXPONENT=p_exponent, STATISTICS=statistics is not None, SINK=sink is not None, GATE=gate,
        **shape.mask_flags(),
        PAD_ROWS=not q.padded, PAD_KEYS=not k.padded, PAD_DIM=not q.padded and shape.dim != wide,
        PAD_DIM_V=not v.padded and shape.dim_v != wide_v,
        BLOCK_N=tile_n, BLOCK_D=wide, BLOCK_DV=wide_v, **config,
    )  # fmt: skip
