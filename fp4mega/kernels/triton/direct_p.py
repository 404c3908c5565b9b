"""The kernel of Direct-P: MXFP4 probabilities straight from scores, no exponential, no running maximum, nothing rescaled.

P is 2^e E2M1(u) / 6 with u = max(0, A x + B): one fused multiply-add, a clamp and a rounding an element, and a maximum a block of 32 keys.
Hopper has no FP4 product, so P and V go through BF16, which holds 2^e times an E2M1 value exactly. Both operands are 6/8 of their
values: neither P nor its sum leaves float32 where the value itself would not.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from torch import Tensor

from fp4mega.attention.policy import DirectP
from fp4mega.kernels.triton.arithmetic import from_bits, natural_log, round_magnitude
from fp4mega.kernels.triton.forward import Operand, Shape
from fp4mega.kernels.triton.tiles import lengths, load_tile, score_scale, swap_pairs, visible

TILE_N = 128
"""Keys of a tile; a sampled reference comes from the first one."""


@triton.jit
def _keys_of(start, SWAPPED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The key behind each column of a tile of scores."""
    at = tl.arange(0, BLOCK_N)
    return start + (swap_pairs(at) if SWAPPED else at)


@triton.jit
def _scores(
    q, k_base, hidden_at, start, z_scale, length_k, keys, stride_k,
    MASKED: tl.constexpr, SWAPPED: tl.constexpr, HAS_HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in log2 units; -inf where masked."""
    k = load_tile(k_base, start, stride_k, keys, BLOCK_D, BLOCK_N, BLOCK_D, False, False)
    z = tl.dot(q, tl.trans(k)) * z_scale
    if MASKED:
        keys_at = _keys_of(start, SWAPPED, BLOCK_N)
        seen = visible(
            keys_at[None, :], keys_at[None, :], 0, 0, 0, length_k, hidden_at, False, False, HAS_HIDDEN
        )  # fmt: skip
        z = tl.where(seen, z, float("-inf"))
    return z


@triton.jit
def _direct_codes(
    z, SLOPE: tl.constexpr, OFFSET: tl.constexpr, EXACT_EVERY: tl.constexpr, FLOOR: tl.constexpr, SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """6/8 of the represented P from scores relative to the row reference, float32 [BLOCK_M, BLOCK_N]; NaN stays NaN."""
    blocks = tl.reshape(z, [BLOCK_M, BLOCK_N // 32, 32])
    largest = tl.max(blocks, 2)
    # The power of two nearest 2^largest, switching at 1.5: 1 - log2(1.5) is added before the floor.
    exponent = tl.floor(largest + 0.4150374992788438)
    exponent = tl.minimum(tl.maximum(exponent, -127.0), 127.0)
    dead = exponent == -127.0
    if FLOOR > 0:
        dead = largest == float("-inf")
        exponent = tl.maximum(exponent, FLOOR - 126.0)
    # x = z - exponent + log2(6); u = SLOPE * x + OFFSET.
    x_offset = 2.584962500721156 - exponent
    u = blocks * SLOPE + tl.expand_dims(x_offset * SLOPE + OFFSET, 2)
    if EXACT_EVERY > 0:
        pair = (_keys_of(0, SWAPPED, 32) // 2) % EXACT_EVERY
        x = blocks + tl.expand_dims(x_offset, 2)
        u = tl.where((pair == 0)[None, None, :], tl.exp2(x), u)
    u = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
    u = tl.minimum(u, 6.0, propagate_nan=tl.PropagateNan.ALL)
    # 2^(exponent - FLOOR - 3) in two factors: alone it may lie below the normal numbers.
    unit = from_bits((exponent.to(tl.int32) - FLOOR + 127) << 23)
    unit = tl.where(dead, 0.0, unit * 0.125)
    return tl.reshape(round_magnitude(u, 1, 1) * tl.expand_dims(unit, 2), [BLOCK_M, BLOCK_N])


@triton.jit
def _attend(
    acc, total, q, reference, k_base, v_base, hidden_at, start, z_scale, length_k, keys, stride_k, stride_v,
    SLOPE: tl.constexpr, OFFSET: tl.constexpr, EXACT_EVERY: tl.constexpr, FLOOR: tl.constexpr, SAMPLED: tl.constexpr,
    MASKED: tl.constexpr, SWAPPED: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    z = _scores(
        q, k_base, hidden_at, start, z_scale, length_k, keys, stride_k, MASKED, SWAPPED, HAS_HIDDEN, BLOCK_N, BLOCK_D
    )  # fmt: skip
    if SAMPLED:
        z = z - reference[:, None]
    p = _direct_codes(z, SLOPE, OFFSET, EXACT_EVERY, FLOOR, SWAPPED, BLOCK_M, BLOCK_N)
    total += tl.sum(p, 1)
    v = load_tile(v_base, start, stride_v, keys, BLOCK_DV, BLOCK_N, BLOCK_DV, False, False)
    return tl.dot(p.to(tl.bfloat16), v, acc), total


@triton.jit
def _direct_p_kernel(
    q_ptr, k_ptr, v_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, statistics_ptr,
    sink_ptr, hidden_ptr, length_q_ptr, length_k_ptr,
    sqb, sqh, sqr, skb, skh, skr, svb, svh, svr,
    heads, per_group, rows, keys, dim_v, tiles, total_rows, softmax_scale_log2,
    SLOPE: tl.constexpr, OFFSET: tl.constexpr, EXACT_EVERY: tl.constexpr, FLOOR: tl.constexpr, HEADROOM: tl.constexpr,
    SAMPLES: tl.constexpr, SWAPPED: tl.constexpr, SINK: tl.constexpr, HAS_HIDDEN: tl.constexpr, LENGTHS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of a query head over all keys. SAMPLES: how many first keys give the row reference, 0 for none."""
    pid = tl.program_id(0)
    bh = pid // tiles
    row = (pid % tiles) * BLOCK_M
    b, h = bh // heads, bh % heads
    bg = b * (heads // per_group) + h // per_group
    length_q, length_k, _ = lengths(length_q_ptr, length_k_ptr, b, rows, keys, False, LENGTHS)
    z_scale = score_scale(softmax_scale_log2, q_scale_ptr, k_scale_ptr, bh, bg, True)
    q_base = q_ptr + b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
    k_base = k_ptr + b.to(tl.int64) * skb + (h // per_group).to(tl.int64) * skh
    v_base = v_ptr + b.to(tl.int64) * svb + (h // per_group).to(tl.int64) * svh
    hidden_at = hidden_ptr
    if HAS_HIDDEN:
        hidden_at = hidden_ptr + b.to(tl.int64) * keys
    rows_at = row + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, row, sqr, rows, BLOCK_D, BLOCK_M, BLOCK_D, False, False)
    reference = tl.zeros([BLOCK_M], tl.float32)
    if SAMPLES > 0:
        z = _scores(
            q, k_base, hidden_at, 0, z_scale, length_k, keys, skr, True, SWAPPED, HAS_HIDDEN, BLOCK_N, BLOCK_D
        )  # fmt: skip
        sampled = tl.where((_keys_of(0, SWAPPED, BLOCK_N) < SAMPLES)[None, :], z, float("-inf"))
        reference = tl.max(sampled, 1)
        reference = tl.where(reference == float("-inf"), 0.0, reference) + HEADROOM
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINK:
        sink = tl.load(sink_ptr + h).to(tl.float32) * 1.4426950408889634
        total = 0.75 * tl.exp2(sink - reference - FLOOR)
    whole = length_k // BLOCK_N * BLOCK_N
    if HAS_HIDDEN:
        whole = 0
    for start in tl.range(0, whole, BLOCK_N):
        acc, total = _attend(
            acc, total, q, reference, k_base, v_base, hidden_at, start, z_scale, length_k, keys, skr, svr,
            SLOPE, OFFSET, EXACT_EVERY, FLOOR, SAMPLES > 0, False, SWAPPED, HAS_HIDDEN, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    for start in tl.range(whole, length_k, BLOCK_N):
        acc, total = _attend(
            acc, total, q, reference, k_base, v_base, hidden_at, start, z_scale, length_k, keys, skr, svr,
            SLOPE, OFFSET, EXACT_EVERY, FLOOR, SAMPLES > 0, True, SWAPPED, HAS_HIDDEN, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    live = rows_at < rows
    if LENGTHS:
        total = tl.where(rows_at < length_q, total, 0.0)
    # A sum that overflowed is no number. A row that sees no key: output 0, log-sum-exp -inf. NaN is not 0.
    total = tl.where(total == float("inf"), float("nan"), total)
    empty = total == 0.0
    # Sums are 6/8 of P and 36/64 of P V: what is left of O is 6/8.
    inverse = tl.math.div_rn(tl.full([BLOCK_M], 4.0 / 3.0, tl.float32), tl.where(empty, 1.0, total))
    # The power of two of V last, so that neither quotient leaves float32 where the result does not.
    out = tl.where(
        empty[:, None], 0.0, tl.math.div_rn(acc * inverse[:, None], tl.load(v_scale_ptr + bg))
    )
    cols = tl.arange(0, BLOCK_DV)
    at = out_ptr + ((b.to(tl.int64) * rows + rows_at) * heads + h)[:, None] * dim_v + cols[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (cols < dim_v)[None, :])
    total = total * (4.0 / 3.0)
    lse = natural_log(tl.where(empty, 1.0, total), reference + FLOOR)
    row_index = bh.to(tl.int64) * rows + rows_at
    tl.store(lse_ptr + row_index, tl.where(empty, float("-inf"), lse), mask=live)
    tl.store(statistics_ptr + row_index, reference, mask=live)
    tl.store(statistics_ptr + total_rows + row_index, total, mask=live)


def swapped_keys(rule: DirectP) -> bool:
    """Whether K and V operands have their rows at `swap_pairs`: with every fourth pair exact, one 2^x in four is computed, not all."""
    return rule.exact_every == 4


def direct_p_tile(wide: int, wide_v: int) -> dict[str, int]:
    """Tile, warps and stages by head dims, measured on an H200. A tile holds the sampled keys."""
    large = max(wide, wide_v) > 128
    return {
        "BLOCK_M": 64 if large else 128,
        "BLOCK_N": TILE_N,
        "num_warps": 8,
        "num_stages": 1 if large else 3,
    }


def direct_p_forward(
    q: Operand,
    k: Operand,
    v: Operand,
    shape: Shape,
    results: tuple[Tensor, Tensor, Tensor],
    rule: DirectP,
    *,
    sink: Tensor | None,
    softmax_scale: float,
    wide: int,
    wide_v: int,
) -> None:
    """Fill out [B, S, H, Dv], lse [B, H, S] and the statistics (m, L) float32 [2, B, H, S].

    q and k are NVFP4 operands of `publish_fp4`, v is that of `publish_values` in `amplitude`; keys lie in the policy's order, those of
    the operands swapped as `swapped_keys` says.
    """
    out, lse, statistics = results
    config = direct_p_tile(wide, wide_v)
    tiles = triton.cdiv(shape.rows, config["BLOCK_M"])
    _direct_p_kernel[(tiles * shape.batch * shape.heads,)](
        q.data, k.data, v.data, q.scale, k.scale, v.scale, out, lse, statistics,
        sink, shape.hidden, shape.length_q, shape.length_k, *q.strides, *k.strides, *v.strides,
        shape.heads, shape.heads // shape.kv_heads, shape.rows, shape.keys, shape.dim_v, tiles,
        shape.batch * shape.heads * shape.rows, softmax_scale * 1.4426950408889634,
        SLOPE=rule.slope, OFFSET=rule.offset, EXACT_EVERY=rule.exact_every, FLOOR=rule.floor, HEADROOM=rule.headroom,
        SAMPLES=min(rule.samples, shape.keys) if rule.reference == "sampled" else 0,
        SWAPPED=swapped_keys(rule), SINK=sink is not None, HAS_HIDDEN=shape.hidden is not None, LENGTHS=shape.length_q is not None,
        BLOCK_D=wide, BLOCK_DV=wide_v, **config,
    )  # fmt: skip
